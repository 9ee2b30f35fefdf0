"""Readings: by hand in float64, and the same numbers in every layout."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from mup_megatron.telemetry.reading import QUANTITIES, usual_interval
from mup_megatron.telemetry.series import series_name
from tests.helpers.comparison import Difference
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import Split
from tests.helpers.matrix import COVER, config_of
from tests.telemetry import bodies
from tests.telemetry.bodies import Found

STEPS = 3
FEW = [("gpt3, mixed", Split(3, data=2)), ("gpt3", Split("plain", pipeline=2, virtual=2))]
"""Cells of the quick tests."""
TOLERANCE = 1e-4


def prepared(model: str, split: Split | None = None) -> Config:
    config = config_of(model, split)
    prepare(config)
    return config


def compare(found: list[Found], expected: list[Found], tolerance: float = TOLERANCE) -> None:
    """Of what both have, and of names that only one has. Raises Difference."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        if apart := [name for name, quantity in ours if quantity == "copies apart"]:
            raise Difference(f"step {step}: ranks hold other copies of {apart[0]}")
        if missing := sorted(theirs.keys() - ours.keys()):
            raise Difference(f"step {step}: {missing[0][1]} of {missing[0][0]} was not measured")
        for (name, quantity), value in theirs.items():
            if abs(ours[name, quantity] - value) > tolerance * abs(value) + 1e-12:
                raise Difference(f"step {step}: {quantity} of {name} is {ours[name, quantity]:.8g}, not {value:.8g}")


@pytest.mark.parametrize("model", ["gpt3, mixed", pytest.param("llama, mixed", marks=pytest.mark.slow)])
def test_by_hand(ranks: Ranks, model: str) -> None:
    """Every output, weight, gradient and update, and what attention does, in one process."""
    config = prepared(model)
    (found,) = ranks.run(1, bodies.readings, config=config, steps=STEPS)
    (expected,) = ranks.run(1, bodies.by_hand, config=config, steps=STEPS)
    known = [{key: value for key, value in step.items() if key in found[0]} for step in expected]
    compare(found, known, 1e-6)
    quantities = {"output rms", "largest output", "largest logit", "attention entropy", "weight rms", "gradient rms"}
    assert {quantity for _, quantity in known[0]} == {*quantities, "update over weight", "rate", "decay", "schedule"}
    assert found[0].keys() == known[0].keys()


@functools.cache
def _whole(ranks: Ranks, model: str) -> list[Found]:
    (found,) = ranks.run(1, bodies.readings, config=prepared(model), steps=STEPS)
    return found


@pytest.mark.parametrize(
    ("model", "split"),
    [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}", marks=[pytest.mark.slow] * (cell not in FEW)) for cell in COVER],
)
def test_the_same_numbers_in_every_layout(ranks: Ranks, model: str, split: Split) -> None:
    config = prepared(model, split)
    for found in ranks.run(split.processes, bodies.readings, config=config, steps=STEPS):
        compare(found, _whole(ranks, model))
        compare(_whole(ranks, model), found)  # nor is there more


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_a_gradient_is_measured_before_it_is_clipped(ranks: Ranks, engine: str) -> None:
    """The same in the first step, which begins at the same weights, whatever the limit is."""
    keys: dict[str, Any] = {"parallel__engine": engine, "parallel__use_distributed_optimizer": False}
    config = config_of("gpt3, mixed", **keys)
    found, clipped = (
        ranks.run(1, bodies.readings, config=config_of("gpt3, mixed", **keys, training__clip_grad=limit), steps=1)[0]
        for limit in (config.training.clip_grad, 1e-3)
    )
    compare(clipped, found, 1e-9)


def test_a_module_that_breaks_its_hook_ends_no_run(ranks: Ranks) -> None:
    """Its series are not there, and all others are."""
    asked = {"config": prepared("gpt3, mixed"), "steps": 1}
    (found,) = ranks.run(1, bodies.readings, broken="attention_that_no_hook_understands", **asked)
    (whole,) = ranks.run(1, bodies.readings, **asked)
    missing = whole[0].keys() - found[0].keys()
    assert {quantity for _, quantity in missing} == {"largest logit", "attention entropy"}


def test_experts_of_a_layer_are_one_series() -> None:
    assert series_name("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight") == (
        "decoder.layers.1.mlp.experts.local_experts.*.linear_fc1.weight"
    )
    assert series_name("decoder.layers.1.mlp.experts.linear_fc2.weight12") == (
        "decoder.layers.1.mlp.experts.linear_fc2.weight*"
    )
    assert series_name("decoder.layers.12.mlp.linear_fc2.weight") == "decoder.layers.12.mlp.linear_fc2.weight"


def test_the_page_has_every_quantity(repository: Path) -> None:
    """docs/watching.md, each as the code describes it."""
    rows = re.findall(r"^\| `([a-z ]+)` \| [a-z]+ \| (.*) \|$", (repository / "docs/watching.md").read_text(), re.M)
    assert dict(rows) == QUANTITIES


def test_the_page_tells_what_a_reading_costs(repository: Path) -> None:
    """docs/watching.md, from the benchmark's results; at the usual interval less than half a percent of a run."""
    page = (repository / "docs/watching.md").read_text()
    for python in ("3.11", "3.12"):
        result = json.loads((repository / f"benchmarks/results/readings/{python}.json").read_text())
        assert result["every"] == usual_interval(10_000) == 100
        for size in result["sizes"]:
            ratio, share = size["read_over_plain"], size["share_of_a_run"]
            audit = size["audited_over_plain"]
            told = f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) | {share:.2%}"
            told += f" | {audit['median']:.2f} ({audit['min']:.2f} to {audit['max']:.2f})"
            assert f"| {python} | {size['seq_length']} | {told} |" in page
            assert audit["median"] < 2.0, "an audit may take one more step's time"
            assert share == pytest.approx((ratio["median"] - 1) / 100)
            assert share < 0.005
