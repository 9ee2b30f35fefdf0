"""Layout-invariant initialisation: the value of a parameter is f(seed, global name, global shape), then sliced.

Upstream's own init depends on the layout (docs/upstream.md), so that no two layouts start from the same weights. Here
the global tensor is drawn in chunks of its flattened index range, each from a generator of its own; a rank draws only
the chunks that its slice touches. Values are bitwise the same in every layout on one kind of device (CPU, CUDA).
Public names: `fill`, `local_slice`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from mup_megatron.rules.shapes import Init, TensorSpec

# Small enough for torch's CUDA generator to draw a chunk in one wave on any data-centre GPU, whose result would
# otherwise depend on the number of multiprocessors.
_CHUNK = 1 << 17
_ROWS_BYTES = 1 << 24


def local_ranges(size: int, stride: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The index ranges of a dimension of `size` that one tensor-parallel rank holds, in its local order.

    megatron-core splits into `stride · ranks` pieces and gives rank r the pieces r, r + ranks, ...
    """
    piece = size // (stride * ranks)
    return [(piece * (rank + i * ranks), piece * (rank + i * ranks + 1)) for i in range(stride)]


def local_slice(whole: torch.Tensor, spec: TensorSpec, rank: int, ranks: int) -> torch.Tensor:
    """The slice of a whole tensor that one of `ranks` ranks holds (`Layout.slice_of`)."""
    dim = spec.partition_dim
    if dim is None or ranks == 1:
        return whole
    ranges = local_ranges(spec.shape[dim], spec.partition_stride, rank, ranks)
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)


@torch.no_grad()
def fill(
    tensor: torch.Tensor,
    *,
    seed: int,
    name: str,
    spec: TensorSpec,
    std: Mapping[str | None, float],
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Fills a rank's slice of a parameter; one whose layer drew its own values keeps them.

    Args:
        tensor: the slice, of shape `spec.local_shape(ranks)`, on its device.
        seed: the run's.
        name: global name of the parameter.
        spec: its TensorSpec.
        std: standard deviation per block ({None: std} for one block).
        rank: tensor-parallel rank.
        ranks: tensor-parallel size.
    """
    if tuple(tensor.shape) != spec.local_shape(ranks):
        raise ValueError(f"{name} has local shape {tuple(tensor.shape)}, expected {spec.local_shape(ranks)}")
    if spec.init in (Init.ZEROS, Init.ONES):
        tensor.fill_(1.0 if spec.init is Init.ONES else 0.0)
        return
    if spec.init is Init.OWN:
        return
    tensor = tensor.view(tensor.shape[0], -1)
    rows, columns = spec.shape[0], math.prod(spec.shape[1:])
    split = local_ranges(spec.shape[spec.partition_dim or 0], spec.partition_stride, rank, ranks)
    row_ranges = split if spec.partition_dim == 0 else [(0, rows)]
    column_ranges = split if spec.partition_dim == 1 else [(0, columns)]
    row_std = local_rows(spec, std, rank, ranks, tensor.device)
    step = max(1, _ROWS_BYTES // (4 * columns))
    at = 0
    for start, stop in row_ranges:
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values = _standard_normal(seed, name, first * columns, last * columns, tensor.device).view(-1, columns)
            if column_ranges != [(0, columns)]:
                values = torch.cat([values[:, low:high] for low, high in column_ranges], dim=1)
            tensor[at : at + last - first].copy_(values.mul_(row_std[at : at + last - first].unsqueeze(1)))
            at += last - first


def local_rows(
    spec: TensorSpec, values: Mapping[str | None, float], rank: int, ranks: int, device: torch.device
) -> torch.Tensor:
    """A value per block as a value per local row of dimension 0, float32."""
    split = [(0, spec.shape[0])]
    if spec.partition_dim == 0:
        split = local_ranges(spec.shape[0], spec.partition_stride, rank, ranks)
    period = _period(spec, values, device)
    rows = torch.cat([torch.arange(start, stop, device=device) for start, stop in split])
    return period[rows % len(period)]


def _period(spec: TensorSpec, values: Mapping[str | None, float], device: torch.device) -> torch.Tensor:
    """The value of each row of one period of dimension 0."""
    if spec.fused is None:
        return torch.tensor([values[None]], dtype=torch.float32, device=device)
    runs = [torch.full((rows,), values[block], dtype=torch.float32, device=device) for block, rows in spec.fused.runs]
    return torch.cat(runs)


def _standard_normal(seed: int, name: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Elements [start, stop) of the flattened standard normal tensor that belongs to `name`."""
    first, last = start // _CHUNK, -(-stop // _CHUNK)
    values = torch.empty(last - first, _CHUNK, device=device)
    for number, chunk in enumerate(values, first):
        digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
        chunk.normal_(generator=torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1))
    return values.view(-1)[start - first * _CHUNK : stop - first * _CHUNK]
