"""Records and forward multipliers on the model that a script builds; its modules stay what they are.

Two kinds of attention are replaced: multi-latent attention, which ignores the config's softmax scale, and
megatron-core's own core attention under context parallelism, which it refuses.

Public names: `prepare_config` and `replaced_attention` (before it is built), `attach_to_built` (afterwards).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from mup_megatron.model.architectures.gpt import attach
from mup_megatron.model.as_built.tensors import stride_of
from mup_megatron.model.global_names import global_names
from mup_megatron.model.layers.attention import MLASelfAttention, SdpaAttention
from mup_megatron.model.layers.residual import scaled_branch
from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.model.transformer_config import INIT_METHODS
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import TensorSpec
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError

# A branch of upstream's layer: what computes it, and what adds it to the residual stream.
_BRANCHES = {"self_attention": "self_attn_bda", "cross_attention": "cross_attn_bda", "mlp": "mlp_bda"}
_BRANCHES_OF_MAMBA = {"mixer": "mamba_bda"}


def prepare_config(config: TransformerConfig, parametrization: Parametrization) -> None:
    """The softmax scale, and names of distributions in the place of draws, in the script's own config."""
    config.softmax_scale = parametrization.forward.softmax_scale
    for name, method in INIT_METHODS.items():
        setattr(config, name, method)


class _ConfigsScale:
    """Over multi-latent attention: its softmax scale is the config's. Upstream's works out its own."""

    config: Any

    @property
    def softmax_scale(self) -> float:
        """What the rules say, YaRN's factor in it."""
        return float(self.config.softmax_scale)

    @softmax_scale.setter
    def softmax_scale(self, upstreams: float) -> None:
        """Upstream sets its own, then builds the core attention with what the attribute says."""


@functools.cache
def _latent_attention() -> tuple[type, ...]:
    """Upstream's classes of multi-latent attention; megatron-core 0.19 has a second, for sparse attention."""
    try:
        from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    except ImportError:
        return (MultiLatentAttention,)
    return MultiLatentAttention, AbsorbedMLASelfAttention


