"""Numbers that ranks hold parts of, put together in one exchange. Public names: `share_of`, `over_ranks`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed

from mup_megatron.model.parts import counts, holders
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import TensorSpec

Key = TypeVar("Key", bound=Hashable)


def share_of(name: str, spec: TensorSpec, layout: Layout, rank: int) -> float:
    """What a rank's slice of a tensor counts for in a sum over all ranks, in which each element counts once.

    Args:
        name: of the tensor.
        spec: of the tensor.
        layout: how ranks split the model.
        rank: that holds the slice whole.
    """
    return counts(name, spec, layout, rank) / holders(spec, layout)


def over_ranks(
    values: Mapping[Key, Sequence[float]],
    keys: Sequence[Key],
    width: int,
    device: torch.device,
    operation: torch.distributed.ReduceOp.RedOpType = torch.distributed.ReduceOp.SUM,
    absent: float = 0.0,
) -> dict[Key, list[float]]:
    """What ranks hold, put together. Collective; one exchange of float64.

    Args:
        values: of this rank.
        keys: of all ranks, in one order.
        width: how many numbers there are of each key.
        device: where ranks exchange.
        operation: how two ranks' numbers become one.
        absent: what stands for a number that a rank does not hold.
    """
    table = torch.full((len(keys), width), absent, dtype=torch.float64)
    for number, key in enumerate(keys):
        if key in values:
            table[number] = torch.tensor(values[key], dtype=torch.float64)
    table = table.to(device)
    torch.distributed.all_reduce(table, op=operation)
    return dict(zip(keys, table.tolist(), strict=True))
