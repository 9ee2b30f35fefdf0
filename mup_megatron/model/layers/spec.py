"""megatron-core's layer specs with the shims in their places.

Public names: `block_spec` (the decoder), `mtp_spec` (multi-token prediction), `dense_layer` (any layer without
experts), `attention_ends`, `norm_class` (the norm that a config names), `norm_of`, `linear_layers_of` and
`core_attention_of` (the shims that a model takes), `replace`. Transformer Engine is imported only where the config asks
for it.
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
from mup_megatron.model.layers import linear
from mup_megatron.model.layers import norm as norms
from mup_megatron.model.layers.attention import MegatronAttention, MLASelfAttention, SdpaAttention
from mup_megatron.model.layers.moe import OneExpertMLP, SharedExpertMLP, TopKRouter
from mup_megatron.model.layers.residual import scaled_bias_dropout_add


def block_spec(
    config: TransformerConfig,
    model: Model,
    *,
    layers: Sequence[int],
    residual_multiplier: float,
    one_expert: bool = False,
) -> TransformerBlockSubmodules:
    """The spec of a decoder: megatron-core's "local" spec, with shims of its own or Transformer Engine's modules.

    Args:
        config: of the model.
        model: section of the run's config; what its `transformer_impl`, `norm_implementation` and
            `core_attention` leave open is megatron-core's or torch's.
        layers: global numbers of the layers to build, from 0.
        residual_multiplier: on the output of each residual branch.
        one_expert: builds the first expert alone; such a model has every shape, and cannot run.
    """
    with_experts = [model.expert_layers[layer] for layer in layers]
    kinds = {experts: _layer(config, model, residual_multiplier, experts, one_expert) for experts in set(with_experts)}
    return TransformerBlockSubmodules(
        layer_specs=[kinds[experts] for experts in with_experts],
        layer_norm=None if "final_layernorm" in model.without_norms else norm_of(model),
    )


def mtp_spec(
    config: TransformerConfig,
    model: Model,
    *,
    residual_multiplier: float,
    one_expert: bool = False,
    unsharded: ProcessGroupCollection | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of multi-token prediction; None without it. Its layers are of the decoder's last kind.

    Args:
        config: of the model.
        model: section of the run's config, as in `block_spec`.
        residual_multiplier: without the depth factor, which is the decoder's.
        one_expert: builds the first expert alone.
        unsharded: groups of an unsharded build; megatron-core 0.16 hands its own to the decoder alone.
    """
    if model.mtp_num_layers is None:
        return None
    layer = _layer(config, model, residual_multiplier, model.expert_layers[-1], one_expert)
    spec = get_mtp_layer_spec_for_backend(layer, LocalSpecProvider())
    parts = spec.submodules
    shims = linear_layers_of(model)
    parts.enorm = parts.hnorm = parts.layer_norm = norm_of(model)
    replace(parts, "eh_proj", tensor_parallel.ColumnParallelLinear, shims.ColumnParallelLinear)
    if unsharded is not None and hasattr(parts, "transformer_layer"):
        parts.eh_proj = ModuleSpec(module=shims.ColumnParallelLinear, params={"tp_group": unsharded.tp})
        parts.transformer_layer = dataclasses.replace(layer, params={**layer.params, "pg_collection": unsharded})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * model.mtp_num_layers)


def _layer(
    config: TransformerConfig,
    model: Model,
    residual_multiplier: float,
    experts: bool,
    one_expert: bool,
) -> ModuleSpec:
    """The spec of one layer, with experts or dense."""
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        num_experts=config.num_moe_experts if experts else None,
        multi_latent_attention=config.multi_latent_attention,
    )
    norm, shims = functools.partial(norm_of, model), linear_layers_of(model)
    parts = layer.submodules
    _branches(parts, model, residual_multiplier)
    attention = parts.self_attention.submodules
    attention_ends(attention, model)
    if config.multi_latent_attention:
        replace(parts.self_attention, "module", multi_latent_attention.MLASelfAttention, MLASelfAttention)
        for name in ("linear_q_proj", "linear_q_up_proj"):
            replace(attention, name, tensor_parallel.ColumnParallelLinear, shims.QueryUpColumnParallelLinear)
        replace(
            attention, "linear_kv_up_proj", tensor_parallel.ColumnParallelLinear, shims.KeyValueUpColumnParallelLinear
        )
        if config.qk_layernorm:
            attention.q_layernorm = IdentityOp if config.q_lora_rank is None else norm()
            attention.kv_layernorm = norm()
    else:
        replace(attention, "linear_qkv", tensor_parallel.ColumnParallelLinear, shims.QKVColumnParallelLinear)
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm(per_head=True)

    if experts:
        moe = _submodules(parts.mlp)
        replace(moe, "router", MegatronTopKRouter, TopKRouter)
        for name in ("experts", "shared_experts"):
            _replace_linears(_submodules(getattr(moe, name)), shims)
        _replace_module(moe, "shared_experts", SharedExpertMLP)
        if one_expert:
            _replace_module(moe, "experts", OneExpertMLP)
        elif model.moe_grouped_gemm is True:
            from mup_megatron.model.layers.transformer_engine import grouped_experts

            moe.experts = grouped_experts()
    else:
        _replace_linears(_submodules(parts.mlp), shims)
    return layer


