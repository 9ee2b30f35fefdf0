"""Which multiple of another tensor a tensor is, and how well that is known.

Public names: `Measured`, `multiple`, `rounding`, `DEVIATIONS`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

DEVIATIONS = 5.0
"""Standard deviations of the rounding errors that a number may be off by."""


def rounding(tensor: torch.Tensor) -> float:
    """Standard deviation of what rounding to a tensor's dtype adds to a number, over the number: at most this."""
    return torch.finfo(tensor.dtype).eps / math.sqrt(12)


class Measured(NamedTuple):
    """A number with what is known of it; tensors of one element until they are brought to the host.

    Args:
        found: the number; NaN where there was nothing to measure.
        noise: how far rounding may have moved it.
        strange: share of the sum of squares that it does not explain, rounding left aside.
    """

    found: Any
    noise: Any
    strange: Any


def multiple(
    output: torch.Tensor,
    reference: torch.Tensor,
    *,
    dropout: float = 0.0,
    dropped_in: torch.dtype | None = None,
    rounded: torch.Tensor | None = None,
) -> Measured:
    """Least squares for m in output = m · reference, in float64.

    Args:
        output: any shape.
        reference: of the same shape.
        dropout: probability with which an element of the output was set to 0 and the others were divided by what is
            left.
        dropped_in: in which that was computed, where torch may have rounded the factor itself, as it does on a CPU (of
            0.1 in bf16 it is 1.109375, 0.16 % below 1 / 0.9); that of `rounded` unless given.
        rounded: of which the output is a difference, in the dtype in which that was rounded; the output itself unless
            given.
    """
    rounded = output if rounded is None else rounded
    step = rounding(rounded) * rounded.double().square().mean().sqrt()
    output, reference, scale_error = output.double() * (1.0 - dropout), reference.double(), 0.0
    if dropout:
        reference = reference * (output != 0)
        scale = 1.0 / (1.0 - dropout)
        scale_error = abs(torch.tensor(scale, dtype=dropped_in or rounded.dtype).item() / scale - 1.0)
    size = reference.square().sum()
    found = (output * reference).sum() / size
    off = (output - found * reference).square().sum() - output.numel() * step.square()
    strange = off.clamp(min=0.0) / output.square().sum()
    return Measured(found, DEVIATIONS * step / size.sqrt() + scale_error * found.abs(), strange)
