"""Megatron-Bridge's own recipes in µP, with the layers that they choose: Transformer Engine's, built on a CPU.

A recipe reads sizes from a config of the model hub; here one of the same family, made small, lies in a folder of that
name. All is as the recipe has it but for its layout and what asks for CUDA (`bodies.explained`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.bridge import bodies
from tests.bridge.importing import with_engine
from tests.bridge.test_installed import NOT
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.skipif(NOT is not None, reason=str(NOT))
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 2,
    "topk_group": 1,
    **ROUTED,
}
# Module and name of the recipe; name on the hub, class of transformers' config, sizes.
RECIPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama32_1b": ("llama", "meta-llama/Llama-3.2-1B", "Llama", {}),
    "qwen25_500m": ("qwen", "Qwen/Qwen2.5-0.5B", "Qwen2", {}),
    "qwen3_600m": ("qwen", "Qwen/Qwen3-0.6B", "Qwen3", {}),
    "qwen3_30b_a3b": ("qwen", "Qwen/Qwen3-30B-A3B", "Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 64}),
    "gpt_oss_20b": ("gpt_oss", "openai/gpt-oss-20b", "GptOss", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2_lite": ("deepseek", "deepseek-ai/DeepSeek-V2-Lite", "DeepseekV2", LATENT),
    "deepseek_v3": ("deepseek", "deepseek-ai/DeepSeek-V3", "DeepseekV3", LATENT),
    "moonlight_16b": ("moonlight", "moonshotai/Moonlight-16B-A3B", "DeepseekV3", LATENT),
    "olmoe_7b": ("olmoe", "allenai/OLMoE-1B-7B-0125", "Olmoe", EXPERTS),
    "glm45_air_106b": ("glm", "zai-org/GLM-4.5-Air", "Glm4Moe", ROUTED),
}
ROW = re.compile(r"^ (\S+\.weight)\b")
RATE = re.compile(r"^lr \S+ \(×(\S+)\)")
# Multiplied by a hidden vector, whose size is twice the base's; and by one of a size that does not grow.
FROM_HIDDEN = ("linear_qkv.weight", "linear_q_down_proj.weight", "linear_kv_down_proj.weight", "linear_fc1.weight")
FROM_FIXED = ("linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_fc2.weight")


@pytest.fixture(scope="module")
def ranks() -> Any:
    """A pool whose ranks have Bridge and Transformer Engine."""
    pool = Ranks(with_engine)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_explained(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """From half the hidden size: what reads hidden vectors has half the rate; the embedding has all of it."""
    module, hub, family, sizes = RECIPES[name]
    (found,) = ranks.run(
        1,
        bodies.explained,
        folder=str(tmp_path),
        module=module,
        name=name,
        hub=hub,
        family=family,
        sizes={**SMALL, **sizes},
    )
    assert found["status"] == 0, found["said"]
    rates: dict[str, float] = {}
    rate = 0.0
    for line in found["printed"].splitlines():
        if match := RATE.match(line):
            rate = float(match[1])
        elif match := ROW.match(line):
            rates[match[1]] = rate
    read = {tensor: rate for tensor, rate in rates.items() if tensor.endswith(FROM_HIDDEN)}
    others = {
        tensor: rate for tensor, rate in rates.items() if tensor.endswith((*FROM_FIXED, "word_embeddings.weight"))
    }
    assert len(read) >= 2
    assert set(read.values()) == {0.5}, read
    assert len(others) >= 2
    assert set(others.values()) == {1.0}, others
