"""Every tuned value, changed alone, reaches the place where it belongs: the target's explain, and its first step.

What the first step must do is worked out here from what flows through the model, never by the library's rules.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.tuning.family import digested
from mup_megatron.tuning.space import same, value_of, with_values
from tests.helpers import bodies
from tests.helpers.configs import HEAD_SIZE, make
from tests.helpers.distributed import Ranks

# Head size 24 over a base of 16, hidden 64 over 32; one micro-batch, so that a step's loss is one batch's.
SETTINGS = {"training__micro_batch_size": 8, "training__lr_warmup_steps": 0, "training__clip_grad": 0.0}


def config_with(keys: dict[str, Any] | None = None, /, **values: Any) -> Any:
    return with_values(make(HEAD_SIZE, "gpt3", **SETTINGS, **(keys or {})), values)


def explained(keys: dict[str, Any] | None = None, /, **values: Any) -> dict[str, Any]:
    config = config_with(keys, **values)
    return explain(parametrize(config, 375), resolve_layout(config, 1))


@pytest.fixture(scope="module")
def step(ranks: Ranks) -> Any:
    @cache
    def run(**values: Any) -> dict[str, Any]:
        return ranks.run(1, bodies.first_step, config=config_with(**values))[0]

    return run


def differing(one: Any, other: Any, path: str = "") -> set[str]:
    """Names of the explained quantities that differ, whatever the parameter."""
    if isinstance(one, dict):
        return set().union(*(differing(one[key], other[key], key) for key in one))
    if isinstance(one, list):
        return set().union(set(), *(differing(a, b, path) for a, b in zip(one, other, strict=True)))
    return set() if one == other else {path}


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-np.take_along_axis(log_probabilities, labels[..., None], -1).mean())


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        ({"lr": 0.016}, {"lr"}),
        ({"init_method_std": 0.1}, {"init_std", "init_method_std"}),
        ({"embedding_multiplier": 2.0}, {"embedding", "forward_multiplier"}),
        ({"attention_multiplier": 2.0}, {"softmax_scale"}),
        ({"output_multiplier": 2.0}, {"readout"}),
        ({"residual_multiplier": 2.0}, {"residual"}),
        ({"lr_schedule": "linear"}, {"lr_schedule"}),
        ({"weight_decay": 0.2}, {"weight_decay"}),
        ({"one_minus_beta1": 0.2}, {"betas"}),
        ({"one_minus_beta2": 0.02}, {"betas"}),
        ({"one_minus_momentum": 0.2}, {"momentum"}),
        ({"relative_bias_multiplier": 2.0}, {"relative_bias", "forward_multiplier"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_explain_shows_it_and_nothing_else(value: dict[str, Any], changes: set[str]) -> None:
    keys = {"model__position_embedding_type": "relative"} if "relative_bias_multiplier" in value else {}
    assert differing(explained(keys), explained(keys, **value)) - {*value} == changes - {*value}


def test_betas_are_searched_as_their_distance_from_1() -> None:
    """By hand: 1 - 0.04 = 0.96. What a search draws has more digits than a beta keeps, and is the same value."""
    config = config_with(one_minus_beta1=0.2, one_minus_beta2=0.04)
    assert config.optimizer.betas == [0.8, 0.96]
    assert (value_of(config, "one_minus_beta1"), value_of(config, "one_minus_beta2")) == (0.2, 0.04)
    drawn = 0.031622776601683794
    found = value_of(config_with(one_minus_beta2=drawn), "one_minus_beta2")
    assert found != drawn
    assert same("one_minus_beta2", found, drawn)
    assert not same("one_minus_beta2", found, 0.0316227)
    assert not same("lr", found, drawn)


def test_a_momentum_is_searched_as_its_distance_from_1() -> None:
    config = config_with({"optimizer__name": "muon", "parallel__engine": "megatron"}, one_minus_momentum=0.04)
    assert config.optimizer.momentum == 0.96
    assert value_of(config, "one_minus_momentum") == 0.04

    def family(momentum: float, search: str) -> Any:
        keys = {"optimizer__momentum": momentum, "tuning__search": {search: {"log_uniform": [0.01, 0.2]}}}
        return digested(config_with({"optimizer__name": "sgd", **keys}))

    assert family(0.9, "one_minus_momentum") == family(0.95, "one_minus_momentum")
    assert family(0.9, "lr") != family(0.95, "lr")


def test_betas_that_are_searched_are_the_records() -> None:
    """Two configs whose betas differ are one family where tuning replaces them, and two where it does not."""

    def family(beta: float, search: str) -> Any:
        keys = {"optimizer__betas": [0.9, beta], "tuning__search": {search: {"log_uniform": [0.01, 0.2]}}}
        return digested(config_with(keys))

    assert family(0.95, "one_minus_beta2") == family(0.99, "one_minus_beta2")
    assert family(0.95, "lr") != family(0.99, "lr")


def test_every_rate_doubles() -> None:
    pairs = zip(explained()["parameters"], explained(lr=0.016)["parameters"], strict=True)
    assert all(doubled["lr"] == 2 * single["lr"] for single, doubled in pairs)


def test_lr_doubles_the_first_update(step: Any) -> None:
    """Adam's first update is lr · (g/(|g| + ε') + λ·w): linear in lr."""
    single, doubled = step(), step(lr=0.016)
    assert doubled["loss"] == single["loss"]
    for name, update in single["update"].items():
        np.testing.assert_allclose(
            doubled["update"][name], 2 * update, rtol=1e-3, atol=1e-6 * np.abs(update).max() + 2e-8
        )


def test_the_schedule_sets_the_first_update(step: Any) -> None:
    """Step 5 of 20, down to a tenth: cosine 0.1 + 0.9·(1 + cos(π/4))/2, linear 0.1 + 0.9·0.75."""
    ratio = (0.1 + 0.9 * 0.75) / (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    single, linear = step(), step(lr_schedule="linear")
    for name, update in single["update"].items():
        np.testing.assert_allclose(
            linear["update"][name], ratio * update, rtol=1e-3, atol=1e-6 * np.abs(update).max() + 2e-8
        )


def test_init_doubles_every_weight(step: Any) -> None:
    single, doubled = step()["weights"], step(init_method_std=0.1)["weights"]
    for name, weight in single.items():
        constant = "norm" in name or name.endswith("bias")
        np.testing.assert_array_equal(doubled[name], weight if constant else 2 * weight, err_msg=name)


def test_the_embedding_multiplier_doubles_what_enters_the_trunk(step: Any) -> None:
    single, doubled = step(), step(embedding_multiplier=2.0)
    np.testing.assert_array_equal(doubled["seen"]["embedding out"][0], 2 * single["seen"]["embedding out"][0])
    assert doubled["loss"] != single["loss"]


def test_the_output_multiplier_doubles_the_logits(step: Any) -> None:
    single, doubled = step(), step(output_multiplier=2.0)
    np.testing.assert_array_equal(doubled["logits"], 2 * single["logits"])
    assert single["loss"] == pytest.approx(cross_entropy(single["logits"], single["labels"]), rel=1e-6)
    assert doubled["loss"] == pytest.approx(cross_entropy(2 * single["logits"], single["labels"]), rel=1e-6)
    # And 1/m_in = 32/64 is in both: the logits of a tied head are half of W h.
    trunk, table = single["seen"]["trunk out"][0], single["weights"]["embedding.word_embeddings.weight"]
    by_hand = 0.5 * trunk.transpose(1, 0, 2) @ table.T.astype(float)
    np.testing.assert_allclose(single["logits"], by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("multiplier", [1.0, 2.0])
def test_the_attention_multiplier_scales_q_k(step: Any, multiplier: float) -> None:
    """Attention by hand from query, key and value [s, b, heads, 24]: scale α/sqrt(24)·sqrt(16/24)."""
    seen = (step(attention_multiplier=2.0) if multiplier == 2.0 else step())["seen"]
    query, key, value = (part.transpose(1, 2, 0, 3) for part in seen["core in"][:3])
    logits = multiplier / math.sqrt(24) * math.sqrt(16 / 24) * query @ key.transpose(0, 1, 3, 2)
    logits = np.where(np.tri(32, dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    context = weights / weights.sum(-1, keepdims=True) @ value
    by_hand = context.transpose(2, 0, 1, 3).reshape(32, 8, -1)
    np.testing.assert_allclose(seen["core out"][0], by_hand, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("multiplier", [1.0, 2.0])
def test_the_residual_multiplier_scales_both_branches(step: Any, multiplier: float) -> None:
    seen = (step(residual_multiplier=2.0) if multiplier == 2.0 else step())["seen"]
    branches = sum(seen["attention out"]) + sum(seen["mlp out"])  # outputs and their biases
    by_hand = seen["embedding out"][0] + multiplier * branches
    np.testing.assert_allclose(seen["layer out"][0], by_hand, rtol=1e-4, atol=1e-6)
