"""Which rates a size of a ladder still has to train, and with which seeds.

Public names: `Wanted`, `wanted`, `NEAR`. The first seed trains every rate. Each later one trains only rates that are
still near the minimum: the best by the seeds so far, the rates beside it, and all within `NEAR` of its loss. Where the
best is the first or last rate, the next one is tried too. What is wanted follows from the losses alone, so that any
number of commands on one folder come to the same runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEAR = 0.01
"""Share of the lowest mean loss within which another rate may still turn out to be the best."""

_BEYOND = 4
"""How many rates beyond those that were asked for are tried at most."""

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
        while (step := _beyond(values, so_far, known, most)) is not None and len(values) < len(asked) + _BEYOND:
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


def _beyond(values: Sequence[float], seeds: Sequence[int], known: Known, most: float) -> float | None:
    """The next rate to try where the best is the first or the last; None where it lies between others, or is none."""
    best = _best(values, seeds, known)
    if best == values[0]:
        return values[0] ** 2 / values[1]
    above = values[-1] ** 2 / values[-2]
    return above if best == values[-1] and above <= most else None
