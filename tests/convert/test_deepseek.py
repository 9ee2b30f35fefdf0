"""export --to hf of multi-latent attention: transformers' DeepSeek-V3 is the oracle, part by part and left out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mup_megatron.config import Config
from mup_megatron.config.load import load_config
from mup_megatron.convert.export import export_hugging_face, export_safetensors, open_source
from mup_megatron.convert.export.hugging_face import architecture_of
from mup_megatron.parallel import upstream
from mup_megatron.util.errors import ConfigError
from tests.convert.sources import MULTIPLIERS, Trained, deviation, own_logits, train
from tests.convert.test_hugging_face import check, close, load, logits, saved
from tests.helpers.configs import MLA, make
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "DeepseekV3ForCausalLM"
# As DeepSeek-V3 has them, the first layer dense: experts' FFN ×5/2, shared experts' too, two of them.
EXPERTS: dict[str, Any] = {
    "model": {
        **MLA["model"],
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 40,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 80,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "base": {**MLA["base"], "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 32},
}
# At this base and with these betas, the range of partly interpolated dimensions (1 to 4 of 4) moves with each of them.
YARN = {
    "model__rotary_base": 100,
    "model__rope_type": "yarn",
    "model__rotary_scaling_factor": 4.0,
    "model__original_max_position_embeddings": 32,
    "model__beta_fast": 1.0,
    "model__beta_slow": 0.1,
    "model__mscale": 0.7,
    "model__mscale_all_dim": 1.5,
}
KEYS = {
    **{key: value for key, value in MULTIPLIERS.items() if key not in ("base__num_layers", "parametrization__depth")},
    "model__max_position_embeddings": 128,
    "hparams__init_method_std": 0.15,
    "training__train_steps": 3,
    "training__lr_warmup_steps": 1,
    "training__checkpoint_interval": 3,
}
# An epsilon that is felt.
WHOLE: dict[str, Any] = {**YARN, "model__mtp_num_layers": 1, "model__layernorm_epsilon": 0.01}
SCALE = (0.1 * 1.5 * math.log(4) + 1) ** 2 / math.sqrt(20)


def config_of(growth: dict[str, Any], **keys: Any) -> Config:
    return make(growth, "llama", **{**KEYS, **keys})


@pytest.fixture(scope="module")
def deepseek(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All of it at once."""
    upstream.prepare_process()
    source = open_source(train(ranks, tmp_path_factory.mktemp("deepseek"), config_of(EXPERTS, **WHOLE)))
    return Trained(source, own_logits(source))


@pytest.fixture(scope="module")
def exported(deepseek: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek") / "hf"
    export_hugging_face(deepseek.source, folder)
    return folder


def test_the_exported_model_is_the_checkpoints(deepseek: Trained, exported: Path) -> None:
    check(deepseek, exported, NAME)


# --- what is left out is seen ---


def edited(exported: Path, folder: Path, **changes: Any) -> Path:
    """The exported folder whose config.json says otherwise; keys of RoPE's parameters among them."""
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).symlink_to(path)
    described = json.loads((exported / "config.json").read_text())
    for key, value in changes.items():
        (described["rope_parameters"] if key in described["rope_parameters"] else described)[key] = value
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**described, "rope_scaling": None}))
    return folder


