"""Numbers of one reading, added up on each rank and put together over all of them in one exchange in the background.

Public names: `Key`, `Sums`, `SIGNS`, `Exchange`, `keys_of_all`. Ranks may hold parts of a tensor or copies of it: every
element has the same number of copies, so that sums and counts grow alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed


class Key(NamedTuple):
    """What a number is of.

    Args:
        name: of a module or tensor, over the whole model.
        quantity: that is measured.
        numbers: how many there are, e.g. one for each expert.
    """

    name: str
    quantity: str
    numbers: int = 1


class Sums:
    """Sums, counts and largest values by key, on this rank; on the device, so that nobody waits for it."""

    def __init__(self) -> None:
        self.sums: dict[Key, torch.Tensor] = {}
        self.counts: dict[Key, float] = {}
        self.largest: dict[Key, torch.Tensor] = {}

    def add(self, key: Key, total: torch.Tensor, count: float) -> None:
        """Adds a sum, [numbers] or a scalar, of so many elements."""
        total = total.detach().double()
        self.sums[key] = self.sums[key] + total if key in self.sums else total
        self.counts[key] = self.counts.get(key, 0.0) + count

    def add_squares(self, key: Key, values: torch.Tensor, weight: float = 1.0) -> None:
        """Adds the squares of a tensor's elements, each `weight` times, and how many there are."""
        # One pass, without a tensor of squares. CUDA adds up in a tree, a CPU one number after the other.
        exact = torch.float32 if values.is_cuda else torch.float64
        norm = torch.linalg.vector_norm(values.detach(), dtype=exact).double()
        self.add(key, norm.square() * weight, values.numel() * weight)

    def keep_largest(self, key: Key, values: torch.Tensor) -> None:
        """Keeps the largest absolute value."""
        if values.numel():
            found = torch.linalg.vector_norm(values.detach(), ord=torch.inf, dtype=torch.float32).double()
            self.largest[key] = torch.maximum(self.largest[key], found) if key in self.largest else found

    def keep_sum(self, key: Key, values: torch.Tensor) -> None:
        """Keeps the sum of what ranks may hold copies of, with both signs: the largest ones tell whether all agree."""
        parts = [part.sum(dtype=torch.float64) for part in values.detach().flatten().split(_CHUNK)]
        found = torch.stack(parts).sum()
        for sign in SIGNS:
            self.largest[key._replace(quantity=sign + key.quantity)] = -found if sign else found


SIGNS = ("", "-")
"""Before the quantity of a sum that is kept."""
_CHUNK = 2**22
"""Elements that are copied in float64 at a time: 32 MiB."""


class Exchange:
    """The sums of all ranks, on their way.

    Args:
        sums: of this rank.
        keys: of all ranks, in one order; a rank may have none of some.
        device: where ranks exchange.
    """

    def __init__(self, sums: Sums, keys: Sequence[Key], device: torch.device) -> None:
        self._keys = keys
        zeros = {key.numbers: torch.zeros(key.numbers, dtype=torch.float64, device=device) for key in keys}
        totals = [sums.sums[key].to(device).view(-1) if key in sums.sums else zeros[key.numbers] for key in keys]
        counts = torch.tensor([sums.counts.get(key, 0.0) for key in keys], dtype=torch.float64)
        self._sums = torch.cat([*totals, counts.to(device, non_blocking=True)])
        none = torch.full((), -math.inf, dtype=torch.float64, device=device)
        self._largest = torch.stack([sums.largest[key].to(device) if key in sums.largest else none for key in keys])
        self._works = [
            torch.distributed.all_reduce(self._sums, async_op=True),
            torch.distributed.all_reduce(self._largest, op=torch.distributed.ReduceOp.MAX, async_op=True),
        ]

    def found(self) -> Iterable[tuple[Key, list[float], float, float]]:
        """Of each key that any rank had: its sums, its count and its largest value (-inf where there is none)."""
        for work in self._works:
            work.wait()
        sums, largest = self._sums.tolist(), self._largest.tolist()
        at, counts = 0, sums[len(sums) - len(self._keys) :]
        for key, count, most in zip(self._keys, counts, largest, strict=True):
            if count or most != -math.inf:
                yield key, sums[at : at + key.numbers], count, most
            at += key.numbers


def keys_of_all(own: Iterable[Key]) -> list[Key]:
    """The keys of all ranks, in the order in which they are first found. Collective."""
    ranks: list[list[Key]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(ranks, list(own))
    return list(dict.fromkeys(key for keys in ranks for key in keys))
