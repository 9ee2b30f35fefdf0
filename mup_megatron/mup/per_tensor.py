"""Factors on rate, decay and initial values of single tensors of a plain torch model: `hparams.per_tensor` there.

Public name: `set_per_tensor`. A factor is the same at every width, and multiplies what the rules give. It stays with
the parameter's infinite shape, from which every optimizer and every init of this package reads it. An entry is a
pattern of parameter names, or a kind:

    embedding   weights of torch.nn.Embedding
    hidden      matrices whose fan-in and fan-out both grow
    readout     weights of MuReadout, and other matrices of which the fan-in alone grows
    router      routers of what `prepare_hf` knows
    gains       gains of norms
    biases      biases

Where `prepare_hf` knows the architecture, kinds do not follow what grows: readout is the untied head, and hidden every
other matrix but embeddings and routers, at the base and with fixed heads too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from mup_megatron.config.per_tensor import KINDS, PerTensor, is_pattern
from mup_megatron.mup.layer import MuReadout
from mup_megatron.mup.parameters import clean_names, infshape_of, scale_
from mup_megatron.util.errors import UserError

_KINDS = ("embedding", "hidden", "readout", "router", "gains", "biases")
_KEY = "per_tensor"


def set_per_tensor(model: torch.nn.Module, entries: Mapping[str, Any], *, rescale: bool = True) -> dict[str, PerTensor]:
    """Gives tensors factors of their own on learning rate, weight decay and the deviation of initial values.

    Call it after `set_base_shapes` or `prepare_hf`, before the optimizer is built. Later calls of `init.normal_` and
    its kin take the factors too.

    Args:
        model: its parameters carry infinite shapes.
        entries: by kind or pattern of names (with a star, a question mark or a dot), factors by `lr`, `weight_decay`
            and `init`; what is not said is 1. A tensor that several entries name takes their product.
        rescale: whether the values that are there are initial ones, which `init` multiplies; False if they come from a
            checkpoint or are drawn again.

    Returns:
        The factors of each tensor that an entry names, by parameter name.

    Raises:
        UserError: an entry names no tensor, is no kind, or has nothing to act on; a factor is no number above 0; the
            model has factors already. The model is unchanged then.
    """
    factors = {entry: _factors(entry, said) for entry, said in entries.items()}
    clean = clean_names(name for name, _ in model.named_parameters())
    parameters = {clean[name]: parameter for name, parameter in model.named_parameters()}
    for name, parameter in parameters.items():
        if infshape_of(parameter).per_tensor is not None:
            raise UserError(f"{_KEY}: {name} has factors already; expected one call, with every entry")
    kinds = {clean[name]: kind for name, kind in _kinds(model).items()}
    found: dict[str, PerTensor] = {}
    for entry, said in factors.items():
        named = [name for name in parameters if _names(entry, name, kinds.get(name))]
        _check_named(entry, said, {name: parameters[name] for name in named}, rescale)
        for name in named:
            found[name] = _product(name, found.get(name, PerTensor()), said)
    for name, said in found.items():
        infshape_of(parameters[name]).per_tensor = said
        if rescale and said.init != 1.0:
            scale_(parameters[name], said.init)
    return found


def _factors(entry: str, said: Any) -> PerTensor:
    if not is_pattern(entry) and entry not in _KINDS:
        other = f"; {entry} is no kind of a plain torch model" if entry in KINDS else ""
        raise UserError(
            f"{_KEY}.{entry}: expected one of {', '.join(_KINDS)}, or a pattern of parameter names with a star, a "
            f"question mark or a dot{other}"
        )
    try:
        return said if isinstance(said, PerTensor) else PerTensor.model_validate(dict(said))
    except (ValidationError, TypeError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = f"{entry}.{'.'.join(map(str, first['loc']))}" if first else entry
        why = f"{first['msg']}; " if first else ""
        raise UserError(f"{_KEY}.{where}: {why}expected numbers above 0 for lr, weight_decay and init") from None


def _kinds(model: torch.nn.Module) -> dict[str, str]:
    """Kind of each parameter, by name; those that are none are left out."""
    found = {}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        if (kind := _kind(module, own, parameter)) is not None:
            found[name] = kind
    return found


def _kind(module: torch.nn.Module, own: str, parameter: Any) -> str | None:
    infshape = infshape_of(parameter)
    if infshape.tensor is not None:  # of megatron-core's layers, which have kinds of their own
        return None
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if len(infshape) == 1 or infshape.input_like is not None:
        gain = own == "weight" and "norm" in type(module).__name__.lower()
        return "gains" if gain else "biases" if own.endswith("bias") else None
    if infshape.kind is not None:
        return infshape.kind
    if isinstance(module, MuReadout):
        return "readout"
    if len(infshape) < 2 or infshape.ninf() == 0:
        return None
    if infshape.ninf() == 2:
        return "hidden"
    return "readout" if infshape.fanin_fanout()[0].grows else None


def _names(entry: str, name: str, kind: str | None) -> bool:
    return fnmatch.fnmatchcase(name, entry) if is_pattern(entry) else entry == kind


def _check_named(entry: str, said: PerTensor, named: Mapping[str, Any], rescale: bool) -> None:
    if not named:
        tied = "; a tied head is the embedding" if entry == "readout" else ""
        raise UserError(f"{_KEY}.{entry}: names no parameter of this model{tied}")
    if said.init != 1.0 and (entry == "gains" or all(_is_constant(parameter, rescale) for parameter in named.values())):
        raise UserError(f"{_KEY}.{entry}.init: {said.init:g}: their initial values are constants; expected 1")


def _is_constant(parameter: Any, rescale: bool) -> bool:
    """Whether initial values are there, whole, and all alike, such as the ones of a gain."""
    values = parameter.detach()
    split = values.is_meta or hasattr(parameter, "ds_shape") or hasattr(values, "to_local")
    if split or not rescale:
        return False
    return bool((values == values.flatten()[0]).all())


def _product(name: str, one: PerTensor, other: PerTensor) -> PerTensor:
    try:
        return PerTensor(**{what: getattr(one, what) * getattr(other, what) for what in PerTensor.model_fields})
    except ValidationError:
        raise UserError(f"{_KEY}: the factors of {name} multiply to what is no number of a factor's range") from None
