"""Coordinate descent around the best trial of a study: its second stage (tuning.descent).

Public names: `Descent`, `Move`, `Run`, `descend`, `order_of`, `pooled`.

One hyperparameter after the other is tried on both sides of its value, the others staying as they are. The better side
is trained again with the seeds of the value at hand. If its mean loss is lower by more than two standard errors, it
takes the place, and the next value on that side is tried; otherwise the next hyperparameter's turn comes. What is
trained next follows from the losses alone, so that any number of workers, killed at any moment, come to the same runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mup_megatron.config.per_tensor import full_name, split_name
from mup_megatron.config.study import CoordinateDescent, Range
from mup_megatron.tuning.space import Value

Known = Mapping[tuple[int, int], float]
"""Loss by slot and seed, of trials that ended; infinite where one diverged or failed."""

_SHARE = 8
"""The first step along a uniform range is its length over this."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trial that is wanted.

    Args:
        slot: its place, behind those of the joint search; a repetition has that of the trial that it repeats.
        seed: of initial values and data order.
        name: the hyperparameter that is moved.
        values: every value.
    """

    slot: int
    seed: int
    name: str
    values: Mapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class Move:
    """A value that was found better beyond noise.

    Args:
        name: of the hyperparameter.
        before, after: its values.
        loss_before, loss_after: mean losses over the same seeds.
        slot: of the trial that found it.
    """

    name: str
    before: Value
    after: Value
    loss_before: float
    loss_after: float
    slot: int


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How far a descent has come.

    Args:
        slot: the best trial so far, that of the joint search where nothing moved.
        values: its hyperparameters.
        start: the trial of the joint search that it began from.
        noise: standard deviation of a loss over seeds, by the repetitions of both stages; None where it is not known.
        moves: what was accepted, in order.
        repeated: losses of this stage's trials that were repeated, by slot; one per seed, the run's own first.
        count: runs so far, repetitions included.
        missing: runs that come next; empty where the descent is over.
        ended: why it is over: every round was gone through, the next runs would be more than `trials`, or there is no
            noise to judge by.
    """

    slot: int
    values: Mapping[str, Value]
    start: int
    noise: float | None
    moves: list[Move]
    repeated: dict[int, list[float]]
    count: int
    missing: list[Run]
    ended: Literal["rounds", "trials", "noise"] | None


class _Missing(Exception):
    """What comes next is not known yet."""


class _Spent(Exception):
    """The next runs are more than were allowed."""


def order_of(search: Mapping[str, Range]) -> list[str]:
    """The order in which hyperparameters are moved: the embedding's rate, other kinds of tensors, the rest."""
    first = full_name("embedding", "lr")
    return sorted(search, key=lambda name: (name != first, split_name(name) is None))


def neighbours(dimension: Range, value: Value, step: float) -> list[tuple[int, Value]]:
    """The values beside one, each with its side: 1 above, -1 below, 0 where values have no order.

    Args:
        dimension: of the search space, whose ends are not crossed.
        value: at hand.
        step: a factor in the logarithm, and share of the first step along a uniform range: log2 of it.
    """
    if dimension.choice is not None:
        return _beside(dimension.choice, value)
    found: list[tuple[int, Value]] = []
    for side in (1, -1):
        if dimension.log_uniform is not None:
            low, high = dimension.log_uniform
            there = value * step**side
        else:
            low, high = dimension.uniform or (value, value)
            there = value + side * (high - low) / _SHARE * math.log2(step)
        if (there := min(max(there, low), high)) != value:
            found.append((side, there))
    return found


def _beside(choices: Sequence[Value], value: Value) -> list[tuple[int, Value]]:
    if any(isinstance(choice, str) for choice in choices):
        return [(0, choice) for choice in choices if choice != value]
    above = [(1, choice) for choice in sorted(choices) if choice > value]
    below = [(-1, choice) for choice in sorted(choices) if choice < value]
    return above[:1] + below[-1:]


