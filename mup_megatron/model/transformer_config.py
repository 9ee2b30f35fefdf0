"""megatron-core's TransformerConfig of a model, from the run's config, the forward multipliers and the layout.

Public names: `core_config`, `expert_settings`, `fuses_activation`, `has_fused_softmax`, `ACTIVATIONS`, `INIT_METHODS`,
`YARN`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mup_megatron.config import Config, Model
from mup_megatron.model.layers.tensor_spec import InitMethod
from mup_megatron.parallel.layout import Layout
from mup_megatron.parallel.runtime import point_to_point
from mup_megatron.parallel.upstream import importable
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import ForwardMultipliers

ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "squared_relu": lambda x: torch.square(torch.nn.functional.relu(x)),
    "quick_gelu": quick_gelu,
}

YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "correction_range_round_to_int"),
)
"""Keys of the model that are YaRN's; multi-latent attention has no `correction_range_round_to_int`."""

INIT_METHODS = {
    # The weights are filled by init.py; what goes into TransformerConfig only names the distribution.
    "init_method": InitMethod(Init.WEIGHT),
    "output_layer_init_method": InitMethod(Init.OUTPUT_PROJECTION),
    "embedding_init_method": InitMethod(Init.EMBEDDING),
}


def core_config(
    config: Config, model: Model, forward: ForwardMultipliers, layout: Layout, device: torch.device
) -> TransformerConfig:
    """megatron-core's own config of a model.

    Args:
        config: the run, every `auto` resolved.
        model: sizes, which need not be the config's own.
        forward: multipliers; the config holds the softmax scale.
        layout: how ranks split the model.
        device: where it computes, which decides what is fused.
    """
    training = config.training
    bf16, fp16 = training.precision == "bf16", training.precision == "fp16"
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    fused = device.type == "cuda"
    kind = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    made = kind(
        **{name: getattr(model, name) for name in _ALIKE},
        **_attention(model),
        **expert_settings(model),
        **_layout(config, layout, cuda=fused),
        ffn_hidden_size=model.ffn_size,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        activation_func=ACTIVATIONS[model.activation_func],
        softmax_scale=forward.softmax_scale,
        perform_initialization=False,
        use_cpu_initialization=not fused,
        **INIT_METHODS,
        bf16=bf16,
        fp16=fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # megatron-core's grouped experts refuse the fusion where they have biases.
        bias_dropout_fusion=fused and not (model.moe_grouped_gemm is True and model.add_bias_linear),
        masked_softmax_fusion=fused and has_fused_softmax(),
        bias_activation_fusion=fuses_activation(model, cuda=fused),
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
    )
    for name, value in _yarn(model).items():  # which GPTModel reads from the config, although it is no field of it
        setattr(made, name, value)
    return made


def has_fused_softmax() -> bool:
    """Whether Apex built what megatron-core's fused softmax imports when it computes, in 16 bits (fused_softmax.py)."""
    return all(importable(f"{name}_cuda") for name in _SOFTMAXES)


_SOFTMAXES = ("scaled_upper_triang_masked_softmax", "scaled_masked_softmax", "scaled_softmax")

_ALIKE = (
    *("hidden_size", "num_attention_heads", "mtp_num_layers", "mtp_loss_scaling_factor", "normalization"),
    *("layernorm_epsilon", "layernorm_zero_centered_gamma", "gated_linear_unit", "glu_linear_offset", "softmax_type"),
    *("activation_func_clamp_value", "add_bias_linear", "add_qkv_bias", "hidden_dropout", "attention_dropout"),
)
"""Keys of every model that TransformerConfig takes as they are."""


def _layout(config: Config, layout: Layout, *, cuda: bool) -> dict[str, Any]:
    """TransformerConfig's fields of how ranks share the model."""
    split, interleaved, parallel = layout.pipeline > 1, layout.virtual_pipeline > 1, config.parallel
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    return {
        # All that are built: upstream tells the last layer, which the final norm follows, by its number.
        "num_layers": sum(len(chunk) for stage in layout.stages for chunk in stage),
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        "microbatch_group_size_per_vp_stage": group if interleaved else None,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage if split else None,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage if split else None,
        "pipeline_model_parallel_layout": parallel.pipeline_model_parallel_layout if split else None,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "context_parallel_size": layout.context,
        **point_to_point(split=split, interleaved=interleaved, cuda=cuda),
    }


def fuses_activation(model: Model, *, cuda: bool) -> bool:
    """Whether bias and activation are one kernel. megatron-core's for GELU computes the tanh approximation of it."""
    return (
        cuda
        and (model.gated_linear_unit or model.add_bias_linear)
        and model.activation_func in ("gelu", "silu")
        and (model.activation_func == "silu") == model.gated_linear_unit
    )


def _yarn(model: Model) -> dict[str, Any]:
    """What YaRN outside multi-latent attention is told, under megatron-core's names."""
    if model.position_embedding_type != "yarn":
        return {}
    return {f"yarn_{name}": getattr(model, name) for name in YARN}


def _attention(model: Model) -> dict[str, Any]:
    """TransformerConfig's attention fields that only some models have."""
    if not model.multi_latent_attention:
        names = ["qk_layernorm", "qk_l2_norm", "attention_output_gate"]
        return {name: getattr(model, name) for name in names}
    names = [
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "qk_layernorm"),
        *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ]
    return {name: getattr(model, name) for name in names}


def expert_settings(model: Model) -> dict[str, Any]:
    """TransformerConfig's fields of a mixture of experts."""
    if model.num_moe_experts is None:
        return {}
    names = [name for name in type(model).model_fields if name.startswith("moe_")]
    return {
        **{name: getattr(model, name) for name in names},
        "num_moe_experts": model.num_moe_experts,
        "moe_ffn_hidden_size": model.moe_ffn_size,
        "moe_grouped_gemm": model.moe_grouped_gemm is True,
    }
