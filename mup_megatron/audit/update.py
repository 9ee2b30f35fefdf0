"""One optimizer step, recomputed in float64 from what the optimizer keeps.

Public names: `Rates`, `Sample`, `expected_update`.
Adam and Lion keep enough of a gradient for that after their step, whatever happened to the gradient on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mup_megatron.rules.table import TensorHyperparameters

WEIGHT = "weight"
_MOST = 4096
"""Elements of each slice that are looked at."""
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


def expected_update(
    row: TensorHyperparameters,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    *,
    rates: Rates,
    betas: tuple[float, float],
    decoupled: bool,
    updates: int,
) -> torch.Tensor | None:
    """How far the table has the elements move in one step; None where what the optimizer keeps does not tell.

    NaN stands for single elements of which it does not tell: Lion's signs of what is 0 within rounding.

    Args:
        row: of the tensor.
        before: elements of the weight and of the moments before the step, float64.
        after: the same after it.
        rates: of the step.
        betas: of the optimizer.
        decoupled: whether Adam's decay is not part of the gradient.
        updates: in the optimizer's averages, this one among them.
    """
    rule, weight = row.group.update_rule, before[WEIGHT]
    lr = rates.rate(row)
    decay = lr * row.weight_decay * rates.weight_decay * weight if decoupled else torch.zeros_like(weight)
    first, second = betas
    if rule == "adam" and "exp_avg_sq" in after:
        mean = after["exp_avg"] / (1 - first**updates)
        size = (after["exp_avg_sq"] / (1 - second**updates)).sqrt() + (row.eps or 0.0)
        return -lr * mean / size - decay
    if rule == "lion" and "exp_avg" in after:
        held = before.get("exp_avg", torch.zeros_like(weight))
        gradient = (after["exp_avg"] - second * held) / (1 - second)
        step = first * held + (1 - first) * gradient
        rounding = _FLOAT32 * (after["exp_avg"].abs() + held.abs()) * (1 - first) / (1 - second)
        return -lr * step.sign().masked_fill(step.abs() < rounding, torch.nan) - decay
    if rule == "sgd" and "momentum_buffer" in after:
        return -lr * after["momentum_buffer"]  # of torch, which adds the decay to the gradient
    return None
