"""Many runs of one process each, at the same time; they go on where they were stopped.

Public names: `Grid`, `Job`, `Outcome`, `ended`, `comparable`. Each run writes its outcome to a file of its own in the
grid's folder, and the process that holds the lock of a run's folder runs it. So any number of commands, on any node
that sees the folder, can work on one grid.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mup_megatron.checkpoints.run_directory import Busy, own_run_directory, write_whole
from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import data_directory, prepare
from mup_megatron.data.record import Prepared
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel.ranks import Rank, stop_signal
from mup_megatron.rules.horizon import said
from mup_megatron.tuning import Stopped
from mup_megatron.tuning.family import digest
from mup_megatron.tuning.megatron import process_for
from mup_megatron.tuning.process import ATTEMPTS, TrialProcess
from mup_megatron.tuning.space import one_process
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_text

_POLL_SECONDS = 0.2
# Where a run happens, and who looks at it, decides nothing of how it ends.
_PLACES = {"run": {"dir", "name", "samples", "audit", "telemetry_interval"}, "data": {"dir", "cache_dir"}}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run.

    Args:
        name: of its folder and its outcome's file.
        config: of one process; where it runs is replaced.
        weight: what it costs beside the others, for the time that is left.
    """

    name: str
    config: Config
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        state: `diverged` where its loss was no finite number, `failed` where it did not come to an end.
        loss: last evaluation's (nats per token); infinite unless complete.
        seconds: of the run.
        reason: of what is not complete.
    """

    state: Literal["complete", "diverged", "failed"]
    loss: float
    seconds: float
    reason: str | None = None


def ended(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """What a result tells of how its runs ended: which failed and why, and seconds of one process."""
    return {
        "failed": [f"{name}: {each.reason}" for name, each in outcomes.items() if each.state == "failed"],
        "seconds": sum(each.seconds for each in outcomes.values()),
    }


def comparable(config: Config) -> Config:
    """The config as a run of a grid: on one process, on shared data, evaluated at the end by its loss.

    Raises:
        ConfigError: it has nothing to validate on, or every run would be refused.
    """
    if config.tuning.command:  # its script evaluates in its own way, on its own data
        return derive(one_process(config), {"training.eval_interval": config.training.train_steps})
    if not float([*config.data.split.split(","), "0"][1]):
        raise config.error("data.split", f"{config.data.split} holds nothing to validate on; expected 98,2,0")
    config = resolve(one_process(config), 1).config
    there = {"data.dir": str(data_directory(config)), "training.eval_interval": config.training.train_steps}
    return derive(config, {**there, "tuning.objective": "loss"})


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where runs are trained, and by whom.

    Args:
        directory: of the command; its runs are in the folder `runs`, and what is there already is not trained again.
        rank: this process, of several that may share the folder; its local rank chooses the GPU of a single worker.
        workers: runs at a time in this process.
        say: takes lines of progress.
    """

    directory: Path
    rank: Rank
    workers: int
    say: Callable[[str], None]

    def prepare(self, configs: Iterable[Config]) -> list[Prepared]:
        """Makes the data of some runs, once no other command makes those of a grid in this folder."""
        with ExitStack() as held:
            while True:
                with suppress(Busy):
                    held.enter_context(own_run_directory(self.directory, Rank(), ".prepare.lock"))
                    break
                time.sleep(_POLL_SECONDS)
            return [prepare(config, self.say) for config in configs]

    def write(self, name: str, result: Mapping[str, Any]) -> Path:
        """Writes a result as JSON; returns the file."""
        path = self.directory / name
        write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
        return path

    def run(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        """Runs what has no outcome yet; returns the outcomes of all, by name, once all are there.

        Args:
            jobs: distinct names.

        Raises:
            UserError: the folder holds a run of this name with other settings.
            DiskFull: nothing more could be written.
            Stopped: SIGTERM; what ran was saved.
        """
        directory, outcomes = self.directory / "runs", {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output: cannot write to {directory}: {error.strerror}") from None
        for job in jobs:
            found = _read(directory, job)
            if found is not None and found.state == "failed":  # it has another chance with every command
                (directory / f"{job.name}.json").unlink(missing_ok=True)
            elif found is not None:
                outcomes[job.name] = found
        if outcomes:
            self.say(f"{len(outcomes)} of {len(jobs)} runs are there already")
        began, before = time.monotonic(), set(outcomes)
        slots = [_Slot(directory, self, number) for number in range(self.workers)]
        with stop_signal() as terminated:
            try:
                while len(outcomes) < len(jobs):
                    if terminated():
                        raise Stopped
                    for job in jobs:
                        if job.name not in outcomes and (found := _read(directory, job)) is not None:
                            outcomes[job.name] = found
                            left = _left(jobs, outcomes, before, time.monotonic() - began)
                            self.say(f"{len(outcomes)}/{len(jobs)} {_said(job, found, left)}")
                    waiting = (job for job in jobs if job.name not in outcomes)
                    for slot in slots:
                        slot.advance(waiting)
                    if not any(slot.busy for slot in slots):
                        time.sleep(_POLL_SECONDS)
            finally:
                for slot in slots:
                    slot.stop(save=terminated())
        return outcomes


def _left(jobs: Sequence[Job], done: Container[str], before: Container[str], seconds: float) -> float:
    """Seconds until all are done, by what ended in these seconds."""
    ended = sum(job.weight for job in jobs if job.name in done and job.name not in before)
    return seconds / ended * sum(job.weight for job in jobs if job.name not in done)


def _said(job: Job, found: Outcome, left: float) -> str:
    how = f"loss {found.loss:.4f}" if found.state == "complete" else f"{found.state}: {found.reason}"
    more = f", about {left / 60:.0f} min left" if left > 90 else ""
    return f"{job.name}: {how} ({found.seconds:.0f} s{more})"


class _Slot:
    """A process that takes one run after the other."""

    def __init__(self, directory: Path, grid: Grid, number: int) -> None:
        self._directory = directory
        name = f"{os.uname().nodename}-{grid.rank.rank}-{number}"
        several = Rank(rank=number, local_rank=number, world_size=grid.workers)
        self._worker = grid.rank if grid.workers == 1 else several
        self._cache, self._log = directory / f"cache-{name}", directory / f"worker-{name}.log"
        self._process: TrialProcess | None = None
        self._job: Job | None = None
        self._held = ExitStack()
        self._began = 0.0
        self._attempts = 0

    @property
    def busy(self) -> bool:
        """Whether a run is under way here."""
        return self._job is not None

    def advance(self, waiting: Iterator[Job]) -> None:
        """Takes the next run that nobody else has, or hears what the one at hand says."""
        if self._job is None:
            any(self._take(job) for job in waiting)
        else:
            self._hear(self._job)

    def stop(self, *, save: bool) -> None:
        """Ends the process; a run at hand is saved first where there is time for it."""
        if self._process is not None:
            if save and self._job is not None:
                self._process.save_and_stop()
            self._process.stop()
        self._held.close()

    def _take(self, job: Job) -> bool:
        with suppress(Busy):
            self._held.enter_context(own_run_directory(self._directory / job.name, Rank(), ".grid.lock"))
            if _read(self._directory, job) is None:
                self._job, self._began, self._attempts = job, time.monotonic(), 0
                self._start(job)
                return True
            self._held.close()
        return False

    def _start(self, job: Job) -> None:
        there = {
            "run.dir": str(self._directory / job.name),
            "run.name": job.name,
            "data.cache_dir": str(self._cache),
            "training.checkpoint_interval": job.config.training.checkpoint_interval or 0,  # the last is never looked at
        }
        if self._process is None:
            self._process = process_for(job.config, self._worker, self._log)
        self._attempts += 1
        self._process.start(derive(job.config, there))

    def _hear(self, job: Job) -> None:
        if self._process is None:
            raise RuntimeError("no process")
        ended = self._process.listen(_POLL_SECONDS, job.config.tuning.hang_timeout)
        if ended is None:
            return
        if ended.state == "complete" and ended.loss is not None:
            self._end(job, "complete", loss=ended.loss)
        elif ended.state in ("diverged", "failed"):
            self._end(job, ended.state, reason=ended.reason)
        elif self._attempts < ATTEMPTS:
            self._start(job)
        else:
            self._end(job, "failed", reason=f"{ended.reason}, twice")

    def _end(self, job: Job, state: Any, *, loss: float = math.inf, reason: str | None = None) -> None:
        outcome = Outcome(state=state, loss=loss, seconds=time.monotonic() - self._began, reason=reason)
        shutil.rmtree(self._directory / job.name / "checkpoints", ignore_errors=True)
        held = {"digest": _digest(job), **vars(outcome), "loss": loss if math.isfinite(loss) else None}
        write_whole(self._directory / f"{job.name}.json", json.dumps(held, indent=1) + "\n")
        self._held.close()
        self._job = None


def _digest(job: Job) -> str:
    data = job.config.model_dump()
    for section, keys in _PLACES.items():
        data[section] = {name: value for name, value in data[section].items() if name not in keys}
    plain = {key: value for key, value in data.items() if key not in ("slurm", "tuning", "watch")}
    if (over := said(job.config)) is not None:  # of `tuning:` the rules over batch and tokens take the trials' own
        plain["horizon"] = over
    if job.config.tuning.command:  # the script, and options of it that no key of the config says
        plain["command"] = job.config.tuning.command
    return digest(plain)


def _read(directory: Path, job: Job) -> Outcome | None:
    """A run's outcome; None while there is none. Raises UserError."""
    path = directory / f"{job.name}.json"
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path}: not an outcome of a run; remove it to run again") from None
    if found.pop("digest", None) != _digest(job):
        raise UserError(
            f"{directory}: {job.name} was run with other settings; choose another --output, or remove that folder"
        )
    found["loss"] = math.inf if found["loss"] is None else found["loss"]
    return Outcome(**found)
