"""Alarms of a run's loss at every step: what jumps, and what stays above its forecast. Public name: `LossAlarms`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

from mup_megatron.telemetry.alarms import READINGS, Alarm
from mup_megatron.telemetry.forecast import Forecast, LossBins

_WINDOW, _BEFORE = 20, 10
"""Steps whose differences tell the noise of the loss, and the last of them, whose largest loss it is added to."""
_DEVIATIONS, _SHARE = 8.0, 0.05
"""A jump is so many standard deviations above that, and more than this share of it, in `READINGS` steps in a row: one
batch may be unlike the others."""
_OF_MEDIAN = 1.4826 / math.sqrt(2)
"""Standard deviation of normal noise over the median size of a difference of two."""


class LossAlarms:
    """Looks at one loss after the other.

    Args:
        bins: of the run's earlier steps.
        forecast: of the run; None where there is none.
    """

    def __init__(self, bins: LossBins, forecast: Forecast | None) -> None:
        self._bins, self._forecast = bins, forecast
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._jumped: list[int] = []
        full = bins.full()
        self._full = len(full)
        self._above = forecast is not None and len(forecast.above(full)) >= READINGS  # said before a run went on

    def see(self, step: int, loss: float) -> list[Alarm]:
        """What a step newly says.

        Args:
            step: updates done, this one among them.
            loss: of the step, nats per token; a finite number.
        """
        self._bins.add(step, loss)
        return [*self._jump(step, loss), *self._above_forecast(step)]

    def _jump(self, step: int, loss: float) -> list[Alarm]:
        limit, recent = math.inf, list(self._recent)
        if len(recent) == _WINDOW:
            noise = _OF_MEDIAN * statistics.median(abs(one - next) for one, next in itertools.pairwise(recent))
            most = max(recent[-_BEFORE:])
            limit = most + max(_DEVIATIONS * noise, _SHARE * abs(most))
        if loss <= limit:
            self._jumped.clear()
            self._recent.append(loss)
            return []
        self._jumped.append(step)
        if len(self._jumped) >= READINGS:  # it is how the run is now
            self._recent.append(loss)
        if len(self._jumped) != READINGS:
            return []
        cause = "it jumped, for data that are unlike the others or updates that are too large"
        decides = "see the readings around that step, largest logit first, and whether it comes back"
        return [_alarm(step, self._jumped[0], loss, limit, cause, decides)]

    def _above_forecast(self, step: int) -> list[Alarm]:
        if self._forecast is None:
            return []
        full = self._bins.full()
        if len(full) == self._full:
            return []
        self._full = len(full)
        above = self._forecast.above(full)
        if len(above) < READINGS:
            self._above = bool(above) and self._above
            return []
        if self._above:
            return []
        self._above = True
        told, since = above[-1][1], self._bins.first_step(above[0][0])
        cause = f"it stays {full[-1] - told.loss:.3f} above what half of the run so far had it forecast"
        return [_alarm(step, since, full[-1], told.loss + told.half, cause, "run mup-megatron diagnose on this run")]


def _alarm(step: int, since: int, loss: float, limit: float, cause: str, decides: str) -> Alarm:
    return Alarm(
        step=step,
        since=since,
        name="run",
        quantity="loss",
        value=loss,
        low=0.0,
        high=limit,
        cause=cause,
        decides=decides,
    )