OTHERWISE: dict[str, Any] = {
    "rope_interleave": False,
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 1.5,
    "mscale_all_dim": 0.7,
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


def test_every_key_of_the_config_counts(deepseek: Trained, exported: Path, tmp_path: Path) -> None:
    """A key that says otherwise is another function, by far more than the 1e-5 that the test above allows."""
    for key, value in OTHERWISE.items():
        found = deviation(logits(edited(exported, tmp_path / key, **{key: value})), deepseek.logits)
        assert found > 1e-3, key


def without(exported: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> torch.Tensor:
    """Logits of the folder with other tensors."""
    edited(exported, folder)
    tensors = load_file(exported / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return logits(folder)


def test_expert_biases_count(deepseek: Trained, exported: Path, tmp_path: Path) -> None:
    """They are the checkpoint's, in float32 under bf16 too; with zeros in their place other experts are chosen."""
    name, mine = "decoder.layers.1.mlp.router.expert_bias", "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = deepseek.source.weights.read(name)
    assert torch.unique(bias).numel() > 1
    assert torch.equal(load_file(exported / "model.safetensors")[mine], bias)
    export_hugging_face(deepseek.source, tmp_path / "bf16", dtype="bf16")
    halves = load_file(tmp_path / "bf16" / "model.safetensors")
    assert torch.equal(halves.pop(mine), bias)
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}
    zeros = without(exported, tmp_path / "zeros", lambda tensors: tensors[mine].zero_())
    assert deviation(zeros, deepseek.logits) > 1e-3
    export_safetensors(deepseek.source, tmp_path / "own", dtype="bf16")
    assert torch.equal(load_file(tmp_path / "own" / "model.safetensors")[name], bias)


def test_factors_by_hand(deepseek: Trained, exported: Path) -> None:
    """Norms of the latents have the epsilon 1e-6, and had 0.01: rows before them take sqrt(1e-4).

    Head 20 over 12, YaRN's own factor left to the class: 1.75 · sqrt(12/20). Branches 5, embedding 0.3, head 3 · 2/3.
    """
    source, found = deepseek.source, load_file(exported / "model.safetensors")
    attention, mine = "decoder.layers.1.self_attention.", "model.layers.1.self_attn."
    down = saved(source, f"{attention}linear_kv_down_proj.weight", 56, 96)
    close(found[f"{mine}kv_a_proj_with_mqa.weight"], torch.cat([down[:48] * 0.01, down[48:]]))
    close(found[f"{mine}q_a_proj.weight"], saved(source, f"{attention}linear_q_down_proj.weight", 24, 96) * 0.01)
    query = saved(source, f"{attention}linear_q_up_proj.weight", 160, 24)
    close(found[f"{mine}q_b_proj.weight"], query * (1.75 * math.sqrt(12 / 20)))
    close(found[f"{mine}kv_b_proj.weight"], saved(source, f"{attention}linear_kv_up_proj.weight", 208, 48))
    close(found[f"{mine}o_proj.weight"], saved(source, f"{attention}linear_proj.weight", 96, 112) * 5.0)
    mlp, theirs = "model.layers.1.mlp.", "decoder.layers.1.mlp."
    gate_up = saved(source, f"{theirs}experts.local_experts.7.linear_fc1.weight", 80, 96)
    close(torch.cat([found[f"{mlp}experts.7.{name}_proj.weight"] for name in ("gate", "up")]), gate_up)
    down = saved(source, f"{theirs}shared_experts.linear_fc2.weight", 96, 80)
    close(found[f"{mlp}shared_experts.down_proj.weight"], down * 5.0)
    close(found[f"{mlp}gate.weight"], saved(source, f"{theirs}router.weight", 8, 96))
    close(found["lm_head.weight"], saved(source, "output_layer.weight", 384, 96)[:375] * 2.0)
    assert not [name for name in found if name.startswith(("mtp", "model.layers.2"))]


NEUTRAL = {"softmax_scale": SCALE, "readout": 1.0, "embedding": 1.0, "residual": 1.0}


@pytest.mark.parametrize(
    "multiplier", [name if name == "softmax_scale" else pytest.param(name, marks=pytest.mark.slow) for name in NEUTRAL]
)
def test_a_multiplier_left_out_is_seen(deepseek: Trained, multiplier: str, tmp_path: Path) -> None:
    """The logits are others, by far; and they are exactly those of the checkpoint without this multiplier."""
    source = deepseek.source
    bare = source.parametrization.replaced(None, **{multiplier: NEUTRAL[multiplier]})
    export_hugging_face(dataclasses.replace(source, parametrization=bare), tmp_path / "hf")
    found = logits(tmp_path / "hf")
    assert deviation(found, deepseek.logits) > 1e-2
    assert deviation(found, own_logits(source, bare)) < 1e-5


# --- models that are not quite DeepSeek's ---

NO_GROUPS: dict[str, Any] = {"model__moe_router_num_groups": None, "model__moe_router_group_topk": None}
NO_SHARED: dict[str, Any] = {
    "model": {**EXPERTS["model"], "moe_shared_expert_intermediate_size": None},
    "base": {**MLA["base"], "moe_ffn_hidden_size": 16},
}
# Growth, keys, layout.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "TP 2": (EXPERTS, {**WHOLE, "parallel__sequence_parallel": True}, "TP 2"),
    "EP 2": (EXPERTS, WHOLE, "EP 2"),
    "PP 2": (EXPERTS, {**WHOLE, "model__mtp_num_layers": None}, "PP 2"),
    "ZeRO 1": (EXPERTS, WHOLE, "ZeRO 1"),
    "ZeRO 3": (MLA, YARN, "ZeRO 3"),
    "dense, tied": (MLA, {"model__share_embeddings_and_output_weights": True}, "one rank"),
    "queries not compressed": (MLA, {"model__q_lora_rank": None}, "one rank"),
    "no gains": (MLA, {"model__norm_gains": "none", "model__layernorm_epsilon": 0.1}, "one rank"),
    "gains around 0": (MLA, {"model__layernorm_zero_centered_gamma": True}, "one rank"),
    "YaRN, all dimensions": (MLA, {**YARN, "model__mscale": 0.0}, "one rank"),
    "YaRN, the rotary part": (MLA, {**YARN, "model__mscale_all_dim": 0.0}, "one rank"),
    "heads that do not divide the hidden size": (MLA, {"model__num_attention_heads": 5}, "one rank"),
    "no groups, no biases": (
        EXPERTS,
        {
            **NO_GROUPS,
            "model__moe_router_enable_expert_bias": False,
            "model__moe_router_bias_update_rate": 1e-3,
            "model__moe_router_topk_scaling_factor": None,
        },
        "one rank",
    ),
    "one expert per token": (EXPERTS, {**NO_GROUPS, "model__moe_router_topk": 1}, "one rank"),
    "no shared experts": (NO_SHARED, {"model__moe_layer_freq": 1}, "one rank"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(ranks: Ranks, name: str, tmp_path: Path) -> None:
    growth, keys, layout = VARIANTS[name]
    upstream.prepare_process()
    source = open_source(train(ranks, tmp_path, config_of(growth, **keys), layout))
    export_hugging_face(source, tmp_path / "hf", max_shard_size=100_000)
    check(Trained(source, own_logits(source)), tmp_path / "hf", NAME)


# --- what is refused ---

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softmax": (
        {"model__moe_router_score_function": "softmax", "model__moe_router_enable_expert_bias": False},
        r"model\.moe_router_score_function: multi-latent attention with experts that are scored by softmax, which",
    ),
    "groups of one": (
        {"model__moe_router_num_groups": 8, "model__moe_router_group_topk": 4},
        r"model\.moe_router_group_topk: groups of experts that are chosen by their best 1, and not by their best 2",
    ),
    "dense layers in between": ({"model__moe_layer_freq": [1, 0]}, r"model\.moe_layer_freq: dense layers after layers"),
    "a gate": ({"model__moe_shared_expert_gate": True}, r"model\.moe_shared_expert_gate: a gate on the shared experts"),
    "shared experts of another size": (
        {"model__moe_shared_expert_intermediate_size": 48},
        r"shared experts of 48 \(no multiple of moe_ffn_hidden_size, 40\), which DeepseekV3ForCausalLM does not",
    ),
    "no norms of the latents": (
        {"model__qk_layernorm": False},
        r"model\.qk_layernorm: multi-latent attention without norms of the latents",
    ),
    "positions in the embedding": (
        {"model__position_embedding_type": "learned_absolute"},
        r"model\.position_embedding_type: multi-latent attention with positions learned_absolute",
    ),
    "part of RoPE": ({"model__rotary_percent": 0.5}, r"model\.rotary_percent: RoPE on a part"),
    "LayerNorm": ({"model__normalization": "LayerNorm"}, r"model\.normalization: LayerNorm, which"),
    "no gate": ({"model__gated_linear_unit": False}, r"model\.gated_linear_unit: an MLP without gate"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_counterpart(what: str) -> None:
    keys, sentence = REFUSED[what]
    if what == "softmax":
        keys = {**keys, "model__moe_router_bias_update_rate": 1e-3}
    with pytest.raises(ConfigError, match=sentence):
        architecture_of(config_of(EXPERTS, **keys), keep_multipliers=False)


def test_biases_have_no_counterpart() -> None:
    with pytest.raises(ConfigError, match=r"model\.add_bias_linear: biases, which DeepseekV3ForCausalLM does not have"):
        architecture_of(config_of(MLA, model__add_bias_linear=True), keep_multipliers=False)


def test_it_keeps_no_multipliers() -> None:
    sentence = r"multi_latent_attention: DeepseekV3ForCausalLM has no multipliers of its own; expected no --keep"
    with pytest.raises(ConfigError, match=sentence):
        architecture_of(config_of(MLA), keep_multipliers=True)


def test_the_shipped_config_is_deepseeks(deepseek: Trained) -> None:
    """DeepSeek-V3's own config is what transformers' class has as defaults."""
    config = load_config(Path(__file__).parents[2] / "configs" / "deepseek" / "v3-671b.yaml")
    architecture = architecture_of(config, keep_multipliers=False)
    found = architecture.config(dataclasses.replace(deepseek.source.parametrization, config=config), "silu")
    expected = transformers.DeepseekV3Config().to_dict()
    same = set(found) & set(expected) - {"architectures", "initializer_range", "num_nextn_predict_layers"}
    assert len(same) > 25
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}


def test_config_as_transformers_reads_it(exported: Path) -> None:
    """Where transformers has names of its own for what older ones have written."""
    found = load(exported).config
    assert (found.num_mtp_layers, found.num_local_experts, found.head_dim) == (0, 8, 8)
    assert found.rope_parameters["rope_type"] == "yarn"
