"""Where a run's loss is going, from the loss curves of the proxy's runs on the schedule's own time.

Public names: `Forecast`, `LossBins`, `LossOfProxy`, `Told`, `bins_of`. Curves of one family over the share of the
schedule have one shape (Qiu et al., arXiv 2507.02119; 2509.25087 has deviations from it as a diagnostic). What tells a
run from the proxy's best ones is the gap between them. It is measured over the last third of what the run has done, and
taken to grow on as time does. How wrong that is of the proxy's own runs, each against the others, makes the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, FiniteFloat

from mup_megatron.util.files import json_lines

BINS = 40
"""Parts of a schedule, evenly spaced, over each of which the loss is averaged."""
_END = BINS // 20
"""Bins whose mean is the loss at the end: the last twentieth."""
FIRST = 2 * BINS // 5
"""Bins before the first forecast; what a run does earlier tells little."""
_WAITS = 4
"""Bins behind the first forecast, before the loss is held against it."""
_NEAR, _AT_MOST = 1.1, 8
"""Of the proxy's other runs those count whose loss ends within so many times the best one's, and no more than these."""
_LEAST = 3
_GROWTH = 0.5
"""Standard deviation of how much a gap grows between now and the end, where it is taken to grow as time does."""
_SHOWN, _ALARMS = 0.95, 0.999
"""Of Student's and of the normal distribution: two-sided 90 % for people; more for alarms, which ask often."""


class LossOfProxy(BaseModel):
    """The loss of one complete run of the proxy.

    Args:
        run: its name.
        chosen: whether its values are the record's.
        losses: nats per token, [BINS].
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    run: str
    chosen: bool
    losses: list[FiniteFloat]


class Told(NamedTuple):
    """A forecast.

    Args:
        loss: nats per token.
        half: half of the interval.
    """

    loss: float
    half: float


class LossBins:
    """A run's losses, averaged over the bins of its schedule.

    Args:
        steps: of the whole run. With fewer than `BINS`, some bins have no step, and what lies between their neighbours.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._sums, self._counts = steps, np.zeros(BINS), np.zeros(BINS)
        self.last = 0

    def add(self, step: int, loss: float) -> None:
        """The loss of a step, the first of which is 1; steps come in order."""
        place = min(BINS - 1, (step - 1) * BINS // self._steps)
        self._sums[place] += loss
        self._counts[place] += 1
        self.last = step

    def add_line(self, line: Mapping[str, Any]) -> None:
        """The loss of a line of metrics.jsonl, where it has one, and that is a finite number."""
        loss, step = line.get("loss"), line.get("step")
        if isinstance(loss, float) and math.isfinite(loss) and isinstance(step, int) and step > 0:
            self.add(step, loss)

    def full(self) -> list[float]:
        """Of the bins that are over, in order."""
        full, told = min(BINS, self.last * BINS // self._steps), self._counts > 0
        if not told[:full].any():
            return []
        found = np.interp(np.arange(BINS), np.flatnonzero(told), self._sums[told] / self._counts[told])
        return [float(each) for each in found[:full]]

    def first_step(self, place: int) -> int:
        """Of a bin."""
        return -(-place * self._steps // BINS) + 1


def bins_of(path: Path, steps: int, last: int | None = None) -> LossBins:
    """The bins of a metrics.jsonl; empty where there is none.

    Args:
        path: of the file.
        steps: of the whole run.
        last: step behind which lines do not count; None takes all.
    """
    bins = LossBins(steps)
    for line in json_lines(path):
        if last is None or line["step"] <= last:
            bins.add_line(line)
    return bins


class Forecast:
    """Forecasts of one run.

    Args:
        proxies: the proxy's complete runs.
    """

    def __init__(self, proxies: Sequence[LossOfProxy]) -> None:
        self._chosen = [np.array(each.losses) for each in proxies if each.chosen]
        others = sorted((np.array(each.losses) for each in proxies if not each.chosen), key=_at_end)
        best = min(map(_at_end, self._chosen), default=-math.inf)
        self._others = [each for each in others if _at_end(each) < _NEAR * best][:_AT_MOST]

    @property
    def runs(self) -> int:
        """Runs of the proxy that the interval is of."""
        return len(self._chosen) + len(self._others)

    def at_end(self, observed: Sequence[float]) -> Told | None:
        """The loss over the last twentieth; None before two fifths of the run, and of too few runs of the proxy.

        Args:
            observed: of the run, its bins so far.
        """
        return self._at(np.array(observed), range(BINS - _END, BINS), _SHOWN)

    def above(self, observed: Sequence[float]) -> list[tuple[int, Told]]:
        """The last bins in a row above what the first half before them had forecast (`FIRST` at least), with that."""
        found: list[tuple[int, Told]] = []
        for place in reversed(range(FIRST + _WAITS, len(observed))):
            before = np.array(observed[: max(FIRST, (place + 1) // 2)])
            told = self._at(before, range(place, place + 1), _ALARMS)
            if told is None or observed[place] <= told.loss + told.half:
                break
            found.append((place, told))
        return found[::-1]

    def _at(self, observed: np.ndarray, places: range, share: float) -> Told | None:
        done = len(observed)
        if done < FIRST or not self._chosen or self.runs < _LEAST:
            return None
        reference = np.mean(self._chosen, axis=0)
        loss, gap = _forecast(observed, reference, places)
        errors = [
            float(each[places].mean()) - _forecast(each[:done], self._without(each), places)[0]
            for each in [*self._others, *(self._chosen if len(self._chosen) > 1 else [])]
        ]
        from scipy import stats

        size = math.sqrt(sum(error**2 for error in errors) / len(errors))
        ahead = (float(np.mean(places)) + 1 - done) / BINS
        half = size * float(stats.t.ppf(share, len(errors)))
        if share == _ALARMS:  # an advantage need not grow at all: a healthy run may keep it as it is
            return Told(loss + max(0.0, -gap) * ahead, half)
        return Told(loss, math.hypot(half, float(stats.norm.ppf(share)) * _GROWTH * gap * ahead))

    def _without(self, run: np.ndarray) -> np.ndarray:
        """What a run of the proxy is held against: the chosen ones but itself."""
        return np.mean([each for each in self._chosen if each is not run], axis=0)


def _at_end(losses: np.ndarray) -> float:
    return float(losses[-_END:].mean())


def _forecast(observed: np.ndarray, reference: np.ndarray, places: range) -> tuple[float, float]:
    """The mean loss over some places, those to come by the gap; and the gap now."""
    done, recent, at = len(observed), max(2, len(observed) // 3), np.array(places)
    gap = float((observed - reference[:done])[-recent:].mean())
    ahead = reference + gap * (1 + (np.arange(BINS) + 1 - done) / BINS)
    return float(np.concatenate([observed, ahead[done:]])[at].mean()), gap
