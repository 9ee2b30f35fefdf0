"""Faults planted into runs that `mup_megatron.bridge` made µP: the audit names each by tensor and quantity."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.functional import silu

from tests.bridge import bodies
from tests.helpers.audit_bodies import FAULTS
from tests.helpers.audit_faults import FIRST_STEPS, GROUPS, INITIAL, MULTIPLIERS, WHOLE_GROUPS, apart
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.helpers.megatron_faults import ONE_RATE

pytestmark = needs_training
TENSOR = {"tensor_model_parallel_size": 2}
PACKS = [faults for kinds in (INITIAL, GROUPS, MULTIPLIERS, WHOLE_GROUPS, FIRST_STEPS) for faults in apart(kinds)]


def test_a_healthy_run(ranks: Ranks) -> None:
    for found in ranks.run(2, bodies.audited, faults=(), **TENSOR):
        assert (found["status"], found["wrong"], found["unseen"]) == (0, [], []), found["said"]


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "RMSNorm": {"normalization": "RMSNorm"},
    "SwiGLU": {"gated_linear_unit": True, "activation_func": silu},
    "no biases": {"add_bias_linear": False},
    "biases of queries": {"add_bias_linear": False, "add_qkv_bias": True},
    "two groups of queries": {"num_query_groups": 2},
    "norms of queries and keys": {"qk_layernorm": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "four layers": {"num_layers": 4},
    "two heads": {"num_attention_heads": 2, "kv_channels": 32},
    "a wide MLP": {"ffn_hidden_size": 512},
    "another size of values": {"init_method_std": 0.02},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "add_bias_linear": False},
}
# Tensor parallelism of experts wants norms in slices, which no CPU has.
HEALTHY = [(model, layout) for model in MODELS for layout in ({}, TENSOR) if not (model == "experts" and layout)]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each != ("gpt", {})), id=f"{each[0]}-{each[1]}")
        for each in HEALTHY
    ],
)
def test_a_healthy_model(ranks: Ranks, model: str, layout: dict[str, Any]) -> None:
    base = {"kv_channels": 8} if model == "two heads" else {"moe_ffn_hidden_size": 64} if model == "experts" else {}
    for found in ranks.run(2 if layout else 1, bodies.audited, faults=(), base=base, **MODELS[model], **layout):
        assert (found["status"], found["wrong"]) == (0, []), found["said"]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(pack, id=pack[0], marks=() if number % 12 == 0 else pytest.mark.slow)
        for number, pack in enumerate(PACKS)
    ],
)
def test_a_planted_fault_is_named(ranks: Ranks, faults: tuple[str, ...]) -> None:
    for found in ranks.run(2, bodies.audited, faults=faults, **TENSOR):
        for fault in map(FAULTS.__getitem__, faults):
            said = [line for line in found["wrong"] if line.startswith(f"{fault.tensor}: ") and fault.said in line]
            assert said, (fault, found["wrong"], found["said"])


def test_a_scheduler_that_resets_rates(ranks: Ranks) -> None:
    (found,) = ranks.run(1, bodies.audited, faults=(ONE_RATE,))
    assert any("mlp.linear_fc1.weight: learning rate 0.001" in line for line in found["wrong"]), found
