"""Hugging Face's architectures: which one a model is, its config.json, and its tensors made from megatron-core's.

Public names: `architecture_of`, `activation_name`; DeepSeek-V3 is in deepseek.py, models with an encoder are in
encoders.py. Nothing here imports transformers: names and layouts are its own as of version 5.23, and tests/convert
compares with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mup_megatron.config import Config, Model
from mup_megatron.convert.export.architecture import Architecture, Parts, common, llama_like, refuse
from mup_megatron.convert.export.deepseek import DEEPSEEK
from mup_megatron.convert.export.encoders import encoder_of
from mup_megatron.convert.export.fold import FoldedWeights
from mup_megatron.convert.export.folder import Part
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization

_POSITIONS = "embedding.position_embeddings.weight"
_ACTIVATIONS = {"squared_relu": "relu2"}
"""transformers' names (ACT2FN) where they differ from the config's."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core stretches wavelengths by, beside the factor (rotary_pos_embedding.py, `_apply_scaling`)."""


def architecture_of(config: Config, *, keep_multipliers: bool) -> Architecture:
    """The class that computes the model, exactly.

    Args:
        config: of the checkpoint.
        keep_multipliers: whether it has to have µP's multipliers itself.

    Raises:
        ConfigError: there is none; names the first key that stands in the way, and what can be done.
    """
    model = config.model
    if model.family != "gpt":
        found = encoder_of(model)
    elif model.normalization == "LayerNorm" and not model.gated_linear_unit:
        found = GPT2
    else:
        found = _like_llama(model)
    if keep_multipliers:
        found = _with_multipliers(config, found)
    _refuse_what_none_has(config, found)
    found.refuse(config)
    return found


def _like_llama(model: Model) -> Architecture:
    if model.multi_latent_attention:
        return DEEPSEEK
    if model.num_moe_experts is not None:
        return MIXTRAL
    return QWEN3 if model.qk_layernorm else LLAMA


def _with_multipliers(config: Config, plain: Architecture) -> Architecture:
    """The class that is a plain one with µP's multipliers."""
    if plain not in (LLAMA, MIXTRAL, QWEN3):
        raise config.error(
            f"model.{'multi_latent_attention' if plain is DEEPSEEK else 'architecture'}",
            f"{plain.name} has no multipliers of its own; expected no --keep-multipliers, which folds them",
        )
    return GRANITE_MOE if plain is MIXTRAL else GRANITE


def activation_name(model: Model, *, fused: bool) -> str:
    """What transformers calls the function that the MLP was trained with.

    Args:
        model: of the checkpoint.
        fused: whether megatron-core computed bias and activation together, which makes GELU its tanh approximation.
    """
    if fused and model.activation_func == "gelu":
        return "gelu_new"
    return _ACTIVATIONS.get(model.activation_func, model.activation_func)


def _refuse_what_none_has(config: Config, architecture: Architecture) -> None:
    model, name = config.model, architecture.name
    latent = architecture is DEEPSEEK
    strange = {
        "multi_latent_attention": (model.multi_latent_attention and not latent, "multi-latent attention"),
        "num_moe_experts": (
            model.num_moe_experts is not None and architecture not in (MIXTRAL, GRANITE_MOE, DEEPSEEK),
            "a mixture of experts",
        ),
        "qk_layernorm": (
            model.qk_layernorm and architecture not in (QWEN3, DEEPSEEK),
            "a norm of queries and keys",
        ),
        "qk_l2_norm": (model.qk_l2_norm, "a norm of queries and keys"),
        "attention_output_gate": (model.attention_output_gate, "gates on the heads' outputs"),
        "softmax_type": (model.softmax_type != "vanilla", f"the softmax {model.softmax_type}"),
        "glu_linear_offset": (model.glu_linear_offset != 0.0, "an offset in the gated unit"),
        "activation_func_clamp_value": (model.activation_func_clamp_value is not None, "clamped activations"),
        "without_norms": (bool(model.without_norms), "a model that leaves norms out"),
    }
    refuse(config, name, strange)
    if model.hidden_size % model.num_attention_heads and not latent:
        raise config.error(
            "model.hidden_size",
            f"{model.hidden_size} is no multiple of the {model.num_attention_heads} heads, which transformers asks of "
            f"{name}",
        )


def _refuse_of_gpt2(config: Config) -> None:
    model = config.model
    positions, heads = model.position_embedding_type, model.num_attention_heads
    strange = {
        "position_embedding_type": (positions != "learned_absolute", f"LayerNorm with positions {positions}"),
        "num_query_groups": (model.query_groups != heads, "key/value heads that several query heads share"),
        "kv_channels": (
            model.head_size * heads != model.hidden_size,
            "heads that together are not as wide as the hidden size",
        ),
    }
    refuse(config, GPT2.name, strange)


