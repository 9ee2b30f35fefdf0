"""Where the loss over a hyperparameter is least, how far that moves from size to size, and what moving costs.

Public names: `Curve`, `Minimum`, `minimum`, `in_words`, `least_loss`, `drift`, `moves_at_least`, `transfer_cost`,
`wider_is_worse`, `pooled_noise`. Plain numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Losses = Mapping[int, float]
"""Loss (nats per token) by seed; infinite where it diverged."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss over one hyperparameter, at one size.

    Args:
        values: that were tried, ascending where they are numbers.
        losses: per value.
    """

    values: Sequence[float | str]
    losses: Sequence[Losses]

    @property
    def means(self) -> list[float]:
        """Over seeds; infinite where a seed diverged."""
        return [statistics.fmean(losses.values()) for losses in self.losses]

    @property
    def by_value(self) -> list[list[float]]:
        """Per value, the losses of its seeds."""
        return [list(losses.values()) for losses in self.losses]

    @property
    def seeds(self) -> list[int]:
        """Seeds that every value has."""
        return sorted(set.intersection(*(set(losses) for losses in self.losses)))

    @property
    def best(self) -> int:
        """Place of the value with the lowest mean."""
        return min(range(len(self.values)), key=lambda place: self.means[place])


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """Of a curve.

    Args:
        tried: the best of the values that were tried.
        value: of the parabola through the lowest three points, over the value's logarithm; None where there is none:
            the best value is the first or the last, a neighbor diverged, or values are names.
        error: standard error of log2(value) over seeds (each seed's own parabola); None without it.
        loss: lowest mean.
        edge: `low` or `high` where the best value is the first or last one that was tried.
    """

    tried: float | str
    value: float | None
    error: float | None
    loss: float
    edge: str | None


def minimum(curve: Curve) -> Minimum:
    """The minimum of the mean over seeds."""
    place, found = curve.best, _parabola(curve.values, curve.means)
    tried, edges = curve.values[place], {0: "low", len(curve.values) - 1: "high"}
    of_seeds = [_parabola(curve.values, [losses[seed] for losses in curve.losses]) for seed in curve.seeds]
    vertices = [each[0] for each in of_seeds if each is not None]
    known = found is not None and len(vertices) == len(of_seeds) > 1
    return Minimum(
        tried=tried,
        value=None if found is None else 2.0 ** found[0],
        error=statistics.stdev(vertices) / math.sqrt(len(vertices)) if known else None,
        loss=curve.means[place],
        edge=edges.get(place) if isinstance(tried, float) else None,
    )


def in_words(least: Mapping[str, Any], over: str) -> str:
    """A Minimum in a record: the lowest loss, at the value that it was measured at, and where the parabola has its own.

    Args:
        least: of the record.
        over: the hyperparameter.
    """
    tried, value, error = least["tried"], least["value"], least["error"]
    said = f"loss {least['loss']:.4f} at {over} {tried if isinstance(tried, str) else f'{tried:.3g}'}"
    said += f", at the {least['edge']} end of what was tried" if least["edge"] else ""
    if value is None:
        return said
    return f"{said}, the parabola's best {value:.3g}" + (f" ± {error:.2f} octaves" if error is not None else "")


def least_loss(curve: Curve) -> float:
    """Of the parabola that `minimum` goes by; the lowest mean where there is none."""
    found = _parabola(curve.values, curve.means)
    return min(curve.means) if found is None else found[1]


def _parabola(values: Sequence[float | str], losses: Sequence[float]) -> tuple[float, float] | None:
    """log2 of where the parabola through the lowest point and its neighbors is least, and the loss there."""
    place = min(range(len(values)), key=lambda each: losses[each])
    numbers = [value for value in values[max(0, place - 1) : place + 2] if isinstance(value, float)]
    if not 0 < place < len(values) - 1 or len(numbers) < 3 or not math.isfinite(losses[place - 1] + losses[place + 1]):
        return None
    x, y = [math.log2(value) for value in numbers], losses[place - 1 : place + 2]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    bend = (right - left) / (x[2] - x[0])
    if bend <= 0:  # three equal losses
        return x[1], y[1]
    vertex = (x[0] + x[1]) / 2 - left / (2 * bend)
    return vertex, y[0] + left * (vertex - x[0]) + bend * (vertex - x[0]) * (vertex - x[1])


def drift(small: Minimum, large: Minimum) -> tuple[float, float] | None:
    """How far the minimum moves from a size to a larger one.

    Returns:
        Octaves (positive where the larger size wants more), and their standard error (0 where it is not known); None
        where one of the two is not known, or values are names.
    """
    if small.value is None or large.value is None:
        return None
    return math.log2(large.value / small.value), math.hypot(small.error or 0.0, large.error or 0.0)


def moves_at_least(small: Minimum, large: Minimum) -> float | None:
    """How far the minimum moves at least, where one or both lie beyond what was tried.

    Returns:
        Octaves, less two standard errors of the one that is known; None where the minima may be the same.
    """

    def between(least: Minimum) -> tuple[float, float]:
        if not isinstance(least.tried, float) or (least.value is None and least.edge is None):
            return -math.inf, math.inf
        if least.value is not None:
            place, error = math.log2(least.value), 2 * (least.error or 0.0)
            return place - error, place + error
        place = math.log2(least.tried)
        return (-math.inf, place) if least.edge == "low" else (place, math.inf)

    (small_low, small_high), (large_low, large_high) = between(small), between(large)
    up, down = large_low - small_high, large_high - small_low
    return up if up > 0 else down if down < 0 else None


def transfer_cost(small: Curve, large: Curve) -> float:
    """Loss of the large size at the small one's best value over the large one's best, minus 1; infinite if diverged."""
    means = dict(zip(large.values, large.means, strict=True))
    return means[small.values[small.best]] / min(means.values()) - 1


def pooled_noise(curves: Sequence[Curve]) -> float | None:
    """Standard deviation of a loss over seeds, pooled over finite points near the minima; None with a single seed.

    Near: within a tenth of its curve's best. Far from it, on the verge of divergence, losses scatter more.
    """
    squares, freedom = 0.0, 0
    for curve in curves:
        near = 1.1 * min(curve.means)
        for losses, mean in zip(curve.losses, curve.means, strict=True):
            if len(losses) > 1 and mean <= near and math.isfinite(mean):
                squares += sum((loss - mean) ** 2 for loss in losses.values())
                freedom += len(losses) - 1
    return math.sqrt(squares / freedom) if freedom else None


def wider_is_worse(small: Curve, large: Curve, noise: float | None) -> list[float | str]:
    """Values at which the large size's loss exceeds the small one's by more than twice the difference's error.

    Args:
        small: of a size.
        large: of a larger one; the same values.
        noise: of one loss (`pooled_noise`); any excess counts where it is None.
    """
    found = []
    for place, value in enumerate(small.values):
        counts = len(small.losses[place]), len(large.losses[place])
        error = (noise or 0.0) * math.sqrt(sum(1 / count for count in counts))
        if large.means[place] > small.means[place] + 2 * error:
            found.append(value)
    return found
