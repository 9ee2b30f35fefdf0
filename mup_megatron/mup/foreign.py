"""Layers of other libraries whose weight is not to be read as that of torch.nn.Linear.

Public names: `read_layers`, `check_gates`, `gates`, `is_transposed`. Neither library is imported: its classes are known
by their names.

- Hugging Face's Conv1D (GPT-2 and its kin) keeps its weight fan-in first.
- deepspeed.moe's gate computes with its layer's weight alone and never calls the layer, so that a forward multiplier
  would be lost. Its weight is output-like: init and rate shrink as 1/m (rules/formulas.py), which is the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.layer import MuReadout
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


def _is(module: torch.nn.Module, package: str, name: str) -> bool:
    return any(
        kind.__name__ == name and f"{kind.__module__}.".startswith(f"{package}.") for kind in type(module).__mro__
    )
