"""megatron-core's layer specs of T5 with the shims in their places: encoder, and decoder with cross-attention.

Public name: `stack_spec`.
"""

from __future__ import annotations

from typing import Any, Literal

from megatron.core import tensor_parallel
from megatron.core.models.T5 import t5_spec
from megatron.core.transformer.attention import CrossAttention as MegatronCrossAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mup_megatron.config import Model
from mup_megatron.model.layers.attention import CrossAttention
from mup_megatron.model.layers.residual import scaled_bias_dropout_add
from mup_megatron.model.layers.spec import attention_ends, dense_layer, linear_layers_of, norm_of, replace


def stack_spec(
    model: Model, stack: Literal["encoder", "decoder"], *, layers: int, residual_multiplier: float
) -> TransformerBlockSubmodules:
    """The spec of a stack: megatron-core's "local" one of T5, with shims.

    A decoder's layers attend to the encoder's output between self-attention and MLP.

    Args:
        model: as the run's config has it.
        stack: which one.
        layers: how many to build.
        residual_multiplier: on the output of each residual branch.
    """
    decodes = stack == "decoder"
    layer = t5_spec.decoder_model_with_local_spec() if decodes else t5_spec.encoder_model_with_local_spec()
    dense_layer(layer, model, residual_multiplier)
    if decodes:
        _cross_attention(layer.submodules, model, residual_multiplier)
    final = None if "final_layernorm" in model.without_norms else norm_of(model)  # behind the last layer
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=final)


def _cross_attention(parts: Any, model: Model, residual_multiplier: float) -> None:
    """Puts the shims into a layer's cross-attention, its norm and its residual branch."""
    shims = linear_layers_of(model)
    parts.pre_cross_attn_layernorm = norm_of(model)
    parts.cross_attn_bda = scaled_bias_dropout_add(residual_multiplier)
    attention = parts.cross_attention.submodules
    replace(parts.cross_attention, "module", MegatronCrossAttention, CrossAttention)
    column = tensor_parallel.ColumnParallelLinear
    replace(attention, "linear_q", column, shims.QueryColumnParallelLinear)
    replace(attention, "linear_kv", column, shims.KeyValueColumnParallelLinear)
    attention_ends(attention, model)