def _refuse_of_llama(config: Config, name: str) -> None:
    model, positions = config.model, config.model.position_embedding_type
    strange = {
        "normalization": (model.normalization != "RMSNorm", "LayerNorm with a gated unit"),
        "gated_linear_unit": (not model.gated_linear_unit, "RMSNorm with an MLP without gate"),
        "position_embedding_type": (positions != "rope", f"positions {positions}"),
        "rotary_percent": (model.rotary_percent != 1.0, "RoPE on a part of each head"),
        "add_bias_linear": (model.add_bias_linear and name not in (LLAMA.name, GRANITE.name), "biases in the MLP"),
    }
    refuse(config, name, strange)


def _refuse_of_mixtral(config: Config, name: str) -> None:
    """The router takes the softmax of the chosen experts' logits; every layer has experts, and nothing else.

    GraniteMoe's is the same (`GraniteMoeTopKRouter`: top-k of the logits, then softmax).
    """
    _refuse_of_llama(config, name)
    model = config.model
    strange = {
        "add_qkv_bias": (model.add_qkv_bias and name == MIXTRAL.name, "biases of queries, keys and values"),
        "moe_layer_freq": (not all(model.expert_layers), "layers without experts"),
        "moe_shared_expert_intermediate_size": (
            model.moe_shared_expert_intermediate_size is not None,
            "shared experts",
        ),
        "moe_router_score_function": (model.moe_router_score_function != "softmax", "scores by sigmoid"),
        "moe_router_pre_softmax": (model.moe_router_pre_softmax, "scores that do not add up to 1"),
        "moe_router_topk_scaling_factor": (model.moe_router_topk_scaling_factor is not None, "scaled scores"),
        "moe_router_num_groups": (model.moe_router_num_groups is not None, "groups of experts"),
        "moe_router_load_balancing_type": (
            "sinkhorn" in (model.moe_router_load_balancing_type, *model.moe_router_load_balancing_type),
            "experts chosen by sinkhorn",
        ),
    }
    refuse(config, name, strange)


# --- Llama, and what is Llama with multipliers (Granite), QK-norm (Qwen3), experts (Mixtral) ---


def _llama_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling:
        rope = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    return {
        **common(parametrization),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_size,
        "hidden_act": activation,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_bias": model.add_bias_linear or model.add_qkv_bias,
        "mlp_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
        "rope_theta": float(model.rotary_base),  # as transformers 4 has it
        "rope_scaling": rope if model.rope_scaling else None,
        "rope_parameters": {"rope_theta": float(model.rotary_base), **rope},  # as 5 has it
    }


