"""Identity 1 (docs/parametrization.md, section 7): at the base shape µP is Megatron's standard parametrization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.configs import HEAD_SIZE, MIXED, T5, make, make_t5
from tests.helpers.distributed import Ranks


def at_base(growth: dict[str, Any], architecture: str, **overrides: Any) -> Config:
    sizes = {**growth["model"], **growth["base"]}
    return make({"model": sizes, "base": growth["base"]}, architecture, parallel__zero_stage=1, **overrides)


def run(ranks: Ranks, config: Config, count: int) -> list[dict[str, Any]]:
    prepare(config)
    return ranks.run(count, bodies.plain_and_ours, config=config, steps=8)


@pytest.mark.parametrize(
    ("architecture", "growth", "count"), [("gpt3", MIXED, 1), ("llama", HEAD_SIZE, 1), ("llama", MIXED, 2)]
)
def test_no_op_to_the_last_bit(ranks: Ranks, architecture: str, growth: dict[str, Any], count: int) -> None:
    config = at_base(growth, architecture, parallel__tensor_model_parallel_size=1)
    for result in run(ranks, config, count):
        assert result["losses"]["ours"] == result["losses"]["plain"]
        for name, value in result["weights"]["plain"].items():
            np.testing.assert_array_equal(result["weights"]["ours"][name], value, err_msg=name)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_encoder_decoder(ranks: Ranks, count: int) -> None:
    sizes = {f"model__{name}": size for name, size in T5["base"].items()}
    for result in run(ranks, make_t5(parallel__tensor_model_parallel_size=1, parallel__zero_stage=1, **sizes), count):
        assert result["losses"]["ours"] == result["losses"]["plain"]
        assert len(result["weights"]["plain"]) == 83
        for name, value in result["weights"]["plain"].items():
            np.testing.assert_array_equal(result["weights"]["ours"][name], value, err_msg=name)


@pytest.mark.parametrize(
    "change",
    [
        {"hparams__attention_multiplier": 1.001},
        {"hparams__output_multiplier": 1.001},
        {"hparams__embedding_multiplier": 1.001},
        {"hparams__residual_multiplier": 1.001},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_multiplier_breaks_it(ranks: Ranks, change: dict[str, float]) -> None:
    """Negative control: the comparison sees a thousandth of any forward multiplier."""
    result = run(ranks, at_base(MIXED, "gpt3", **change), 1)[0]
    assert result["losses"]["ours"] != result["losses"]["plain"]


def test_another_width_breaks_it(ranks: Ranks) -> None:
    """Negative control: off the base, the same weights train differently."""
    result = run(ranks, make(MIXED, "gpt3", parallel__zero_stage=1), 1)[0]
    assert result["losses"]["ours"] != result["losses"]["plain"]
