"""Readings of a run of megatron.training, around the optimizer that upstream built. Public name: `begin`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mup_megatron.checkpoints.checkpoint import ALARMS, TELEMETRY
from mup_megatron.engines.optimizer_state import OptimizerState, updates_done
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.alarms import Alarms, write_alarms
from mup_megatron.telemetry.reading import Readings
from mup_megatron.telemetry.series import SCHEDULE, Name, SeriesFile
from mup_megatron.util.errors import UserError


def begin(
    chunks: Sequence[Any],
    optimizer: Any,
    parametrization: Parametrization,
    layout: Layout,
    *,
    interval: int,
    folder: Path | None,
    write: Callable[[int, Mapping[str, float]], None],
    alarms: Alarms,
) -> None:
    """Reads the first step of this process, and every so many of the run. Collective.

    Args:
        chunks: this rank's part of the model.
        optimizer: of megatron-core, just built; its `step` is wrapped.
        parametrization: of the run.
        layout: how ranks split the model.
        interval: updates between two readings.
        folder: for telemetry.jsonl; None where the run saves nothing.
        write: takes the number of updates and what was found, on every rank.
        alarms: look at what was found, on the first rank.
    """
    named = list(named_parameters(chunks))
    held = OptimizerState(optimizer, named, parametrization, layout)
    readings = Readings(chunks, held, parametrization, layout, named[0][1].device)
    first = torch.distributed.get_rank() == 0
    file: SeriesFile | None = None
    done: int | None = None  # a checkpoint may be loaded until the first step

    def tell(file: SeriesFile | None, done: int, found: Mapping[Name, float]) -> None:
        """On the first rank. A disk that is full ends no run of somebody else's loop."""
        try:
            if file is not None:
                file.write(done, found)
            if wrong := alarms.see(done, found, found.get(SCHEDULE, 0.0)):
                write_alarms(folder / ALARMS if folder else None, wrong, _say)
        except UserError as error:
            _say(f"warning: {error}")

    def around(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done, file
            if done is None:
                done = updates_done(optimizer)
                if first and folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = SeriesFile(folder / TELEMETRY, done)
            reads = readings.is_open
            if reads:
                readings.before_update()
            result = step(*args, **kwargs)
            done += bool(result[0])  # where it was not left out
            readings.saw(result[1])
            if reads:
                readings.after_update()
                found = readings.result() or {}
                write(done, {f"{quantity}/{name}": value for (name, quantity), value in found.items()})
                if problem := readings.problem():
                    _say(f"warning: gradients and updates are not measured here ({problem})")
                if first:
                    tell(file, done, found)
            if (done + 1) % interval == 0:
                readings.begin()
            return result

        return call

    readings.begin()
    optimizer.step = around(optimizer.step)


def _say(line: str) -> None:
    print(f"mup-megatron: {line}", file=sys.stderr, flush=True)