def _qwen3_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    found = _llama_config(parametrization, activation)
    del found["mlp_bias"]
    return {**found, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def _mixtral_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    model = parametrization.config.model
    found = _llama_config(parametrization, activation)
    del found["mlp_bias"], found["attention_bias"]
    loss = model.moe_aux_loss_coeff
    return {
        **found,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": model.moe_ffn_size,
        "num_local_experts": model.num_moe_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "router_aux_loss_coef": loss if isinstance(loss, float) else sum(loss),
        "sliding_window": None,
    }


def _granite_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    return {
        **_llama_config(parametrization, activation),
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **_multipliers(parametrization),
    }


def _granite_moe_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    found = _mixtral_config(parametrization, activation)
    del found["sliding_window"]
    return {
        **found,
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "attention_bias": parametrization.config.model.add_qkv_bias,
        **_multipliers(parametrization),
    }


def _multipliers(parametrization: Parametrization) -> dict[str, float]:
    """Granite's names of them."""
    forward = parametrization.forward
    return {
        "embedding_multiplier": forward.embedding,
        "attention_multiplier": forward.softmax_scale,
        "residual_multiplier": forward.residual,
        "logits_scaling": 1.0 / forward.readout,
    }


def _llama_parts(weights: FoldedWeights, config: Config) -> list[Part]:
    model = config.model

    def mlp(parts: Parts, theirs: str, ours: str, _layer: int) -> None:
        if model.num_moe_experts is not None:
            _add_experts(parts, f"{theirs}.block_sparse_moe", ours, model.num_moe_experts)
        else:
            kinds = ("weight", "bias") if model.add_bias_linear else ("weight",)
            parts.add_gated(f"{theirs}.mlp", ours, ("gate_proj", "up_proj", "down_proj"), kinds)

    return llama_like(weights, model, partial(_add_attention, model), mlp)


def _granite_moe_parts(weights: FoldedWeights, config: Config) -> list[Part]:
    """All experts of a layer are one tensor, gate before up."""
    model, experts = config.model, range(config.model.num_moe_experts or 0)

    def mlp(parts: Parts, theirs: str, ours: str, _layer: int) -> None:
        theirs = f"{theirs}.block_sparse_moe"
        parts.add(f"{theirs}.router.layer.weight", f"{ours}.router.weight")
        for name, layer in (("input_linear", "linear_fc1"), ("output_linear", "linear_fc2")):
            mine = [f"{ours}.experts.local_experts.{expert}.{layer}.weight" for expert in experts]
            parts.add_stacked(f"{theirs}.{name}.weight", mine)

    return llama_like(weights, model, partial(_add_attention, model), mlp)


def _add_attention(model: Model, parts: Parts, theirs: str, ours: str, _layer: int) -> None:
    # The class has biases of all four attention projections or of none.
    biased = model.add_bias_linear or model.add_qkv_bias
    for kind in ("weight", "bias") if biased else ("weight",):
        for name, block in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            parts.add(f"{theirs}.{name}.{kind}", f"{ours}.linear_qkv.{kind}", block)
    parts.add(f"{theirs}.o_proj.weight", f"{ours}.linear_proj.weight")
    if biased:
        parts.add_or_zeros(f"{theirs}.o_proj.bias", f"{ours}.linear_proj.bias", (model.hidden_size,))
    if model.qk_layernorm:
        for name in ("q", "k"):
            parts.add(f"{theirs}.{name}_norm.weight", f"{ours}.{name}_layernorm.weight")


def _add_experts(parts: Parts, theirs: str, ours: str, experts: int) -> None:
    parts.add(f"{theirs}.gate.weight", f"{ours}.router.weight")
    for expert in range(experts):
        mine = f"{ours}.experts.local_experts.{expert}"
        parts.add_gated(f"{theirs}.experts.{expert}", mine, ("w1", "w3", "w2"), ("weight",))


# --- GPT-2 ---


def _gpt2_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    return {
        **common(parametrization),
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "activation_function": activation,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    }


def _gpt2_parts(weights: FoldedWeights, config: Config) -> list[Part]:
    """Its Conv1D stores a weight as [fan-in, fan-out]; its c_attn has all queries, then all keys, then all values."""
    model = config.model
    h, ffn = model.hidden_size, model.ffn_size
    parts = Parts(weights)
    parts.add("transformer.wte.weight", WORD_EMBEDDINGS)
    parts.add("transformer.wpe.weight", _POSITIONS)
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        qkv, attention, mlp = ("query", "key", "value"), f"{ours}.self_attention", f"{ours}.mlp"
        for norm, name in (("ln_1", "input_layernorm"), ("ln_2", "pre_mlp_layernorm")):
            for kind in ("weight", "bias"):
                parts.add(f"{theirs}.{norm}.{kind}", f"{ours}.{name}.{kind}")
        parts.add(f"{theirs}.attn.c_attn.weight", f"{attention}.linear_qkv.weight", *qkv, transposed=True)
        parts.add_or_zeros(f"{theirs}.attn.c_attn.bias", f"{attention}.linear_qkv.bias", (3 * h,), *qkv)
        parts.add(f"{theirs}.attn.c_proj.weight", f"{attention}.linear_proj.weight", transposed=True)
        parts.add_or_zeros(f"{theirs}.attn.c_proj.bias", f"{attention}.linear_proj.bias", (h,))
        parts.add(f"{theirs}.mlp.c_fc.weight", f"{mlp}.linear_fc1.weight", transposed=True)
        parts.add_or_zeros(f"{theirs}.mlp.c_fc.bias", f"{mlp}.linear_fc1.bias", (ffn,))
        parts.add(f"{theirs}.mlp.c_proj.weight", f"{mlp}.linear_fc2.weight", transposed=True)
        parts.add_or_zeros(f"{theirs}.mlp.c_proj.bias", f"{mlp}.linear_fc2.bias", (h,))
    for kind in ("weight", "bias"):
        parts.add(f"transformer.ln_f.{kind}", f"decoder.final_layernorm.{kind}")
    if not model.share_embeddings_and_output_weights:
        parts.add("lm_head.weight", "output_layer.weight")
    return parts.made


def _like(
    name: str, config: Callable[[Parametrization, str], dict[str, Any]], refuse: Callable[[Config, str], None]
) -> Architecture:
    parts = _granite_moe_parts if name == "GraniteMoeForCausalLM" else _llama_parts
    return Architecture(name=name, config=config, parts=parts, refuse=lambda model: refuse(model, name))


LLAMA = _like("LlamaForCausalLM", _llama_config, _refuse_of_llama)
GRANITE = _like("GraniteForCausalLM", _granite_config, _refuse_of_llama)
QWEN3 = _like("Qwen3ForCausalLM", _qwen3_config, _refuse_of_llama)
MIXTRAL = _like("MixtralForCausalLM", _mixtral_config, _refuse_of_mixtral)
GRANITE_MOE = _like("GraniteMoeForCausalLM", _granite_moe_config, _refuse_of_mixtral)
GPT2 = Architecture(name="GPT2LMHeadModel", config=_gpt2_config, parts=_gpt2_parts, refuse=_refuse_of_gpt2)
