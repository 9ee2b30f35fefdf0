"""megatron-core's layer specs with the shims in their places.

Public names: `local_block_spec` (the decoder), `local_mtp_spec` (multi-token prediction).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter as MegatronTopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.config import Model
from mup_megatron.layers.attention import MegatronAttention, MLASelfAttention, SdpaAttention
from mup_megatron.layers.linear import (
    ColumnParallelLinear,
    FC1ColumnParallelLinear,
    KeyValueUpColumnParallelLinear,
    QKVColumnParallelLinear,
    QueryUpColumnParallelLinear,
    RowParallelLinear,
)
from mup_megatron.layers.moe import OneExpertMLP, SharedExpertMLP, TopKRouter
from mup_megatron.layers.norm import norm_class
from mup_megatron.layers.residual import scaled_bias_dropout_add


def local_block_spec(
    config: TransformerConfig,
    model: Model,
    *,
    layers: Sequence[int],
    norm_implementation: str,
    residual_multiplier: float,
    one_expert: bool = False,
) -> TransformerBlockSubmodules:
    """The spec of a decoder built of megatron-core's own modules (its "local" spec), shims in place.

    Args:
        config: of the model.
        model: the same as the run's config has it; its `core_attention` other than sdpa means megatron-core's.
        layers: global numbers of the layers to build, from 0.
        norm_implementation: `torch` or `apex`.
        residual_multiplier: on the output of each residual branch.
        one_expert: builds the first expert alone; such a model has every shape, and cannot run.
    """
    with_experts = [model.expert_layers[layer] for layer in layers]
    kinds = {
        experts: _layer(config, model, norm_implementation, residual_multiplier, experts, one_expert)
        for experts in set(with_experts)
    }
    return TransformerBlockSubmodules(
        layer_specs=[kinds[experts] for experts in with_experts],
        layer_norm=norm_class(config.normalization, norm_implementation, model.norm_gains),
    )


def local_mtp_spec(
    config: TransformerConfig,
    model: Model,
    *,
    norm_implementation: str,
    residual_multiplier: float,
    one_expert: bool = False,
    unsharded: ProcessGroupCollection | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of multi-token prediction; None without it. Its layers are of the decoder's last kind.

    Args:
        config: as there, as `model` and `norm_implementation`.
        model: see there.
        norm_implementation: see there.
        residual_multiplier: without the depth factor, which is the decoder's.
        one_expert: see there.
        unsharded: groups of an unsharded build; megatron-core 0.16 hands its own to the decoder alone.
    """
    if model.mtp_num_layers is None:
        return None
    layer = _layer(config, model, norm_implementation, residual_multiplier, model.expert_layers[-1], one_expert)
    spec = get_mtp_layer_spec_for_backend(layer, LocalSpecProvider())
    parts = spec.submodules
    norm = norm_class(config.normalization, norm_implementation, model.norm_gains)
    parts.enorm = parts.hnorm = parts.layer_norm = norm
    _replace(parts, "eh_proj", tensor_parallel.ColumnParallelLinear, ColumnParallelLinear)
    if unsharded is not None and hasattr(parts, "transformer_layer"):
        parts.eh_proj = ModuleSpec(module=ColumnParallelLinear, params={"tp_group": unsharded.tp})
        parts.transformer_layer = dataclasses.replace(layer, params={**layer.params, "pg_collection": unsharded})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * model.mtp_num_layers)


def _layer(
    config: TransformerConfig,
    model: Model,
    norm_implementation: str,
    residual_multiplier: float,
    experts: bool,
    one_expert: bool,
) -> ModuleSpec:
    """The spec of one layer, with experts or dense."""
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        num_experts=config.num_moe_experts if experts else None,
        multi_latent_attention=config.multi_latent_attention,
    )
    norm = functools.partial(norm_class, config.normalization, norm_implementation, model.norm_gains)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm()
    parts.self_attn_bda = parts.mlp_bda = scaled_bias_dropout_add(residual_multiplier)

    attention = parts.self_attention.submodules
    core = SdpaAttention if model.core_attention == "sdpa" else MegatronAttention
    _replace(attention, "core_attention", DotProductAttention, core)
    _replace(attention, "linear_proj", tensor_parallel.RowParallelLinear, RowParallelLinear)
    if config.multi_latent_attention:
        _replace(parts.self_attention, "module", multi_latent_attention.MLASelfAttention, MLASelfAttention)
        for name in ("linear_q_proj", "linear_q_up_proj"):
            _replace(attention, name, tensor_parallel.ColumnParallelLinear, QueryUpColumnParallelLinear)
        _replace(attention, "linear_kv_up_proj", tensor_parallel.ColumnParallelLinear, KeyValueUpColumnParallelLinear)
        if config.qk_layernorm:
            attention.q_layernorm = IdentityOp if config.q_lora_rank is None else norm()
            attention.kv_layernorm = norm()
    else:
        _replace(attention, "linear_qkv", tensor_parallel.ColumnParallelLinear, QKVColumnParallelLinear)
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm(per_head=True)

    if experts:
        moe = _submodules(parts.mlp)
        _replace(moe, "router", MegatronTopKRouter, TopKRouter)
        for name in ("experts", "shared_experts"):
            _replace_linears(_submodules(getattr(moe, name)))
        _replace_module(moe, "shared_experts", SharedExpertMLP)
        if one_expert:
            _replace_module(moe, "experts", OneExpertMLP)
    else:
        _replace_linears(_submodules(parts.mlp))
    return layer


def _replace_linears(mlp: Any) -> None:
    _replace(mlp, "linear_fc1", tensor_parallel.ColumnParallelLinear, FC1ColumnParallelLinear)
    _replace(mlp, "linear_fc2", tensor_parallel.RowParallelLinear, RowParallelLinear)


def _submodules(spec: Any) -> Any:
    """The submodules of a spec: in a ModuleSpec (megatron-core 0.16), in a partial (0.19)."""
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def _replace_module(parts: Any, name: str, shim: type) -> None:
    """Puts another class over the submodules of a spec: of a ModuleSpec (megatron-core 0.16), of a partial (0.19)."""
    spec = getattr(parts, name)
    if isinstance(spec, ModuleSpec):
        spec.module = shim
    else:
        setattr(parts, name, functools.partial(shim, **spec.keywords))


def _replace(submodules: Any, name: str, expected: type, shim: type) -> None:
    found = getattr(submodules, name)
    if found is not expected:
        raise RuntimeError(f"megatron-core's local layer spec has {found!r} as {name}, not {expected.__name__}")
    setattr(submodules, name, shim)
