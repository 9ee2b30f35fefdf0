"""megatron-core's layer specs with the shims in their places. Public name: `local_block_spec`."""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.layers.linear import FC1ColumnParallelLinear, QKVColumnParallelLinear, RowParallelLinear
from mup_megatron.layers.norm import norm_class
from mup_megatron.layers.residual import scaled_bias_dropout_add


def local_block_spec(
    config: TransformerConfig, *, layers: range, norm_implementation: str, residual_multiplier: float
) -> TransformerBlockSubmodules:
    """The spec of a decoder built of megatron-core's own modules (its "local" spec), shims in place.

    Args:
        config: of the model.
        layers: global numbers of the layers to build, from 0.
        norm_implementation: `torch` or `apex`.
        residual_multiplier: on the output of each residual branch.
    """
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    norm = norm_class(config.normalization, norm_implementation)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.self_attn_bda = parts.mlp_bda = scaled_bias_dropout_add(residual_multiplier)

    attention = parts.self_attention.submodules
    _replace(attention, "linear_qkv", tensor_parallel.ColumnParallelLinear, QKVColumnParallelLinear)
    _replace(attention, "linear_proj", tensor_parallel.RowParallelLinear, RowParallelLinear)

    mlp = _mlp_submodules(parts.mlp)
    _replace(mlp, "linear_fc1", tensor_parallel.ColumnParallelLinear, FC1ColumnParallelLinear)
    _replace(mlp, "linear_fc2", tensor_parallel.RowParallelLinear, RowParallelLinear)
    return TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=norm)


def _mlp_submodules(mlp: Any) -> Any:
    """The MLP's submodules: in a ModuleSpec (megatron-core 0.16), in a partial (0.19)."""
    return mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]


def _replace(submodules: Any, name: str, expected: type, shim: type) -> None:
    found = getattr(submodules, name)
    if found is not expected:
        raise RuntimeError(f"megatron-core's local layer spec has {found!r} as {name}, not {expected.__name__}")
    setattr(submodules, name, shim)
