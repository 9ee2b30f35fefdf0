"""A tuning worker: takes trials from the study and has them run in a process of its own, which it watches.

Public name: `work`.

The worker itself holds no CUDA context and no model. So if a trial runs out of memory, hangs or kills its process,
only that trial is affected. It goes on once from its last checkpoint, in a new process; the second time it has failed.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.run_directory import Busy, own_run_directory
from mup_megatron.config import Config
from mup_megatron.parallel.ranks import Rank, stop_signal
from mup_megatron.tuning import Stopped
from mup_megatron.tuning.lease import Lost, Overtaken
from mup_megatron.tuning.megatron import process_for
from mup_megatron.tuning.outcome import Trial
from mup_megatron.tuning.process import ATTEMPTS, End, Evaluation, Step, TrialProcess
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
    process = process_for(config, rank, study.directory / f"worker-{rank.rank}.log")
    with full_disk(study.directory, "the study"), stop_signal() as terminated:
        try:
            while not done():
                if terminated():
                    raise Stopped
                trial = study.claim()
                if trial is None:
                    time.sleep(0.2)
                    continue
                _run(config, study, rank, process, trial, done, terminated, say)
        finally:
            process.stop()


def _run(
    config: Config,
    study: Study,
    rank: Rank,
    process: TrialProcess,
    trial: Trial,
    done: Callable[[], bool],
    terminated: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """One trial from claim to end."""
    began = time.monotonic()
    own = directory = study.directory / trial.name

    def end(state: Any, **how: Any) -> None:
        study.finish(trial, state, seconds=time.monotonic() - began, **how)
        if state != "waiting":
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)

    def give_back() -> None:
        with suppress(Lost, OSError):  # another worker has it already; no room to say so, and a new leader sees it
            end("waiting")

    def alive() -> None:
        study.check_held(trial)
        done()
        if terminated():
            raise Stopped

    def report(evaluation: Evaluation) -> None:
        with suppress(Lost):
            study.report(trial, evaluation.step, evaluation.loss)

    try:
        # What a worker that is gone wrote down decides again as it would have then.
        for step, loss in trial.reports.items():
            if not study.survives(trial, step, loss, alive):
                return end("stopped")
        directory = _free_directory(own, alive, say)
        cache = study.directory / f"cache-{rank.rank}"
        while True:
            process.start(proxy_config(config, trial.values, seed=trial.seed, directory=directory, cache=cache))
            ended = _follow(config, study, process, trial, alive, say)
            if ended.state == "busy":
                directory = _free_directory(own, alive, say)
                continue
            if ended.state != "died":
                return end(ended.state, loss=ended.loss, reason=ended.reason)
            trial = study.died(trial)
            if trial.attempts >= ATTEMPTS:
                return end("failed", reason=f"{ended.reason}, twice")
            say(f"{trial.name}: {ended.reason}; it goes on from its last checkpoint")
    except Lost:
        process.stop()
        say(f"{trial.name}: this worker had been silent for too long, another one has it now")
        return None
    except Overtaken:
        process.save_and_stop(report)
        give_back()
        return None
    except (Stopped, UserError):
        # SIGTERM, or the first rank is gone: the trial is saved, and waits for the next launch.
        process.save_and_stop(report)
        give_back()
        raise
    except BaseException:
        process.stop()
        give_back()
        raise


def _free_directory(directory: Path, alive: Callable[[], None], say: Callable[[str], None]) -> Path:
    """Where a trial runs: its own folder; another one where a worker that was taken for lost still holds it.

    That worker may wake up, and its trial's process with it, before it hears that the trial is another's. Until then it
    writes into its own folder.
    """
    for number in itertools.count():
        candidate = directory.with_name(f"{directory.name}-again-{number}") if number else directory
        until = time.monotonic() + _BUSY_SECONDS
        while True:
            with suppress(Busy), own_run_directory(candidate, Rank()):
                return candidate
            if time.monotonic() > until:
                break
            alive()
            time.sleep(0.2)
        say(f"{directory.name}: {candidate} is held by a worker that is stopped; it starts again beside it")
    raise AssertionError


def _follow(
    config: Config,
    study: Study,
    process: TrialProcess,
    trial: Trial,
    alive: Callable[[], None],
    say: Callable[[str], None],
) -> End:
    """Hears a trial out; returns how it ended in its process."""
    said = time.monotonic()
    steps = tuning_steps(config)

    def evaluated(evaluation: Evaluation) -> bool:
        return study.survives(trial, evaluation.step, evaluation.loss, alive)

    def stepped(step: Step) -> None:
        nonlocal said
        if time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            say(f"{trial.name}, on this process: step {step.step}/{steps}, loss {step.loss:.4f}")

    while True:
        alive()
        ended = process.listen(0.2, config.tuning.hang_timeout, evaluated=evaluated, stepped=stepped)
        if ended is not None:
            if ended.state == "died":
                alive()  # a launcher's SIGTERM reaches the trial too, and may reach it first
            return ended
