"""Lion of every tensor under DeepSpeed: ZeRO 0 to 3 against one process, the first update, resuming."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.parallel.upstream import importable
from tests.helpers import bodies
from tests.helpers.comparison import Difference, deviation
from tests.helpers.configs import MIXED, MOE, make
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import STEPS, Split, check
from tests.helpers.parity import Page

_OWN = {"optimizer__name": "lion", "hparams__lr": 1e-3, "hparams__weight_decay": 0.3, "model__num_layers": 2}
OF_TORCH = {"optimizer__implementation": "emerging_optimizers"}
# An expert may get no token, and then has no gradient: with DeepSpeed's own Lion it would move nevertheless.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt3": (MIXED, _OWN),
    "moe": (MOE, {**_OWN, "model__moe_layer_freq": [0, 1]}),
}
installed = pytest.mark.skipif(not importable("emerging_optimizers"), reason="emerging_optimizers is not installed")
QUICK = Split(3, data=2)
SEQUENCE = Split(3, tensor=2, data=2, sequence=True)
SPLITS = (
    *(Split(stage, data=2) for stage in (0, 1, 2, 3)),
    *(Split(stage, tensor=2, data=2, sequence=True) for stage in (0, 1, 2, 3)),
)


def config_of(model: str, split: Split, **overrides: Any) -> Any:
    growth, own = MODELS[model]
    architecture = "gpt3" if model == "gpt3" else "llama"
    config = make(growth, architecture, **{**own, **split.overrides, **overrides})
    prepare(config)
    return config


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs in one process, made when first asked for."""

    @cache
    def run(model: str, implementation: str) -> dict[str, Any]:
        config = config_of(model, Split(0), optimizer__implementation=implementation)
        whole = ranks.run(1, bodies.train, config=config, steps=STEPS)[0]
        assert whole["losses"][0] - whole["losses"][-1] > 0.5
        return whole

    return run


@pytest.mark.slow
@installed
def test_no_layout_is_in_the_losses_of_torch_s(ranks: Ranks, reference: Any) -> None:
    config = config_of("gpt3", QUICK, **OF_TORCH)
    check(
        ranks.run(2, bodies.train, config=config, steps=STEPS), reference("gpt3", "emerging_optimizers"), QUICK, False
    )


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_no_layout_is_in_the_losses(ranks: Ranks, cpu_lion: None, reference: Any, parity: Page, split: Split) -> None:
    config = config_of("gpt3", split)
    assert resolve_auto(config).optimizer.implementation == "deepspeed_lion"
    with parity.cell("gpt3, Lion", "mixed", str(split)) as cell:
        whole = reference("gpt3", "auto")
        results = ranks.run(split.processes, bodies.train, config=config, steps=STEPS)
        cell.add(results, whole)
        check(results, whole, split, False)


@pytest.mark.slow
@pytest.mark.parametrize("split", [Split(1, expert=2, data=2), Split(3, data=2)], ids=str)
def test_no_layout_is_in_the_losses_of_experts(
    ranks: Ranks, cpu_lion: None, reference: Any, parity: Page, split: Split
) -> None:
    with parity.cell("moe, Lion", "mixed", str(split)) as cell:
        whole = reference("moe", "auto")
        results = ranks.run(split.processes, bodies.train, config=config_of("moe", split), steps=STEPS)
        cell.add(results, whole)
        check(results, whole, split)


@pytest.mark.slow
@installed
def test_deepspeed_s_is_torch_s(ranks: Ranks, cpu_lion: None, reference: Any) -> None:
    """20 losses; negative control: not as DeepSpeed has it, where rows of tokens that did not occur have moved."""
    ours, theirs = (reference("moe", name)["losses"] for name in ("auto", "emerging_optimizers"))
    assert ours == pytest.approx(theirs, rel=2e-5)
    config = config_of("moe", Split(0))
    own = ranks.run(1, bodies.train, config=config, steps=STEPS, broken="lion_as_deepspeed_has_it")[0]["losses"]
    assert own[:2] == ours[:2]  # the first rate is 0
    assert deviation(ours, theirs) < 2e-6
    assert deviation(own, theirs) > 1e-4


@pytest.mark.slow
@installed
def test_without_the_sequence_parallel_sum_they_differ(ranks: Ranks, reference: Any) -> None:
    """Negative control: the gradients of norms are each rank's own."""
    broken = "no_sequence_parallel_reduction"
    results = ranks.run(4, bodies.train, config=config_of("gpt3", SEQUENCE, **OF_TORCH), steps=STEPS, broken=broken)
    with pytest.raises(Difference, match=re.escape("grad_norms[0] on rank 0")):
        check(results, reference("gpt3", "emerging_optimizers"), SEQUENCE, False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_update_has_the_size_of_the_rate(ranks: Ranks, cpu_lion: None, stage: int) -> None:
    """A sign: coordinates move by their tensor's rate, embedding and gains too."""
    config = config_of("gpt3", Split(stage, tensor=2, data=2), hparams__weight_decay=0.0)
    rates = set()
    for result in ranks.run(4, bodies.first_update, config=config):
        for name, (change, rate) in result.items():
            assert change == pytest.approx(rate, rel=1e-3), name
            rates.add(rate)
    # Fan-in ratios: 3/2 of the hidden size, 5/2 of the FFN's, 2 of the heads', and what reads no growing size.
    assert sorted(rates) == pytest.approx([1e-3 / ratio for ratio in (2.5, 2, 1.5, 1)])


def resumed(ranks: Ranks, folder: Path, config: Any, broken: str = "nothing") -> list[float]:
    """Steps 0 to 4, saved; then everything is thrown away; then steps 5 to 8 from what was saved."""
    first = ranks.run(4, bodies.leg, config=config, start_at=0, stop_at=5, save=str(folder))[0]
    second = ranks.run(4, bodies.leg, config=config, start_at=5, stop_at=9, load=str(folder), broken=broken)[0]
    return [*first["losses"], *second["losses"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision"), [*((stage, "fp32") for stage in (0, 1, 2, 3)), *((stage, "bf16") for stage in (1, 2, 3))]
)
def test_stop_and_go_is_bitwise(ranks: Ranks, cpu_lion: None, stage: int, precision: str, tmp_path: Path) -> None:
    config = config_of("gpt3", Split(stage, tensor=2, data=2), training__precision=precision)
    whole = ranks.run(4, bodies.leg, config=config, start_at=0, stop_at=9)[0]["losses"]
    assert resumed(ranks, tmp_path, config) == whole


@pytest.mark.slow
def test_without_its_average_it_does_not_go_on(ranks: Ranks, cpu_lion: None, tmp_path: Path) -> None:
    """Negative control: weights alone; the first loss after them is the same, later ones are not."""
    config = config_of("gpt3", Split(1, tensor=2, data=2))
    whole = ranks.run(4, bodies.leg, config=config, start_at=0, stop_at=9)[0]["losses"]
    again = resumed(ranks, tmp_path, config, broken="load_weights_alone")
    assert again[:6] == whole[:6]
    assert again[8] != whole[8]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded(ranks: Ranks, cpu_lion: None, reference: Any, stage: int) -> None:
    split = Split(stage, data=2)
    results = ranks.run(2, bodies.train, config=config_of("gpt3", split, parallel__offload_optimizer=True), steps=STEPS)
    check(results, reference("gpt3", "auto"), split, False)
