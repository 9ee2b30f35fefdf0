"""The norm of the whole model's gradient, and clipping by it, whether ranks hold whole gradients or partitions.

There are two norms. `global` is the plain 2-norm. `invariant` is N² = Σ m_out/(A² m_in) |grad|², summed over the blocks
of all tensors; it does not depend on width (docs/parametrization.md, section 6). Its weights are in the table
(`TensorHyperparameters.gradient_norm`); in the standard parametrization all weights are 1 and both norms are equal.
Of a tensor that is stored over θ (section 11), both are norms of the gradient that it would have if it were not.
Sums are in float64. DeepSpeed's own clipping at stage 0 sums in float32, which is off by 1e-5 of the norm already in
small models.

Public name: `clip`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed

from mup_megatron.model.init import local_rows
from mup_megatron.model.parts import Part, counts
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization, TensorHyperparameters

_CHUNK = 2**22
"""Elements that are copied in float64 at a time, 32 MiB, however large a gradient is."""


@torch.no_grad()
def clip(
    parts: Iterable[Part],
    parametrization: Parametrization,
    layout: Layout,
    limit: float,
    device: torch.device,
) -> torch.Tensor:
    """Scales gradients in place so that their norm over all ranks is at most `limit` (0: no limit). Collective.

    Args:
        parts: of gradients, what this rank holds; may be empty. They are scaled in place.
        parametrization: of the same model; its config's `training.clip_norm` says which norm.
        layout: how ranks split the model.
        limit: threshold.
        device: where ranks exchange sums.

    Returns:
        The norm before clipping, a float64 scalar on `device`, the same on every rank; at the base shape both norms are
        the same. The host does not wait for it: gradients below the limit are multiplied by 1.
    """
    invariant = parametrization.config.training.clip_norm == "invariant"
    rank, parts = torch.distributed.get_rank(), list(parts)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        tensor = parametrization.tensors[part.name]
        spec = tensor.shape.spec
        if not counts(part.name, spec, layout, rank):
            continue
        own, slices = layout.slice_of(spec, rank)
        start = part.start
        for chunk in part.values.detach().flatten().split(_CHUNK):
            squares = chunk.double().square()
            value = _weighted(squares, start, tensor, own, slices) if invariant else _plain(squares, tensor)
            total += value.to(device) / part.holders
            start += chunk.numel()
    torch.distributed.all_reduce(total)
    norm = total.sqrt()
    if limit:
        factor = limit / (norm + 1e-6)
        factor = torch.where(factor < 1.0, factor, 1.0)  # of a norm that is no number too
        for part in parts:
            _scale(part.values, factor)
    return norm


def _scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiplies in place. A scalar on a device would be rounded to the tensor's own type first."""
    if values.dtype in (torch.float32, torch.float64):
        values.mul_(factor)
    else:
        values.copy_(values.float().mul_(factor))


def _plain(squares: torch.Tensor, tensor: TensorHyperparameters) -> torch.Tensor:
    """Σ squares of the gradient of the tensor before θ was divided out of it: of what is stored it is θ times that."""
    return squares.sum() / float(tensor.theta**2)


def _weighted(squares: torch.Tensor, start: int, tensor: TensorHyperparameters, rank: int, ranks: int) -> torch.Tensor:
    """Σ weight of the block · squares over elements of a rank's slice of one tensor, from element `start` on."""
    spec, weights = tensor.shape.spec, tensor.gradient_norm
    if spec.fused is None:
        return squares.sum() * weights[None]
    # A block consists of whole rows, so squares are summed per row. The part may begin and end within a row.
    columns = math.prod(spec.local_shape(ranks)[1:])
    first, last = start // columns, -(-(start + squares.numel()) // columns)
    whole = squares.new_zeros((last - first) * columns)
    whole[start - first * columns :][: squares.numel()] = squares
    rows = local_rows(spec, weights, rank, ranks, squares.device)[first:last].double()
    return (whole.view(-1, columns).sum(dim=1) * rows).sum()
