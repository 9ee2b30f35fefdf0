"""Hugging Face's architectures: which one a model is, its config.json, and its tensors made from megatron-core's.

Public names: `Architecture`, `architecture_of`, `activation_name`. Nothing here imports transformers: names and layouts
are its own as of version 5.23, and tests/export compares with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mup_megatron.config import Config, Model
from mup_megatron.errors import ConfigError
from mup_megatron.export.fold import FoldedWeights
from mup_megatron.export.folder import Part
from mup_megatron.parametrization import WORD_EMBEDDINGS, Parametrization

_POSITIONS = "embedding.position_embeddings.weight"
_ACTIVATIONS = {"squared_relu": "relu2"}
"""transformers' names (ACT2FN) where they differ from the config's."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core stretches wavelengths by, beside the factor (rotary_pos_embedding.py, `_apply_scaling`)."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers.

    Args:
        name: of the class.
        config: from a parametrization and the activation's name: config.json, without vocabulary and special tokens.
        parts: the tensors of its state dict, in order.
    """

    name: str
    config: Callable[[Parametrization, str], dict[str, Any]]
    parts: Callable[[FoldedWeights, Config], list[Part]]


def architecture_of(config: Config, *, keep_multipliers: bool) -> Architecture:
    """The class that computes the model, exactly.

    Args:
        config: of the checkpoint.
        keep_multipliers: whether it has to have µP's multipliers itself.

    Raises:
        ConfigError: there is none; names the first key that stands in the way, and what can be done.
    """
    model = config.model
    gpt2 = model.normalization == "LayerNorm" and not model.gated_linear_unit
    if keep_multipliers and gpt2:
        raise config.error(
            "model.architecture",
            "GPT-2 has no multipliers of its own; expected no --keep-multipliers, which folds them",
        )
    found = GPT2 if gpt2 else GRANITE if keep_multipliers else _like_llama(model)
    _refuse_what_none_has(config, found)
    (_refuse_of_gpt2 if gpt2 else _refuse_of_llama)(config, found.name)
    if found is MIXTRAL:
        _refuse_of_mixtral(config)
    return found


def _like_llama(model: Model) -> Architecture:
    if model.num_moe_experts is not None:
        return MIXTRAL
    return QWEN3 if model.qk_layernorm else LLAMA


def activation_name(model: Model, *, fused: bool) -> str:
    """What transformers calls the function that the MLP was trained with.

    Args:
        model: of the checkpoint.
        fused: whether megatron-core computed bias and activation together, which makes GELU its tanh approximation.
    """
    if fused and model.activation_func == "gelu":
        return "gelu_new"
    return _ACTIVATIONS.get(model.activation_func, model.activation_func)


def _lacks(config: Config, key: str, name: str, what: str) -> ConfigError:
    return config.error(key, f"{what}, which {name} does not have; expected a model without it, or --to safetensors")


def _refuse_what_none_has(config: Config, architecture: Architecture) -> None:
    model, name = config.model, architecture.name
    experts, normed = model.num_moe_experts is not None, model.qk_layernorm
    strange = {
        "multi_latent_attention": (model.multi_latent_attention, "multi-latent attention"),
        "num_moe_experts": (experts and architecture is not MIXTRAL, "a mixture of experts"),
        "qk_layernorm": (normed and architecture is not QWEN3, "a norm of queries and keys"),
        "qk_l2_norm": (model.qk_l2_norm, "a norm of queries and keys"),
        "attention_output_gate": (model.attention_output_gate, "gates on the heads' outputs"),
        "softmax_type": (model.softmax_type != "vanilla", f"the softmax {model.softmax_type}"),
        "glu_linear_offset": (model.glu_linear_offset != 0.0, "an offset in the gated unit"),
        "activation_func_clamp_value": (model.activation_func_clamp_value is not None, "clamped activations"),
        "without_norms": (bool(model.without_norms), "a model that leaves norms out"),
    }
    for key, (found, what) in strange.items():
        if found:
            raise _lacks(config, f"model.{key}", name, what)
    if model.hidden_size % model.num_attention_heads:
        raise config.error(
            "model.hidden_size",
            f"{model.hidden_size} is no multiple of the {model.num_attention_heads} heads, which transformers asks of "
            f"{name}",
        )


def _refuse_of_gpt2(config: Config, name: str) -> None:
    model = config.model
    if model.position_embedding_type != "learned_absolute":
        raise _lacks(
            config, "model.position_embedding_type", name, f"LayerNorm with positions {model.position_embedding_type}"
        )
    if model.query_groups != model.num_attention_heads:
        raise _lacks(config, "model.num_query_groups", name, "key/value heads that several query heads share")
    if model.head_size * model.num_attention_heads != model.hidden_size:
        raise _lacks(config, "model.kv_channels", name, "heads that together are not as wide as the hidden size")


def _refuse_of_llama(config: Config, name: str) -> None:
    model = config.model
    if model.normalization != "RMSNorm":
        raise _lacks(config, "model.normalization", name, "LayerNorm with a gated unit")
    if not model.gated_linear_unit:
        raise _lacks(config, "model.gated_linear_unit", name, "RMSNorm with an MLP without gate")
    if model.position_embedding_type != "rope":
        raise _lacks(config, "model.position_embedding_type", name, f"positions {model.position_embedding_type}")
    if model.rotary_percent != 1.0:
        raise _lacks(config, "model.rotary_percent", name, "RoPE on a part of each head")
    if model.add_bias_linear and name in (QWEN3.name, MIXTRAL.name):
        raise _lacks(config, "model.add_bias_linear", name, "biases in the MLP")


def _refuse_of_mixtral(config: Config) -> None:
    """Mixtral's router takes the softmax of the chosen experts' logits; every layer has experts, and nothing else."""
    model = config.model
    strange = {
        "add_qkv_bias": (model.add_qkv_bias, "biases of queries, keys and values"),
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
    for key, (found, what) in strange.items():
        if found:
            raise _lacks(config, f"model.{key}", MIXTRAL.name, what)


def _common(parametrization: Parametrization) -> dict[str, Any]:
    model = parametrization.config.model
    return {
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "initializer_range": parametrization.config.hparams.init_method_std,
        "use_cache": True,
    }


# --- Llama, and what is Llama with multipliers (Granite), QK-norm (Qwen3), experts (Mixtral) ---


def _llama_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling:
        rope = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **_LLAMA3}
    return {
        **_common(parametrization),
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
    forward = parametrization.forward
    return {
        **_llama_config(parametrization, activation),
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": forward.embedding,
        "attention_multiplier": forward.softmax_scale,
        "residual_multiplier": forward.residual,
        "logits_scaling": 1.0 / forward.readout,
    }


def _llama_parts(weights: FoldedWeights, config: Config) -> list[Part]:
    model = config.model
    # The class has biases of all four attention projections or of none.
    biased = model.add_bias_linear or model.add_qkv_bias
    kinds = ("weight", "bias") if biased else ("weight",)
    parts = _Parts(weights)
    parts.add("model.embed_tokens.weight", WORD_EMBEDDINGS)
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        parts.add(f"{theirs}.input_layernorm.weight", f"{ours}.input_layernorm.weight")
        for kind in kinds:
            for name, block in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
                parts.add(f"{theirs}.self_attn.{name}.{kind}", f"{ours}.self_attention.linear_qkv.{kind}", block)
        parts.add(f"{theirs}.self_attn.o_proj.weight", f"{ours}.self_attention.linear_proj.weight")
        if biased:
            projection = f"{ours}.self_attention.linear_proj.bias"
            parts.add_or_zeros(f"{theirs}.self_attn.o_proj.bias", projection, model.hidden_size)
        if model.qk_layernorm:
            for name in ("q", "k"):
                parts.add(f"{theirs}.self_attn.{name}_norm.weight", f"{ours}.self_attention.{name}_layernorm.weight")
        parts.add(f"{theirs}.post_attention_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight")
        if model.num_moe_experts is None:
            kinds_of_mlp = ("weight", "bias") if model.add_bias_linear else ("weight",)
            parts.add_gated(f"{theirs}.mlp", f"{ours}.mlp", ("gate_proj", "up_proj", "down_proj"), kinds_of_mlp)
            continue
        parts.add(f"{theirs}.block_sparse_moe.gate.weight", f"{ours}.mlp.router.weight")
        for expert in range(model.num_moe_experts):
            mine = f"{ours}.mlp.experts.local_experts.{expert}"
            parts.add_gated(f"{theirs}.block_sparse_moe.experts.{expert}", mine, ("w1", "w3", "w2"), ("weight",))
    parts.add("model.norm.weight", "decoder.final_layernorm.weight")
    if not model.share_embeddings_and_output_weights:
        parts.add("lm_head.weight", "output_layer.weight")
    return parts.made


# --- GPT-2 ---


def _gpt2_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    return {
        **_common(parametrization),
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
    parts = _Parts(weights)
    parts.add("transformer.wte.weight", WORD_EMBEDDINGS)
    parts.add("transformer.wpe.weight", _POSITIONS)
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        qkv, attention, mlp = ("query", "key", "value"), f"{ours}.self_attention", f"{ours}.mlp"
        for norm, name in (("ln_1", "input_layernorm"), ("ln_2", "pre_mlp_layernorm")):
            for kind in ("weight", "bias"):
                parts.add(f"{theirs}.{norm}.{kind}", f"{ours}.{name}.{kind}")
        parts.add(f"{theirs}.attn.c_attn.weight", f"{attention}.linear_qkv.weight", *qkv, transposed=True)
        parts.add_or_zeros(f"{theirs}.attn.c_attn.bias", f"{attention}.linear_qkv.bias", 3 * h, *qkv)
        parts.add(f"{theirs}.attn.c_proj.weight", f"{attention}.linear_proj.weight", transposed=True)
        parts.add_or_zeros(f"{theirs}.attn.c_proj.bias", f"{attention}.linear_proj.bias", h)
        parts.add(f"{theirs}.mlp.c_fc.weight", f"{mlp}.linear_fc1.weight", transposed=True)
        parts.add_or_zeros(f"{theirs}.mlp.c_fc.bias", f"{mlp}.linear_fc1.bias", ffn)
        parts.add(f"{theirs}.mlp.c_proj.weight", f"{mlp}.linear_fc2.weight", transposed=True)
        parts.add_or_zeros(f"{theirs}.mlp.c_proj.bias", f"{mlp}.linear_fc2.bias", h)
    for kind in ("weight", "bias"):
        parts.add(f"transformer.ln_f.{kind}", f"decoder.final_layernorm.{kind}")
    if not model.share_embeddings_and_output_weights:
        parts.add("lm_head.weight", "output_layer.weight")
    return parts.made


class _Parts:
    """Tensors of a state dict, collected in order.

    Args:
        weights: where they come from.
    """

    def __init__(self, weights: FoldedWeights) -> None:
        self.made: list[Part] = []
        self._weights = weights

    def add(self, name: str, source: str, *blocks: str, transposed: bool = False) -> None:
        """One tensor.

        Args:
            name: in the state dict.
            source: megatron-core's global name.
            blocks: of a fused tensor, one after another; the whole unless given.
            transposed: whether a matrix is stored as [fan-in, fan-out].
        """
        shape = self._weights.shape(source, *blocks)

        def make() -> torch.Tensor:
            tensor = self._weights.read(source, *blocks)
            return tensor.t() if transposed else tensor

        self.made.append(Part(name=name, shape=shape[::-1] if transposed else shape, make=make))

    def add_gated(self, theirs: str, ours: str, names: tuple[str, str, str], kinds: tuple[str, ...]) -> None:
        """A gated MLP.

        Args:
            theirs: what its tensors' names begin with in the state dict.
            ours: and in megatron-core.
            names: of gate, up and down.
            kinds: weight, or weight and bias.
        """
        for kind in kinds:
            for name, block in zip(names[:2], ("gate", "up"), strict=True):
                self.add(f"{theirs}.{name}.{kind}", f"{ours}.linear_fc1.{kind}", block)
            self.add(f"{theirs}.{names[2]}.{kind}", f"{ours}.linear_fc2.{kind}")

    def add_or_zeros(self, name: str, source: str, size: int, *blocks: str) -> None:
        """A bias that the class always has: zeros where the model has none."""
        if source in self._weights.specs:
            self.add(name, source, *blocks)
        else:
            self.made.append(Part(name=name, shape=(size,), make=lambda: torch.zeros(size)))


LLAMA = Architecture(name="LlamaForCausalLM", config=_llama_config, parts=_llama_parts)
GRANITE = Architecture(name="GraniteForCausalLM", config=_granite_config, parts=_llama_parts)
QWEN3 = Architecture(name="Qwen3ForCausalLM", config=_qwen3_config, parts=_llama_parts)
MIXTRAL = Architecture(name="MixtralForCausalLM", config=_mixtral_config, parts=_llama_parts)
GPT2 = Architecture(name="GPT2LMHeadModel", config=_gpt2_config, parts=_gpt2_parts)
