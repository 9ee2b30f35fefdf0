"""A tuning worker: takes trials from the study and has them run in processes of their own, which it watches.

Public name: `work`. Where `tuning.trials_per_device` says so it runs several at a time.

The worker itself holds no CUDA context and no model. So if a trial runs out of memory, hangs or kills its process,
only that trial is affected. It goes on once from its last checkpoint, in a new process; the second time it has failed.
"""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.run_directory import Busy, own_run_directory
from mup_megatron.config import Config
from mup_megatron.parallel.ranks import Rank, stop_signal
from mup_megatron.tuning import Stopped
from mup_megatron.tuning.abreast import Abreast, most_abreast
from mup_megatron.tuning.lease import Lost, Overtaken
from mup_megatron.tuning.megatron import process_for
from mup_megatron.tuning.outcome import Trial
from mup_megatron.tuning.process import ATTEMPTS, End, Evaluation, Step, gpus, local_ranks
from mup_megatron.tuning.space import proxy_config, tuning_steps
from mup_megatron.tuning.study import Study
from mup_megatron.util.disk import full_disk
from mup_megatron.util.errors import UserError

_SAY_SECONDS = 60.0
_BUSY_SECONDS = 5.0  # by then the lock of a killed owner is free; an owner that is only stopped may keep it for hours


def work(
    config: Config,
    study: Study,
    rank: Rank,
    done: Callable[[], bool],
    say: Callable[[str], None] = lambda _line: None,
) -> None:
    """Runs trials until `done` says that no more will come.

    Args:
        config: the target's run.
        study: created.
        rank: this process; its local rank chooses the GPU.
        done: asked between trials and while waiting; the first rank moves the study on in it.
        say: takes a line of progress.

    Raises:
        Stopped: SIGTERM.
        DiskFull: nothing more could be written; the trial at hand waits.
    """
    with full_disk(study.directory, "the study"), stop_signal() as terminated:
        crew = _Crew(config, study, rank, done, terminated, say)
        with crew.others():
            crew.follow(0, study, crew.done, terminated)


