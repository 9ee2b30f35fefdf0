"""DeepSeek-V3 of Hugging Face: multi-latent attention, experts scored by sigmoid, shared experts, YaRN.

Public name: `DEEPSEEK`. transformers' `models/deepseek_v3` (5.23) is what config.json and names are written for;
megatron-core's `multi_latent_attention.py` and `moe_utils.py` compute the same, in the same order of rows: heads one
after another, in each the part without positions first, and rotary pairs side by side (`rope_interleave`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from mup_megatron.config import Config, Model
from mup_megatron.convert.export.architecture import Architecture, Parts, common, llama_like, refuse
from mup_megatron.convert.export.fold import EXPERT_BIAS, Factors, FoldedWeights
from mup_megatron.convert.export.folder import Part
from mup_megatron.rules import formulas
from mup_megatron.rules.table import Parametrization

_NAME = "DeepseekV3ForCausalLM"
_LATENT_EPSILON = 1e-6
"""Of the norms of the latents, whatever `rms_norm_eps` says: the class builds them without it."""
_OF_A_GROUP = 2
"""Experts whose scores add up to the score of their group."""
_MLP = ("gate_proj", "up_proj", "down_proj")


def _refuse(config: Config) -> None:
    """Raises ConfigError with the first key that the class does not compute."""
    model = config.model
    strange = {
        "normalization": (model.normalization != "RMSNorm", "LayerNorm"),
        "gated_linear_unit": (not model.gated_linear_unit, "an MLP without gate"),
        "position_embedding_type": (
            model.position_embedding_type != "rope",
            f"multi-latent attention with positions {model.position_embedding_type}",
        ),
        "rotary_percent": (model.rotary_percent != 1.0, "RoPE on a part of its dimensions"),
        "add_bias_linear": (model.add_bias_linear, "biases"),
        "qk_layernorm": (not model.qk_layernorm, "multi-latent attention without norms of the latents"),
    }
    refuse(config, _NAME, strange)
    if model.num_moe_experts is not None:
        _refuse_experts(config, model.num_moe_experts)


def _refuse_experts(config: Config, experts: int) -> None:
    model = config.model
    shared, groups = model.moe_shared_expert_intermediate_size or 0, model.moe_router_num_groups or 1
    of_a_group = model.moe_router_topk // (model.moe_router_group_topk or 1)
    kinds = model.moe_router_load_balancing_type
    strange = {
        "moe_layer_freq": (model.expert_layers != sorted(model.expert_layers), "dense layers after layers of experts"),
        "moe_router_score_function": (
            model.moe_router_score_function != "sigmoid",
            "multi-latent attention with experts that are scored by softmax",
        ),
        "moe_router_load_balancing_type": ("sinkhorn" in (kinds, *kinds), "experts chosen by sinkhorn"),
        "moe_router_group_topk": (
            groups > 1 and of_a_group != _OF_A_GROUP,
            f"groups of experts that are chosen by their best {of_a_group}, and not by their best {_OF_A_GROUP}",
        ),
        "num_moe_experts": (experts // groups < _OF_A_GROUP, "a single expert in a group"),
        "moe_shared_expert_intermediate_size": (
            shared % model.moe_ffn_size != 0,
            f"shared experts of {shared} (no multiple of moe_ffn_hidden_size, {model.moe_ffn_size})",
        ),
        "moe_shared_expert_gate": (model.moe_shared_expert_gate, "a gate on the shared experts"),
    }
    refuse(config, _NAME, strange)


def _config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    rope = _rope(model)
    return {
        **common(parametrization),
        "architectures": [_NAME],
        "model_type": "deepseek_v3",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_attention_heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "hidden_act": activation,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "rope_interleave": True,
        "rope_theta": float(model.rotary_base),  # as transformers 4 has it
        "rope_scaling": rope if rope["rope_type"] == "yarn" else None,
        "rope_parameters": {"rope_theta": float(model.rotary_base), **rope},  # as 5 has it
        "num_nextn_predict_layers": 0,  # multi-token prediction is not written
        **_experts(model),
    }


def _rope(model: Model) -> dict[str, Any]:
    if model.rope_type != "yarn":
        return {"rope_type": "default"}
    factor, mscale, all_dim = model.rotary_scaling_factor, model.mscale, model.mscale_all_dim
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": model.original_max_position_embeddings,
        "beta_fast": model.beta_fast,
        "beta_slow": model.beta_slow,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    if not (mscale and all_dim):
        # Of a zero among the two, transformers takes neither (modeling_rope_utils.py, `_compute_yarn_parameters`).
        found["attention_factor"] = formulas.yarn_mscale(factor, mscale) / formulas.yarn_mscale(factor, all_dim)
    return found


def _experts(model: Model) -> dict[str, Any]:
    dense = model.num_layers - sum(model.expert_layers)
    if model.num_moe_experts is None:
        return {"first_k_dense_replace": dense, "n_routed_experts": 1, "n_shared_experts": 1}
    return {
        "first_k_dense_replace": dense,
        "moe_intermediate_size": model.moe_ffn_size,
        "n_routed_experts": model.num_moe_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.moe_ffn_size,
        "num_experts_per_tok": model.moe_router_topk,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "norm_topk_prob": model.moe_router_topk > 1,  # as megatron-core: a single score is taken as it is
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        # What the first implementation asked for, and others still read.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }


def _factors(parametrization: Parametrization) -> dict[str, Factors]:
    """What makes the latents' norms those of the class.

    A norm with epsilon e of x is one with epsilon c²·e of c·x, and x is linear in the down-projection's rows.
    """
    model = parametrization.config.model
    c = math.sqrt(_LATENT_EPSILON / model.layernorm_epsilon)
    found: dict[str, Factors] = {}
    for layer in range(model.num_layers):
        attention = f"decoder.layers.{layer}.self_attention"
        found[f"{attention}.linear_kv_down_proj.weight"] = {"rank": c, "rope": 1.0}
        if model.q_lora_rank is not None:
            found[f"{attention}.linear_q_down_proj.weight"] = {None: c}
    return found


def _parts(weights: FoldedWeights, config: Config) -> list[Part]:
    model = config.model

    def mlp(parts: Parts, theirs: str, ours: str, layer: int) -> None:
        if model.expert_layers[layer]:
            _add_experts(parts, f"{theirs}.mlp", ours, model)
        else:
            parts.add_gated(f"{theirs}.mlp", ours, _MLP, ("weight",))

    return llama_like(weights, model, partial(_add_attention, model), mlp)


def _add_attention(model: Model, parts: Parts, theirs: str, ours: str, _layer: int) -> None:
    if model.q_lora_rank is None:
        names = {"q_proj": "linear_q_proj"}
    else:
        names = {"q_a_proj": "linear_q_down_proj", "q_a_layernorm": "q_layernorm", "q_b_proj": "linear_q_up_proj"}
    names |= {
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
    }
    for name, source in names.items():
        parts.add(f"{theirs}.{name}.weight", f"{ours}.{source}.weight")


def _add_experts(parts: Parts, theirs: str, ours: str, model: Model) -> None:
    experts, h = model.num_moe_experts or 0, model.hidden_size
    parts.add(f"{theirs}.gate.weight", f"{ours}.router.weight")
    # In float32 whatever the weights' dtype: rounded, it would choose other experts.
    bias = f"{theirs}.gate.e_score_correction_bias"
    parts.add_or_zeros(bias, f"{ours}.router.{EXPERT_BIAS}", (experts,), dtype=torch.float32)
    for expert in range(experts):
        parts.add_gated(f"{theirs}.experts.{expert}", f"{ours}.experts.local_experts.{expert}", _MLP, ("weight",))
    if model.moe_shared_expert_intermediate_size is not None:
        parts.add_gated(f"{theirs}.shared_experts", f"{ours}.shared_experts", _MLP, ("weight",))
        return
    for name, shape in zip(_MLP, ((0, h), (0, h), (h, 0)), strict=True):  # the class has one of size 0 then
        parts.add_or_zeros(f"{theirs}.shared_experts.{name}.weight", "", shape)


DEEPSEEK = Architecture(name=_NAME, config=_config, parts=_parts, factors=_factors, refuse=_refuse)
