"""Which rates a size of a ladder still has to train, and with which seeds.

Public names: `Wanted`, `wanted`, `NEAR`. The first seed trains every rate. Each later one trains only rates that are
still near the minimum: the best by the seeds so far, the rates beside it, and all within `NEAR` of its loss. Where the
best is the first or last rate, the next one is tried too; where a rate beside the best diverged, the one between them
is. What is wanted follows from the losses alone, so that any number of commands on one folder come to the same runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mup_megatron.proof.ladder_verdict import BOUNDS

NEAR = 0.01
"""Share of the lowest mean loss within which another rate may still turn out to be the best."""

_MORE = 4
"""How many rates more than those that were asked for are tried at most."""

_FINEST = BOUNDS["octaves"]
"""Between the best rate and one that diverged another is tried where they are farther apart than this (octaves)."""

Known = Mapping[tuple[float, int], float]
"""Loss by rate and seed; infinite where it diverged."""


@dataclass(frozen=True)
class Wanted:
    """What is missing of a size.

    Args:
        values: rates, ascending, those beyond what was asked included.
        runs: rate and seed of what is not known yet; empty where nothing is missing.
    """

    values: list[float]
    runs: list[tuple[float, int]]


def wanted(asked: Sequence[float], seeds: Sequence[int], known: Known, most: float = math.inf) -> Wanted:
    """What is to be trained next, by what is known.

    Args:
        asked: rates to begin with.
        seeds: of all repetitions, in their order.
        known: what was trained.
        most: the largest value that there is.
    """
    values = sorted(asked)
    for count in range(1, len(seeds) + 1):
        so_far = seeds[:count]
        rates = values if count == 1 else _near(values, seeds[: count - 1], known)
        if missing := _missing(rates, so_far, known):
            return Wanted(values, missing)
        while (step := _next(values, so_far, known, most)) is not None and len(values) < len(asked) + _MORE:
            values = sorted([*values, step])
            if missing := _missing([step], so_far, known):
                return Wanted(values, missing)
        if missing := _missing(_around(values, _best(values, so_far, known)), so_far, known):
            return Wanted(values, missing)
    return Wanted(values, [])


def _missing(values: Sequence[float], seeds: Sequence[int], known: Known) -> list[tuple[float, int]]:
    return [(value, seed) for seed in seeds for value in values if (value, seed) not in known]


def _means(values: Sequence[float], seeds: Sequence[int], known: Known) -> dict[float, float]:
    """Mean loss of the rates that have all of these seeds."""
    return {
        value: statistics.fmean(known[value, seed] for seed in seeds)
        for value in values
        if all((value, seed) in known for seed in seeds)
    }


def _best(values: Sequence[float], seeds: Sequence[int], known: Known) -> float:
    means = _means(values, seeds, known)
    return min(means, key=lambda value: means[value])


def _around(values: Sequence[float], best: float) -> list[float]:
    """The best rate and those beside it."""
    place = values.index(best)
    return list(values[max(0, place - 1) : place + 2])


def _near(values: Sequence[float], seeds: Sequence[int], known: Known) -> list[float]:
    means = _means(values, seeds, known)
    bound = min(means.values()) * (1 + NEAR)
    beside = _around(values, _best(values, seeds, known))
    return [value for value in values if value in beside or means.get(value, bound + 1) <= bound]


def _next(values: Sequence[float], seeds: Sequence[int], known: Known, most: float) -> float | None:
    """The next rate to try: between the best and one beside it that diverged, else beyond the best; None if neither."""
    best, means = _best(values, seeds, known), _means(values, seeds, known)
    for beside in _around(values, best):
        if means.get(beside) == math.inf and round(abs(math.log2(beside / best)), 6) > _FINEST:
            return math.sqrt(best * beside)
    if best == values[0]:
        return values[0] ** 2 / values[1]
    above = values[-1] ** 2 / values[-2]
    return above if best == values[-1] and above <= most else None