class _Crew:
    """The trials that run at the same time on one device: the first in the caller's thread, each other one in its own.

    Arguments as of `work`.
    """

    def __init__(
        self,
        config: Config,
        study: Study,
        rank: Rank,
        done: Callable[[], bool],
        terminated: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.config, self.rank, self.say = config, rank, say
        here = local_ranks(rank, os.environ)
        self.most = most_abreast(config, here)
        measured = config.tuning.trials_per_device == "auto"
        self.abreast = Abreast(self.most, measured=measured, say=say, sharing=1 if gpus() else here)
        self._study, self._done, self._terminated = study, done, terminated
        self._threads: list[threading.Thread] = []
        self._over, self._raised = threading.Event(), queue.SimpleQueue[BaseException]()

    def done(self) -> bool:
        """As `work`'s; raises what another thread did, and starts the threads that are missing."""
        if not self._raised.empty():
            raise self._raised.get()
        for number in range(len(self._threads) + 1, self.abreast.count()):
            thread = threading.Thread(target=self._run, args=(number,), name=f"trial {number}")
            self._threads.append(thread)
            thread.start()
        return self._done()

    @contextmanager
    def others(self) -> Iterator[None]:
        """At the end the other threads save their trials and end too."""
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _run(self, number: int) -> None:
        try:
            with suppress(Stopped):
                self.follow(number, self._study.again(), lambda: False, self._is_over)
        except BaseException as error:
            self._raised.put(error)

    def _is_over(self) -> bool:
        return self._over.is_set() or self._terminated()

    def follow(self, number: int, study: Study, done: Callable[[], bool], terminated: Callable[[], bool]) -> None:
        """Runs one trial after the other, as `work`; a number that is one too many returns between two of them."""
        worker = _Worker(self, number, study, done, terminated)
        try:
            while not done() and number < self.abreast.count():
                if terminated():
                    raise Stopped
                trial = study.claim()
                if trial is None:
                    time.sleep(0.2)
                else:
                    worker.run(trial)
        finally:
            worker.process.stop()


class _Worker:
    """One trial after the other, in a process that is watched.

    Args:
        crew: whose worker it is.
        number: of those that the crew runs at a time, from 0.
        study: read by this thread alone.
        done: as of `work`.
        terminated: whether the trial at hand is to be saved.
    """

    def __init__(
        self, crew: _Crew, number: int, study: Study, done: Callable[[], bool], terminated: Callable[[], bool]
    ) -> None:
        self._config, self._say, self._abreast, self._number = crew.config, crew.say, crew.abreast, number
        self._study, self._done, self._terminated = study, done, terminated
        name = f"{crew.rank.rank}-{number}" if number else str(crew.rank.rank)
        self._cache = study.directory / f"cache-{name}"
        self.process = process_for(crew.config, crew.rank, study.directory / f"worker-{name}.log", crew.most)

    def run(self, trial: Trial) -> None:
        """One trial from claim to end."""
        self._trial, self._began, self._directory = trial, time.monotonic(), self._study.directory / trial.name
        try:
            self._run()
        except Lost:
            self.process.stop()
            self._say(f"{trial.name}: this worker had been silent for too long, another one has it now")
        except Overtaken:
            self.process.save_and_stop(self._report)
            self._give_back()
        except (Stopped, UserError):
            # SIGTERM, or the first rank is gone: the trial is saved, and waits for the next launch.
            self.process.save_and_stop(self._report)
            self._give_back()
            raise
        except BaseException:
            self.process.stop()
            self._give_back()
            raise

    def _run(self) -> None:
        # What a worker that is gone wrote down decides again as it would have then.
        for step, loss in self._trial.reports.items():
            if not self._study.survives(self._trial, step, loss, self._alive):
                return self._end("stopped")
        self._directory = self._free_directory()
        while True:
            trial, where, beside = self._trial, self._directory, self._abreast.count()
            self.process.start(
                proxy_config(self._config, trial.values, seed=trial.seed, directory=where, cache=self._cache)
            )
            ended = self._follow()
            if ended.state == "busy":
                self._directory = self._free_directory()
                continue
            if ended.state != "died":
                return self._end(ended.state, loss=ended.loss, reason=ended.reason)
            self._trial = self._study.died(trial)
            if self._trial.attempts >= ATTEMPTS:
                return self._end("failed", reason=f"{ended.reason}, twice")
            self._say(f"{trial.name}: {ended.reason}; it goes on from its last checkpoint")
            self._abreast.died(beside)
            if self._number >= self._abreast.count():
                return self._end("waiting")

    def _end(self, state: Any, **how: Any) -> None:
        self._study.finish(self._trial, state, seconds=time.monotonic() - self._began, **how)
        if state != "waiting":
            shutil.rmtree(self._directory / "checkpoints", ignore_errors=True)

    def _give_back(self) -> None:
        with suppress(Lost, OSError):  # another worker has it already; no room to say so, and a new leader sees it
            self._end("waiting")

    def _alive(self) -> None:
        self._study.check_held(self._trial)
        self._done()
        if self._terminated():
            raise Stopped

    def _report(self, evaluation: Evaluation) -> None:
        with suppress(Lost):
            self._study.report(self._trial, evaluation.step, evaluation.loss)

    def _free_directory(self) -> Path:
        """Where a trial runs: its own folder; another one where a worker that was taken for lost still holds it.

        That worker may wake up, and its trial's process with it, before it hears that the trial is another's. Until
        then it writes into its own folder.
        """
        name = self._trial.name
        for number in itertools.count():
            candidate = self._study.directory / (f"{name}-again-{number}" if number else name)
            until = time.monotonic() + _BUSY_SECONDS
            while True:
                with suppress(Busy), own_run_directory(candidate, Rank()):
                    return candidate
                if time.monotonic() > until:
                    break
                self._alive()
                time.sleep(0.2)
            self._say(f"{name}: {candidate} is held by a worker that is stopped; it starts again beside it")
        raise AssertionError

    def _follow(self) -> End:
        """Hears a trial out; returns how it ended in its process."""
        said, trial, steps = time.monotonic(), self._trial, tuning_steps(self._config)
        reached: int | None = None

        def came(step: int, memory: float = 0.0) -> None:
            nonlocal reached
            self._abreast.stepped(self._number, 0 if reached is None else step - reached, memory)
            reached = step

        def evaluated(evaluation: Evaluation) -> bool:
            came(evaluation.step)
            survives = self._study.survives(trial, evaluation.step, evaluation.loss, self._alive)
            self._abreast.stepped(self._number, 0, 0.0)  # it may have waited for others
            return survives

        def stepped(step: Step) -> None:
            nonlocal said
            came(step.step, step.memory)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                self._say(f"{trial.name}, on this process: step {step.step}/{steps}, loss {step.loss:.4f}")

        while True:
            self._alive()
            ended = self.process.listen(0.2, self._config.tuning.hang_timeout, evaluated=evaluated, stepped=stepped)
            if ended is not None:
                if ended.state == "died":
                    self._alive()  # a launcher's SIGTERM reaches the trial too, and may reach it first
                return ended