def dense_layer(layer: ModuleSpec, model: Model, residual_multiplier: float) -> None:
    """Puts the shims into a local layer spec of upstream's with plain self-attention and a dense MLP.

    Args:
        layer: the spec, which is changed.
        model: as the run's config has it.
        residual_multiplier: on the output of both residual branches.
    """
    parts, shims = layer.submodules, linear_layers_of(model)
    _branches(parts, model, residual_multiplier)
    attention = parts.self_attention.submodules
    attention_ends(attention, model)
    replace(attention, "linear_qkv", tensor_parallel.ColumnParallelLinear, shims.QKVColumnParallelLinear)
    _replace_linears(_submodules(parts.mlp), shims)


def _branches(parts: Any, model: Model, residual_multiplier: float) -> None:
    """What stands at both ends of the residual branches: norms before, the scaled sum after."""
    for place in ("input_layernorm", "pre_mlp_layernorm"):
        setattr(parts, place, IdentityOp if place in model.without_norms else norm_of(model))
    parts.self_attn_bda = parts.mlp_bda = scaled_bias_dropout_add(residual_multiplier)


def attention_ends(attention: Any, model: Model) -> None:
    """What attention of every kind has."""
    replace(attention, "core_attention", DotProductAttention, core_attention_of(model))
    replace(attention, "linear_proj", tensor_parallel.RowParallelLinear, linear_layers_of(model).RowParallelLinear)


def linear_layers_of(model: Model) -> Any:
    """The module whose linear layers are built: linear.py's, or Transformer Engine's by the same names."""
    if model.transformer_impl != "transformer_engine":
        return linear
    from mup_megatron.model.layers import transformer_engine

    return transformer_engine


def core_attention_of(model: Model) -> type:
    """The shim of the core attention that the model names."""
    if model.core_attention == "sdpa":
        return SdpaAttention
    if model.core_attention != "transformer_engine":
        return MegatronAttention
    from mup_megatron.model.layers.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def norm_of(model: Model, per_head: bool = False) -> Any:
    """The norm that the model names; see `norm_class`."""
    implementation = "torch" if model.norm_implementation == "auto" else model.norm_implementation
    return norm_class(model.normalization, implementation, model.norm_gains, per_head=per_head)


def norm_class(normalization: str, implementation: str, gains: norms.Gains = "trained", per_head: bool = False) -> Any:
    """The norm to put into a layer spec.

    Args:
        normalization: `LayerNorm` or `RMSNorm`.
        implementation: `torch`, `apex` or `transformer_engine` (`auto` is resolved before, see engines/setup/auto.py).
        gains: whether gains (and LayerNorm's biases) are trained, frozen at 1 (0), or not there.
        per_head: whether it norms the heads of queries or keys, which tensor parallelism splits.
    """
    norm: Any
    if implementation == "torch":
        norm = {"LayerNorm": norms.LayerNorm, "RMSNorm": norms.RMSNorm}[normalization]
    elif implementation == "apex":
        norm = norms.apex_norm()
    else:
        from mup_megatron.model.layers.transformer_engine import TENorm as norm
    return type(norm.__name__, (norm,), {"gains": gains, "per_head": per_head})


def _replace_linears(mlp: Any, shims: Any) -> None:
    replace(mlp, "linear_fc1", tensor_parallel.ColumnParallelLinear, shims.FC1ColumnParallelLinear)
    replace(mlp, "linear_fc2", tensor_parallel.RowParallelLinear, shims.RowParallelLinear)


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


def replace(submodules: Any, name: str, expected: type, shim: type) -> None:
    """Puts a shim into the place of the class that upstream's spec is known to have there.

    Raises:
        RuntimeError: upstream has another one there.
    """
    found = getattr(submodules, name)
    if found is not expected:
        raise RuntimeError(f"megatron-core's local layer spec has {found!r} as {name}, not {expected.__name__}")
    setattr(submodules, name, shim)
