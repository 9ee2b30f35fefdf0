"""Alarms of a run while it trains: said, written, and a checkpoint or an end asked for. Public name: `Alarming`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mup_megatron.checkpoints.checkpoint import ALARMS
from mup_megatron.config import Config
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.alarms import Alarms
from mup_megatron.telemetry.band import band_of
from mup_megatron.telemetry.series import Name
from mup_megatron.train.hooks import Ask, Hook
from mup_megatron.util.files import cut_lines


class Alarming(Hook):
    """Looks at what readings found, on the first rank.

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
        self._alarms = Alarms(
            parametrization, band_of(parametrization, config.band_path, given=config.watch.band is not None)
        )
        self._path, self._is_first, self._say = Path(config.run.dir) / ALARMS, rank.is_first, say
        self._when = {"save": Ask.SAVE, "stop": Ask.STOP}.get(config.watch.action, Ask.NOTHING)
        self._asked, self._peak = Ask.NOTHING, config.hparams.lr
        self._schedule = LearningRateSchedule(config.training, config.hparams.lr)
        if rank.is_first and self._path.exists():
            cut_lines(self._path, done)

    def look(self, step: int, found: Mapping[Name, float]) -> None:
        """Raises what a reading newly shows to be wrong, on the first rank.

        Args:
            step: of the reading.
            found: by name and quantity.
        """
        alarms = self._alarms.see(step, found, self._schedule(step - 1) / self._peak) if self._is_first else []
        if not alarms:
            return
        self._alarms.write(self._path, alarms, self._say)
        self._asked = self._when

    def asks(self) -> Ask:
        """A checkpoint, or an end behind one, where an alarm was raised and `watch.action` says so."""
        asked, self._asked = self._asked, Ask.NOTHING
        return asked
