"""Readings of a run while it trains: telemetry.jsonl, TensorBoard, Weights & Biases. Public name: `Telemetry`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mup_megatron.checkpoints.checkpoint import TELEMETRY
from mup_megatron.config import Config
from mup_megatron.engines import Engine
from mup_megatron.engines.step_result import StepResult
from mup_megatron.parallel.layout import Layout
from mup_megatron.parallel.ranks import Rank, device_of
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.reading import Readings, usual_interval
from mup_megatron.telemetry.series import Name, SeriesFile
from mup_megatron.train.hooks import Hook, Step
from mup_megatron.train.metrics import Metrics


def interval_of(config: Config) -> int:
    """Steps between two readings; 0 where there are none."""
    asked = config.run.telemetry_interval
    return usual_interval(config.training.train_steps) if asked is None else asked


class Telemetry(Hook):
    """Reads the first step, every so many, and the last.

    Args:
        config: the run.
        engine: that steps it.
        parametrization: of the run.
        layout: how ranks split the model.
        done: updates, before this process's first one.
        rank: this process; the first one writes.
        metrics: of the run, which know TensorBoard and Weights & Biases.
        say: takes a line for the screen.
        look: takes each reading on the first rank, and its step; None where nobody looks.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        parametrization: Parametrization,
        layout: Layout,
        done: int,
        rank: Rank,
        metrics: Metrics,
        say: Callable[[str], None],
        look: Callable[[int, Mapping[Name, float]], None] | None = None,
    ) -> None:
        self._engine, self._metrics, self._say, self._look = engine, metrics, say, look
        self._interval, self._last = interval_of(config), config.training.train_steps
        self._readings = Readings(engine.chunks, engine, parametrization, layout, device_of(rank))
        self._file = SeriesFile(Path(config.run.dir) / TELEMETRY, done) if rank.is_first else None

    def before_step(self, number: int) -> None:
        """Begins a reading where one is due."""
        if number == 1 or number == self._last or number % self._interval == 0:
            self._readings.begin()
            self._engine.before_update = self._readings.before_update

    def after_update(self, number: int, result: StepResult) -> None:
        """Sends the step's reading on its way."""
        if self._engine.before_update is not None:
            self._engine.before_update = None
            self._readings.after_update()

    def after_step(self, step: Step) -> None:
        """Writes the step's reading."""
        self._readings.saw(step.grad_norm)
        found = self._readings.result()
        if problem := self._readings.problem():
            self._say(f"warning: gradients and updates are not measured ({problem})")
        if self._file is not None and found is not None:
            self._file.write(step.number, found)
            if self._look is not None:
                self._look(step.number, found)
            series = {f"{quantity}/{name}": value for (name, quantity), value in found.items()}
            self._metrics.readings(step.number, series)

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._engine.before_update = None
