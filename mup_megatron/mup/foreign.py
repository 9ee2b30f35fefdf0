"""Layers whose weight is not to be read as that of torch.nn.Linear.

Public names: `read_layers`, `check_gates`, `gates`, `is_transposed`, `is_computed`, `has_known_layer`. Other
libraries are not imported: their classes are known by their names.

- Hugging Face's Conv1D (GPT-2 and its kin) keeps its weight fan-in first.
- deepspeed.moe's gate computes with its layer's weight alone and never calls the layer, so that a forward multiplier
  would be lost. Its weight is output-like: init and rate shrink as 1/m (rules/formulas.py), which is the same function.
- Over gains of torch's norms, and over the rows of an embedding, nothing is summed, however many dimensions grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.layer import MuReadout
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether it is transformers' Conv1D, y = x W + b with W of shape [fan-in, fan-out]."""
    return _is(module, "transformers", "Conv1D")


def gates(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers inside gates of deepspeed.moe, and their names."""
    for name, module in model.named_modules():
        if _is(module, "deepspeed.moe", "TopKGate"):
            yield f"{name}.wg".removeprefix("."), module.wg


def check_gates(model: torch.nn.Module) -> None:
    """Refuses a multiplier that nobody would apply.

    Raises:
        UserError: a gate of deepspeed.moe is a MuReadout; names it.
    """
    for name, gate in gates(model):
        if isinstance(gate, MuReadout):
            raise UserError(
                f"{name}: deepspeed.moe computes with this layer's weight and never calls the layer, so a MuReadout's "
                "1/m would be lost; leave it the torch.nn.Linear that deepspeed.moe made, whose init and rate get 1/m"
            )


def read_layers(model: torch.nn.Module, infshape: Callable[[Any], InfShape]) -> None:
    """Tells infinite shapes how their layers read them. Idempotent.

    Args:
        model: with such layers, or without.
        infshape: of a weight.

    Raises:
        UserError: as `check_gates`.
    """
    check_gates(model)
    for _, gate in gates(model):
        of_gate = infshape(gate.weight)
        of_gate.output_like = of_gate[1].grows and not of_gate[0].grows
    for module in model.modules():
        if is_transposed(module):
            infshape(module.weight).read_transposed()
        elif isinstance(module, _NORMS):
            for parameter in module.parameters(recurse=False):
                of_gain = infshape(parameter)
                if len(of_gain) > 1:
                    of_gain.input_like = math.prod((dim.ratio for dim in of_gain), start=formulas.ONE)
        elif isinstance(module, _EMBEDDINGS) and "weight" in module._parameters:
            of_rows = infshape(module.weight)
            if of_rows[0].grows:
                of_rows.input_like = of_rows[1].ratio


_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm)
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_READ = (
    *_NORMS,
    *_EMBEDDINGS,
    torch.nn.Linear,
    _ConvNd,
    torch.nn.Bilinear,
    torch.nn.RNNBase,
    torch.nn.RNNCellBase,
    torch.nn.MultiheadAttention,
)


def is_computed(module: torch.nn.Module) -> bool:
    """Whether a weight of a module is computed of its parameters: weight_norm, spectral_norm, orthogonal, pruning."""
    before = [type(hook).__module__ for hook in module._forward_pre_hooks.values()]
    older = any(each.startswith("torch.nn.utils.") for each in before)
    return older or parametrize.is_parametrized(module)


def has_known_layer(module: torch.nn.Module, infshape: InfShape) -> bool:
    """Whether it is known what a parameter of two dimensions or more does in the module that owns it.

    Of a parameter of somebody else's layer only the sizes are known. One that grows in one dimension is taken for an
    embedding, and may be a head; one that grows in two is taken for a matrix, and may be the bias of every head.
    """
    said = infshape.kind is not None or infshape.output_like or infshape.hidden_like or infshape.tensor is not None
    return said or infshape.ninf() == 0 or len(infshape) < 2 or isinstance(module, _READ) or is_transposed(module)


def _is(module: torch.nn.Module, package: str, name: str) -> bool:
    return any(
        kind.__name__ == name and f"{kind.__module__}.".startswith(f"{package}.") for kind in type(module).__mro__
    )
