"""Alarms of a run while it trains: said, written, and a checkpoint or an end asked for. Public name: `Alarming`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mup_megatron.checkpoints.checkpoint import ALARMS, METRICS
from mup_megatron.config import Config
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.alarms import Alarm, Alarms, write_alarms
from mup_megatron.telemetry.band import band_of
from mup_megatron.telemetry.forecast import bins_of
from mup_megatron.telemetry.losses import LossAlarms
from mup_megatron.telemetry.series import Name
from mup_megatron.train.hooks import Ask, Hook, Step
from mup_megatron.util.files import cut_lines


class Alarming(Hook):
    """Looks at what readings found and at every loss, on the first rank.

    Args:
        config: the run.
        parametrization: of the run.
        done: updates, before this process's first one; alarms of later ones are cut off.
        rank: this process.
        say: takes a line for the screen.

    Raises:
        UserError: `watch.band` is not there, or what is there is no band.
    """

    def __init__(
        self, config: Config, parametrization: Parametrization, done: int, rank: Rank, say: Callable[[str], None]
    ) -> None:
        # On every rank, for all end together where it is none.
        band = band_of(parametrization, config.band_path, given=config.watch.band is not None)
        self._alarms = Alarms(parametrization, band)
        self._path, self._is_first, self._say = Path(config.run.dir) / ALARMS, rank.is_first, say
        self._when = {"save": Ask.SAVE, "stop": Ask.STOP}.get(config.watch.action, Ask.NOTHING)
        self._asked, self._peak = Ask.NOTHING, config.hparams.lr
        self._schedule = LearningRateSchedule(config.training, config.hparams.lr)
        if not rank.is_first:
            return
        if self._path.exists():
            cut_lines(self._path, done)
        bins = bins_of(Path(config.run.dir) / METRICS, config.training.train_steps, done)
        self._losses = LossAlarms(bins, None if band is None else band.forecast)

    def look(self, step: int, found: Mapping[Name, float]) -> None:
        """Raises what a reading newly shows to be wrong, on the first rank.

        Args:
            step: of the reading.
            found: by name and quantity.
        """
        if self._is_first:
            self._raise(self._alarms.see(step, found, self._schedule(step - 1) / self._peak))

    def after_step(self, step: Step) -> None:
        """Raises what the step's loss newly shows."""
        if self._is_first and math.isfinite(step.loss):
            self._raise(self._losses.see(step.number, step.loss))

    def _raise(self, alarms: Sequence[Alarm]) -> None:
        if alarms:
            write_alarms(self._path, alarms, self._say)
            self._asked = self._when

    def asks(self) -> Ask:
        """A checkpoint, or an end behind one, where an alarm was raised and `watch.action` says so."""
        asked, self._asked = self._asked, Ask.NOTHING
        return asked
