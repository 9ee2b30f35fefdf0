"""Sums over all elements of a tensor, wherever ranks hold them: mean sizes, and the range of values.

Public names: `Sums` (mean absolute values), `Ranges` (largest and root mean square value, and what a format of lower
precision would lose), `of_all_ranks`, `FORMATS`, `COLUMNS`. Each rank adds up what it holds; then sums and counts are
added over all ranks. Ranks may hold parts of a tensor or copies of it: every element has the same number of copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed

FORMATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Formats that values are cast to, without a scale: e4m3 and e5m2 are Micikevicius et al.'s (arXiv 2209.05433)."""

COLUMNS = ("largest", "rms", *(f"{kind} {name}" for name in FORMATS for kind in ("overflow", "underflow")))
"""What a range tells, in this order: the largest absolute value, the root of the mean square, and for each format the
share of the numbers other than 0 that are beyond its largest number, and that it rounds to 0."""


class Sums:
    """Sums of absolute values and counts, by key, on this rank and then on all."""

    def __init__(self) -> None:
        self._held: dict[Any, tuple[torch.Tensor, int]] = {}

    def add(self, key: Any, tensor: torch.Tensor, count: int | None = None) -> None:
        """Adds a tensor's coordinates."""
        total = tensor.detach().abs().sum(dtype=torch.float64)
        before, counted = self._held.get(key, (0.0, 0))
        self._held[key] = total + before, counted + (tensor.numel() if count is None else count)

    def means(self) -> dict[Any, float]:
        """Mean absolute value by key, over all ranks. Collective."""
        here = {key: (float(total), count) for key, (total, count) in self._held.items()}
        whole: dict[Any, list[float]] = {}
        for held in of_all_ranks(here):
            for key, (total, count) in held.items():
                of_key = whole.setdefault(key, [0.0, 0])
                of_key[0] += total
                of_key[1] += count
        return {key: total / count for key, (total, count) in whole.items() if count}


class Ranges:
    """The range of values by key, on this rank and then on all."""

    def __init__(self) -> None:
        self._held: dict[Any, torch.Tensor] = {}

    def add(self, key: Any, tensor: torch.Tensor, count: int | None = None) -> None:
        """Adds a tensor's numbers.

        Args:
            key: under which they are told.
            tensor: of any shape; its numbers are taken as float32.
            count: how many of its elements count, if some that are 0 do not.
        """
        values = tensor.detach().float()
        found = _counted(values, values.numel() if count is None else count)
        self._held[key] = _joined(self._held[key], found) if key in self._held else found

    def told(self) -> dict[Any, list[float]]:
        """`COLUMNS` by key, over all ranks. Collective."""
        whole: dict[Any, torch.Tensor] = {}
        for held in of_all_ranks({key: found.tolist() for key, found in self._held.items()}):
            for key, numbers in held.items():
                found = torch.tensor(numbers, dtype=torch.float64)
                whole[key] = _joined(whole[key], found) if key in whole else found
        return {key: _shares(found.tolist()) for key, found in whole.items() if found[1]}


def _counted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Largest absolute value, count, sum of squares, numbers other than 0, and of each format what is lost; float64."""
    sizes = values.abs()
    found = [
        sizes.max() if values.numel() else sizes.new_zeros(()),
        torch.tensor(count, device=values.device),
        values.double().square().sum(),
        sizes.count_nonzero(),
    ]
    for kind in FORMATS.values():
        found.append((sizes > torch.finfo(kind).max).sum())
        found.append(sizes.count_nonzero() - values.to(kind).float().count_nonzero())
    return torch.stack([each.double() for each in found])


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of both together: the larger of the largest, the sum of all else."""
    return torch.cat([torch.maximum(one[:1], other[:1]), one[1:] + other[1:]])


def _shares(found: Iterable[float]) -> list[float]:
    largest, count, squares, numbers, *lost = found
    return [largest, math.sqrt(squares / count), *(each / numbers if numbers else 0.0 for each in lost)]


def of_all_ranks(here: Any) -> list[Any]:
    """What each rank has, on every rank. Collective."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, here)
    return ranks
