"""A layer spec that a script hands to GPTModel, against megatron-core's own for the same options.

A config of this project says megatron-core's own layers, and which of their norms are left out. A model of other layers
has no config, so its family is told by a digest of what it is made of.

Public names: `norms_left_out`, `OtherLayers`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

# By class name, for some of them need Apex or Transformer Engine; which of them computes is `norm_implementation`'s.
_NORMS = ("FusedLayerNorm", "WrappedTorchNorm", "TENorm", "LayerNorm", "RMSNorm")
_LAYER_NORMS = ("input_layernorm", "pre_mlp_layernorm")


class OtherLayers(Exception):
    """A layer spec differs from megatron-core's own by more than the norms that it leaves out; says where."""


def norms_left_out(
    config: TransformerConfig, spec: Any, mtp_spec: Any, *, transformer_engine: bool, stage: int | None
) -> list[str]:
    """The norms of megatron-core's own spec that a script's does not have, as `model.without_norms` calls them.

    Args:
        config: of the model.
        spec: of its decoder: of one layer, or of this rank's block.
        mtp_spec: of multi-token prediction; None without it.
        transformer_engine: whether the options ask for Transformer Engine's layers.
        stage: virtual pipeline stage.

    Raises:
        OtherLayers: anything else differs; names the module, and what it is in both.
    """
    own = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=stage,
    )
    block = _block(spec, own)
    if len(block.layer_specs) != len(own.layer_specs):
        raise OtherLayers(
            f"the script's layer spec has {len(block.layer_specs)} layers for this rank, the options give it "
            f"{len(own.layer_specs)}"
        )
    found = {
        f"layer {number} of this rank": _left_out(f"layer {number}", *layers)
        for number, layers in enumerate(zip(block.layer_specs, own.layer_specs, strict=True))
    }
    if mtp_spec is not None:
        last = own if own.layer_specs else _last_layer(config, transformer_engine=transformer_engine)
        own_mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=transformer_engine, vp_stage=stage)
        found["multi-token prediction"] = _left_out("multi-token prediction", mtp_spec, own_mtp)
    first = next(iter(found.values()), set())
    for where, places in found.items():
        if places != first:
            raise OtherLayers(
                f"the script's layer spec has no {' and no '.join(sorted(places ^ first))} in some layers alone "
                f"({where} differs from the first)"
            )
    return sorted([*first, *(["final_layernorm"] if _has_no_final_norm(block, own) else [])])


def _last_layer(config: TransformerConfig, *, transformer_engine: bool) -> Any:
    """megatron-core's own spec of the decoder's last layer, which the layers of multi-token prediction are like."""
    every = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    return getattr(every, "layer_specs", every)[-1]


def _block(spec: Any, own: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A spec as that of a block, as megatron-core reads it."""
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec, ModuleSpec) and spec.module is TransformerBlock:
        return spec.submodules
    if isinstance(spec, ModuleSpec) and spec.module is TransformerLayer:
        return TransformerBlockSubmodules(layer_specs=[spec] * len(own.layer_specs), layer_norm=own.layer_norm)
    raise _differs("layer", getattr(spec, "module", spec), TransformerLayer)


def _has_no_final_norm(block: TransformerBlockSubmodules, own: TransformerBlockSubmodules) -> bool:
    if _is_norm(block.layer_norm):
        return False
    if block.layer_norm not in (None, IdentityOp):
        raise _differs("final_layernorm", block.layer_norm, own.layer_norm)
    return True


def _left_out(where: str, given: Any, own: Any) -> set[str]:
    """Places of norms that one layer leaves out; raises where anything else differs."""
    theirs, ours = dict(_modules(given)), dict(_modules(own))
    places = set()
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        found, expected = theirs.get(path), ours.get(path)
        place = path.rpartition(".")[2]
        if found == expected or (_is_norm(found) and _is_norm(expected)):
            continue
        if place in _LAYER_NORMS and _is_norm(expected) and found in (None, IdentityOp):
            places.add(place)
        elif place != "sharded_state_dict_keys_map" or found:  # of norms: without them a script may have none
            raise _differs(f"{where}: {path or 'module'}", found, expected)
    return places


def _modules(spec: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a spec is made of, by place: classes, functions and parameters.

    Submodules are in a ModuleSpec (megatron-core 0.16), or in a partial of a module's constructor (0.19).
    """
    if isinstance(spec, ModuleSpec):
        yield path, spec.module
        inner = {**spec.params, **spec.metainfo, "submodules": spec.submodules}
    elif isinstance(spec, functools.partial):
        yield path, spec.func
        inner = {**{str(i): value for i, value in enumerate(spec.args)}, **spec.keywords}
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        inner = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    elif isinstance(spec, list):
        inner = {str(i): value for i, value in enumerate(spec)}
    else:
        yield path, spec
        return
    for name, value in inner.items():
        yield from _modules(value, path if name == "submodules" else f"{path}.{name}".removeprefix("."))


def _is_norm(module: Any) -> bool:
    return getattr(module, "__name__", None) in _NORMS


def _differs(where: str, found: Any, expected: Any) -> OtherLayers:
    return OtherLayers(
        f"the script's layer spec: {where} is {_name(found)}, and megatron-core's own for these options is "
        f"{_name(expected)}"
    )


def _name(module: Any) -> str:
    return "nothing" if module is None else getattr(module, "__qualname__", None) or str(module)