@dataclass
class _Walk:
    """A descent gone through again from its start; ends with `_Missing` where a loss is not known yet."""

    descent: CoordinateDescent
    search: Mapping[str, Range]
    groups: Sequence[Sequence[float]]
    known: Known
    seeds: Sequence[int]
    next_slot: int
    slot: int
    values: dict[str, Value]
    losses: list[float]
    moves: list[Move] = field(default_factory=list)
    repeated: dict[int, list[float]] = field(default_factory=dict)
    count: int = 0
    missing: list[Run] = field(default_factory=list)

    @property
    def noise(self) -> float | None:
        """By every repetition so far, this stage's too."""
        return pooled([*self.groups, *self.repeated.values()])

    def go(self) -> None:
        """Every round; the step's logarithm is halved from one to the next."""
        for number in range(self.descent.rounds):
            for name in order_of(self.search):
                self._along(name, self.descent.factor ** (0.5**number))

    def _along(self, name: str, step: float) -> None:
        sides = neighbours(self.search[name], self.values[name], step)
        while sides:
            tried = [
                Run(slot=self.next_slot + place, seed=self.seeds[0], name=name, values={**self.values, name: value})
                for place, (_, value) in enumerate(sides)
            ]
            losses = self._run(tried)
            self.next_slot += len(tried)
            best = min(range(len(tried)), key=losses.__getitem__)
            if not (losses[best] < self.losses[0] and self._accept(tried[best], losses[best])):
                return
            ahead = neighbours(self.search[name], self.values[name], step)
            sides = [each for each in ahead if each[0] == sides[best][0] != 0]

    def _accept(self, tried: Run, first: float) -> bool:
        """Whether the mean over the seeds is lower by more than two standard errors of the difference; then moves."""
        again = [Run(slot=tried.slot, seed=seed, name=tried.name, values=tried.values) for seed in self.seeds[1:]]
        losses = [first, *self._run(again)]
        self.repeated[tried.slot] = losses
        before, after = statistics.fmean(self.losses), statistics.fmean(losses)
        if not before - after > 2 * (self.noise or 0.0) * math.sqrt(2 / len(losses)):
            return False
        name = tried.name
        self.moves.append(
            Move(
                name=name,
                before=self.values[name],
                after=tried.values[name],
                loss_before=before,
                loss_after=after,
                slot=tried.slot,
            )
        )
        self.slot, self.values, self.losses = tried.slot, dict(tried.values), losses
        return True

    def _run(self, runs: Sequence[Run]) -> list[float]:
        """Their losses. Raises `_Missing` where one is not known, `_Spent` where they are too many."""
        if self.count + len(runs) > self.descent.trials:
            raise _Spent
        self.count += len(runs)
        self.missing = [run for run in runs if (run.slot, run.seed) not in self.known]
        if self.missing:
            raise _Missing
        return [self.known[run.slot, run.seed] for run in runs]


def descend(
    descent: CoordinateDescent,
    search: Mapping[str, Range],
    start: tuple[int, Mapping[str, Value], Mapping[int, float]],
    groups: Sequence[Sequence[float]],
    known: Known,
    next_slot: int,
) -> Descent:
    """How far a descent has come by what is known, and what it trains next.

    Args:
        descent: of the config.
        search: the space, `tuning.search`.
        start: slot, values and loss by seed (the run's own first) of the best trial of the joint search.
        groups: losses over seeds of the trials of the joint search that were repeated, which tell the noise.
        known: losses of this stage's trials.
        next_slot: the first place behind the joint search.
    """
    slot, values, losses = start
    walk = _Walk(
        descent=descent,
        search=search,
        groups=groups,
        known=known,
        seeds=list(losses),
        next_slot=next_slot,
        slot=slot,
        values=dict(values),
        losses=list(losses.values()),
    )
    ended: Literal["rounds", "trials", "noise"] | None = "rounds"
    try:
        if walk.noise is None:
            ended = "noise"
        else:
            walk.go()
    except _Missing:
        ended = None
    except _Spent:
        ended = "trials"
    return Descent(
        slot=walk.slot,
        values=walk.values,
        start=slot,
        noise=walk.noise,
        moves=walk.moves,
        repeated=walk.repeated,
        count=walk.count,
        missing=walk.missing,
        ended=ended,
    )


def pooled(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation over seeds: sqrt(Σ squared deviations / Σ (seeds - 1)); None where nothing was repeated.

    Args:
        groups: losses of a trial over seeds; those of one of which a seed diverged say nothing.
    """
    told = [losses for losses in groups if len(losses) > 1 and all(map(math.isfinite, losses))]
    freedom = sum(len(losses) - 1 for losses in told)
    if not freedom:
        return None
    squares = sum((loss - statistics.fmean(losses)) ** 2 for losses in told for loss in losses)
    return math.sqrt(squares / freedom)
