"""Identity 3 (docs/parametrization.md, section 7): (A, init, rate, eps, λ) → (Aθ, init/θ, rate/θ, eps·θ, λθ) for any θ.

On the real model, through the real engine: losses along the trajectory stay the same to the last bit for θ a power of
two, clipping off. SGD takes rate/θ² and λθ².
"""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

ADAM = {"lr": -1, "eps": 1, "weight_decay": 1}
SGD = {"lr": -2, "eps": 0, "weight_decay": 2}
TENSORS = ["word_embeddings", "output_layer", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def settings(architecture: str, **overrides: Any) -> Config:
    """Eps near the size of the gradients and a decay that is felt, so that each power counts."""
    base = {
        "parallel__zero_stage": 0,
        "training__clip_grad": 0.0,
        "optimizer__eps": 1e-3,
        "hparams__weight_decay": 1.0,
    }
    config = make(MIXED, architecture, **{**base, **overrides})
    prepare(config)
    return config


def losses(ranks: Ranks, config: Config, tensor: str, theta: float, powers: dict[str, int]) -> list[float]:
    return ranks.run(1, bodies.rescaled, config=config, tensor=tensor, theta=theta, powers=powers, steps=6)[0]


@pytest.fixture(scope="module")
def untouched(ranks: Ranks) -> dict[str, list[float]]:
    return {
        architecture: losses(ranks, settings(architecture), "linear_fc1", 1.0, ADAM)
        for architecture in ("gpt3", "llama")
    }


@pytest.mark.parametrize("theta", [4.0, pytest.param(0.125, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tensor", TENSORS)
def test_adam(ranks: Ranks, untouched: dict[str, list[float]], tensor: str, theta: float) -> None:
    assert losses(ranks, settings("llama"), tensor, theta, ADAM) == untouched["llama"]


def test_a_tied_weight_takes_it_in_both_uses(ranks: Ranks, untouched: dict[str, list[float]]) -> None:
    assert losses(ranks, settings("gpt3"), "word_embeddings", 4.0, ADAM) == untouched["gpt3"]


def test_sgd(ranks: Ranks) -> None:
    growth = {"model__num_query_groups": 4, "base__num_query_groups": 2}
    config = settings("llama", optimizer__name="sgd", hparams__lr=0.3, hparams__weight_decay=0.01, **growth)
    whole = losses(ranks, config, "linear_fc1", 1.0, SGD)
    assert losses(ranks, config, "linear_fc1", 4.0, SGD) == whole
    assert losses(ranks, config, "linear_fc1", 4.0, ADAM) != whole


@pytest.mark.parametrize("left_out", ["lr", "eps", "weight_decay"])
def test_each_power_counts(ranks: Ranks, untouched: dict[str, list[float]], left_out: str) -> None:
    """Negative control."""
    assert losses(ranks, settings("llama"), "linear_fc1", 4.0, {**ADAM, left_out: 0}) != untouched["llama"]
