"""Two ways to one table: recorded by the shims while a model is built, and read off upstream's own model afterwards.

Neither knows of the other: the shims note the arguments of upstream's constructors, the other way goes by the names and
shapes of what was built, upstream's partition attributes, and as_built/tensors.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.model.as_built.build import builds_of, join_builds, parametrize_builds
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.patches import ALL_PATCHES, revert_patches
from mup_megatron.rules.table import Parametrization
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, make
from tests.model.as_built.given import given_of

VOCABULARY = 384
DENSE_MLA = {**MLA, "model": {key: value for key, value in MLA["model"].items() if key != "q_lora_rank"}}
UNSHARED = {
    part: {key: value for key, value in MOE[part].items() if not key.startswith("moe_shared")}
    for part in ("model", "base")
}

MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gpt3": (MIXED, "gpt3", {}),
    "llama": (MIXED, "llama", {}),
    "head-size": (HEAD_SIZE, "gpt3", {}),
    "tied-llama": (MIXED, "llama", {"model__share_embeddings_and_output_weights": True}),
    "untied-gpt3": (MIXED, "gpt3", {"model__share_embeddings_and_output_weights": False}),
    "qk-norm": (MIXED, "llama", {"model__qk_layernorm": True}),
    "qk-l2-norm": (MIXED, "llama", {"model__qk_l2_norm": True}),
    "sinks": (MIXED, "gpt3", {"model__softmax_type": "learnable"}),
    "output-gate": (MIXED, "llama", {"model__attention_output_gate": True}),
    "qkv-bias": (MIXED, "llama", {"model__add_qkv_bias": True}),
    "moe": (MOE, "llama", {}),
    "moe-more-experts": (
        MOE,
        "llama",
        {
            "base__num_moe_experts": 2,
            "model__moe_router_topk": 2,
            "parametrization__experts": "any_share",
        },
    ),
    "moe-biases": (UNSHARED, "gpt3", {}),
    "moe-expert-bias": (
        MOE,
        "llama",
        {"model__moe_router_enable_expert_bias": True, "model__moe_router_score_function": "sigmoid"},
    ),
    "mla": (MLA, "llama", {}),
    # Without norms, which megatron-core 0.19 makes by Transformer Engine for queries that are not compressed.
    "mla-dense-queries": (DENSE_MLA, "llama", {"model__qk_layernorm": False}),
    "mla-unnormed": (MLA, "llama", {"model__qk_layernorm": False}),
    "mtp": (MIXED, "llama", {"model__mtp_num_layers": 1}),
    "moe-mtp": (MOE, "llama", {"model__mtp_num_layers": 1}),
}


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Any:
    """MLA's rotary embedding, sinks and the expert bias are made on the current device."""
    upstream.prepare_process()
    yield
    revert_patches(ALL_PATCHES)


def as_built(config: Config) -> Parametrization:
    layers = range(config.model.num_layers)
    builds = builds_of(config, given_of(config, config.model.padded_vocab_size(VOCABULARY)), layers)
    return parametrize_builds(config, join_builds([builds]))


@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_one_table(name: str) -> None:
    """Names, order, shapes, records, initial values, rates, epsilon, decay and multipliers, all exactly equal."""
    growth, architecture, changed = MODELS[name]
    config = make(growth, architecture, **changed)
    recorded, built = parametrize(config, VOCABULARY), as_built(config)
    assert list(built.tensors) == list(recorded.tensors)
    for tensor, row in recorded.tensors.items():
        assert built.tensors[tensor] == row, tensor
    assert built.forward == recorded.forward
    assert built.groups.keys() == recorded.groups.keys()
