"""One optimizer step, recomputed in float64 from what the optimizer keeps.

Public names: `Rates`, `Sample`, `expected_update`, `share_of_update`, `judged_update`, `ERROR`.
Adam and Lion keep enough of a gradient for that after their step, whatever happened to the gradient on its way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mup_megatron.audit.findings import Finding
from mup_megatron.rules.formulas import UpdateRule
from mup_megatron.rules.table import TensorHyperparameters

WEIGHT = "weight"
_MOST = 4096
"""Elements of each slice that are looked at."""
ERROR = 1e-3
"""Share of an update by which it may be off (root of the sum of squares over the elements looked at)."""
_ROUNDING = 2.0**-23
"""Of a weight in float32, from which an update is subtracted."""
_FLOAT32 = 2.0**-22
"""Of the larger terms of a difference in float32: four of its roundings."""


class Rates(NamedTuple):
    """What schedules make of the table's numbers at one step: a factor on each tensor's.

    Args:
        lr: rate of the step over the rate at the schedule's peak.
        weight_decay: of the step over the table's.
        decoupled: as `lr`, of tensors whose base rate is `optimizer.decoupled_lr`; None where it is the same.
    """

    lr: float
    weight_decay: float = 1.0
    decoupled: float | None = None

    def rate(self, row: TensorHyperparameters) -> float:
        """The rate of a tensor at the step."""
        return row.lr * (self.lr if self.decoupled is None or not row.group.decoupled else self.decoupled)


@dataclass(frozen=True)
class Sample:
    """Elements of a rank's slice of a parameter and of its optimizer state before a step.

    Args:
        places: of the elements in the flattened slice.
        values: of them, float64, by kind: `weight`, and the optimizer's moments by torch's names.
    """

    places: torch.Tensor
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, whole: Mapping[str, torch.Tensor]) -> Sample:
        """Elements at even distances, all of them where there are few."""
        count = whole[WEIGHT].numel()
        places = torch.linspace(0, max(0, count - 1), min(count, _MOST), dtype=torch.float64).long()
        sample = cls(places.to(whole[WEIGHT].device), {})
        sample.values.update(sample.taken(whole))
        return sample

    def taken(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same elements of later values, of those kinds that have one number per element."""
        size = whole[WEIGHT].numel()
        return {
            kind: value.detach().flatten()[self.places.to(value.device)].double()
            for kind, value in whole.items()
            if value.numel() == size
        }


def share_of_update(
    expected: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    *,
    error: float = ERROR,
    rounding: float = _ROUNDING,
) -> list[float]:
    """Sums over elements: how far off a step is, squared; how far it may be; and what it is along the expected one.

    Args:
        expected: what the elements should have moved, float64; NaN where it is not told.
        before: the weights' elements, float64.
        after: the same behind the step.
        error: share of the update by which it may be off.
        rounding: of the weights, relative.
    """
    told = ~expected.isnan()
    expected, moved = expected[told], (after - before)[told]
    allowed = (error * expected).square() + (rounding * after[told]).square()
    numbers = ((moved - expected).square(), allowed, moved * expected, expected.square())
    return [float(number.sum()) for number in numbers]


def judged_update(name: str, sums: Sequence[float], error: float = ERROR) -> Finding:
    """What is found of a step, from `share_of_update` and the share that it was given."""
    off, allowed, along, size = sums
    return Finding(
        tensor=name,
        quantity="update over the table's",
        expected=1.0,
        found=along / size if size else 1.0 if off <= allowed else math.inf,
        within=f"{error:.3g} of it, and the rounding of weights",
        right=off <= allowed,
    )


def expected_update(
    rule: UpdateRule,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    *,
    lr: float,
    eps: float,
    decay: float,
    betas: tuple[float, float],
    updates: int,
    direction: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """How far the elements move in one step; None where what the optimizer keeps does not tell.

    NaN stands for single elements of which it does not tell: Lion's signs of what is 0 within rounding.

    Args:
        rule: how the optimizer's update scales.
        before: elements of the weight and of the moments before the step, float64.
        after: the same after it.
        lr: learning rate of the step.
        eps: Adam's epsilon.
        decay: decoupled; 0 where it is part of the gradient.
        betas: of the optimizer.
        updates: in the optimizer's averages, this one among them.
        direction: elements of what Muon's or SOAP's rate multiplies, float64 (matrices.py); None where it is not known.
    """
    shrunk, (first, second) = lr * decay * before[WEIGHT], betas
    if rule == "adam" and "exp_avg_sq" in after:
        mean = after["exp_avg"] / (1 - first**updates)
        size = (after["exp_avg_sq"] / (1 - second**updates)).sqrt() + eps
        return -lr * mean / size - shrunk
    if rule == "lion" and "exp_avg" in after:
        held = before.get("exp_avg", torch.zeros_like(shrunk))
        gradient = (after["exp_avg"] - second * held) / (1 - second)
        step = first * held + (1 - first) * gradient
        rounding = _FLOAT32 * (after["exp_avg"].abs() + held.abs()) * (1 - first) / (1 - second)
        return -lr * step.sign().masked_fill(step.abs() < rounding, torch.nan) - shrunk
    if rule in ("muon", "soap") and direction is not None:
        return -lr * direction - shrunk
    if rule == "sgd" and "momentum_buffer" in after:
        return -lr * after["momentum_buffer"]  # of torch, which adds the decay to the gradient
    return None