@functools.cache
def _with_configs_scale(kind: type) -> type:
    return type(kind.__name__, (_ConfigsScale, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def replaced_attention(spec: Any, config: TransformerConfig) -> Any:
    """A layer spec whose attention takes the config's softmax scale and split sequences; everything else as it is.

    Args:
        spec: of a layer, a block or multi-token prediction, or a part of one.
        config: of the model.
    """
    return _replaced(spec, SdpaAttention if config.context_parallel_size > 1 else DotProductAttention)


def _replaced(spec: Any, core: type) -> Any:
    """Args: a part of a spec; what takes the place of megatron-core's own core attention."""
    if isinstance(spec, type):
        kind: Any = core if spec is DotProductAttention else spec
        return _with_configs_scale(kind) if issubclass(kind, _latent_attention()) else kind
    if isinstance(spec, list):
        return [_replaced(part, core) for part in spec]
    if isinstance(spec, functools.partial):
        named = {name: _replaced(part, core) for name, part in spec.keywords.items()}
        return functools.partial(_replaced(spec.func, core), *(_replaced(part, core) for part in spec.args), **named)
    if not dataclasses.is_dataclass(spec):
        return spec
    made = copy.copy(spec)
    for field in dataclasses.fields(spec):
        setattr(made, field.name, _replaced(getattr(spec, field.name), core))
    return made


def attach_to_built(model: LanguageModule, parametrization: Parametrization, layout: Layout, rank: int) -> None:
    """Puts the table's records and the multipliers on a chunk that was built, its specs with `replaced_attention`.

    Args:
        model: the chunk.
        parametrization: of the whole model.
        layout: how ranks split it.
        rank: global rank of this process.

    Raises:
        UserError: a tensor that is no share of the unsharded one, or a place where a multiplier cannot be put.
    """
    _record(model, parametrization, layout, rank)
    attach(model, parametrization.forward)
    _scale_branches(model, parametrization)
    _check_softmax_scale(model, parametrization.forward.softmax_scale)
    if layout.tensor > 1:
        _sum_gradients_of_down_projections(model)


def _record(model: LanguageModule, parametrization: Parametrization, layout: Layout, rank: int) -> None:
    """Sets every parameter's TensorSpec, once it is a share of the tensor that the table is about."""
    to_global = global_names(model)
    for local_name, parameter in model.named_parameters():
        name = to_global(local_name)
        row = parametrization.tensors.get(name)
        if row is None:
            raise UserError(
                f"{name}: rank {rank} has it, the unsharded model does not; expected the same tensors in every layout"
            )
        spec = row.shape.spec
        share = spec.local_shape(layout.slice_of(spec, rank)[1])
        if tuple(parameter.shape) != share or not _split_alike(parameter, spec):
            raise UserError(
                f"{name}: {_told(parameter)} on rank {rank}, where {_said(spec)}; expected a layer that tells upstream "
                "how tensor parallelism splits it (tensor_model_parallel, partition_dim), or split: in --mup-tensors"
            )
        set_spec(parameter, spec)


def _split_alike(parameter: torch.nn.Parameter, spec: TensorSpec) -> bool:
    """Whether what upstream says of a parameter's partition is what the table has."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return True  # then its shape decides
    strides = {spec.partition_stride, 1} if spec.expert else {spec.partition_stride}  # a grouped layer says 1
    return parameter.partition_dim == spec.partition_dim and stride_of(parameter) in strides  # type: ignore[attr-defined]


def _told(parameter: torch.nn.Parameter) -> str:
    split = getattr(parameter, "tensor_model_parallel", False)
    where = f" split at dimension {getattr(parameter, 'partition_dim', None)}" if split else ""
    return f"it is {list(parameter.shape)}{where}"


def _said(spec: TensorSpec) -> str:
    split = "is whole on every rank" if spec.partition_dim is None else f"is split at dimension {spec.partition_dim}"
    return f"the model's {list(spec.shape)} {split}"


def _scale_branches(model: LanguageModule, parametrization: Parametrization) -> None:
    """Multiplies what each residual branch adds; multi-token prediction's layers have a depth of their own."""
    outside = parametrization.config.hparams.residual_multiplier
    decoder = list(model.decoder.layers)
    kinds = (TransformerLayer, MambaLayer)
    inner = [module for module in model.modules() if isinstance(module, kinds) and module not in decoder]
    for layers, multiplier in ((decoder, parametrization.forward.residual), (inner, outside)):
        if multiplier != 1.0:
            for layer in layers:
                _scale_layer(layer, multiplier)


def _scale_layer(layer: torch.nn.Module, multiplier: float) -> None:
    """Wraps the functions that add a layer's branches.

    Raises:
        UserError: it has none.
    """
    where = f"layer {getattr(layer, 'layer_number', '?')} ({type(layer).__name__})"
    branches = _BRANCHES_OF_MAMBA if isinstance(layer, MambaLayer) else _BRANCHES
    if not isinstance(layer, (TransformerLayer, MambaLayer)):
        raise UserError(
            f"{where}: the multiplier {multiplier:g} of residual branches belongs into self_attn_bda and mlp_bda, "
            "which megatron-core's TransformerLayer has; expected such a layer, or "
            "residual_multiplier: 1 and no depth rule"
        )
    for branch, place in branches.items():
        add = getattr(layer, place)
        if isinstance(add, IdentityFuncOp) and isinstance(getattr(layer, branch), IdentityOp):
            continue
        if isinstance(add, torch.nn.Module):
            raise UserError(
                f"{where}: {place} is {type(add).__name__}, on whose output the multiplier {multiplier:g} cannot be "
                "put; expected a function as megatron-core's get_bias_dropout_add, or residual_multiplier: 1 and no "
                "depth rule"
            )
        setattr(layer, place, scaled_branch(add, multiplier))


def _check_softmax_scale(model: LanguageModule, scale: float) -> None:
    """Checks that attention takes the scale.

    Raises:
        UserError: a core attention has another, or does not tell.
    """
    for name, module in model.named_modules():
        core = getattr(module, "core_attention", None)
        if core is None or isinstance(core, IdentityOp) or _of_transformer_engine(core):
            continue
        found = getattr(core, "softmax_scale", None)
        by_layer = scale / max(1, getattr(core, "layer_number", 1))  # apply_query_key_layer_scaling, restored later
        if found is None or (found != scale and found != by_layer):
            raise UserError(
                f"{name}.core_attention: {type(core).__name__} has the softmax scale {found}, the rules say {scale:g}; "
                "expected a module that keeps the softmax_scale that it is handed"
            )


def _of_transformer_engine(core: Any) -> bool:
    """Whether it is upstream's wrapper, which hands the scale on to kernels that do not tell it."""
    return any(kind.__name__ == "TEDotProductAttention" for kind in type(core).mro())


def _sum_gradients_of_down_projections(model: LanguageModule) -> None:
    """As the shim of multi-latent attention does (`MLASelfAttention`), where tensor parallelism splits the rows."""
    for module in model.modules():
        down = getattr(module, "linear_kv_down_proj", None) if isinstance(module, _latent_attention()) else None
        if down is not None and getattr(down.weight, "tensor_model_parallel", False):
            down.register_forward_hook(functools.partial(MLASelfAttention._gather, module))
