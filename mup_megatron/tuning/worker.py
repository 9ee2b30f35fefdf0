"""A tuning worker: takes trials from the study and has them run in a process of its own, which it watches.

Public name: `work`.

The process that works holds no CUDA context and no model; a trial that runs out of memory, hangs or takes its process
down costs that trial alone. A trial whose process died without a word goes on once from its last checkpoint, in a new
process; the second time it has failed.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mup_megatron.config import Config
from mup_megatron.errors import DiskFull, UserError
from mup_megatron.runtime import Rank, sigterm
from mup_megatron.tuning import Stopped
from mup_megatron.tuning.lease import Lost, Overtaken
from mup_megatron.tuning.outcome import Trial
from mup_megatron.tuning.space import proxy_config, tuning_steps
from mup_megatron.tuning.study import Study

# What a launcher tells its ranks; a trial is a run of one process and must not take itself for one of them.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK")
_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "GROUP_WORLD", "ROLE_", "CROSS_")
_ATTEMPTS = 2
_SAY_SECONDS = 60.0
_SAVE_SECONDS = 120.0
_START_SECONDS = 600


def environment(rank: Rank, parent: dict[str, str]) -> dict[str, str]:
    """The environment of a trial's process: the parent's without its launcher, one GPU, a share of the cores."""
    kept = {
        name: value
        for name, value in parent.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    local_ranks = int(parent.get("LOCAL_WORLD_SIZE") or parent.get("LOCAL_SIZE") or rank.world_size)
    kept.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, local_ranks))))
    visible = parent.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else None
    if devices:
        kept["CUDA_VISIBLE_DEVICES"] = devices[rank.local_rank % len(devices)]
    elif visible is None and (gpus := _gpus()):
        kept["CUDA_VISIBLE_DEVICES"] = str(rank.local_rank % gpus)
    return kept


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()  # asks the driver, makes no context


class _Process:
    """The process that runs trials (trial.py): started when needed, again after it died."""

    def __init__(self, config: Config, rank: Rank, log: Path) -> None:
        self._config, self._rank, self._log = config, rank, log
        self._process: subprocess.Popen[str] | None = None
        self._in: IO[str] = io.StringIO()
        self._out: IO[str] = io.StringIO()
        self._buffer = ""
        self.ready = False
        """Whether it has imported what it needs."""

    def start(self) -> None:
        """Starts it where it is not there. It may die while it starts, as later (`alive`)."""
        if self._process is not None and self._process.poll() is None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer, self.ready = "", False
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mup_megatron.tuning.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment(self._rank, dict(os.environ)), "PYTHONPATH": _python_path()},
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """As subprocess has it: negative for a signal."""
        return self._process.poll() if self._process is not None else None

    def send(self, **message: Any) -> None:
        """One message; a process that is gone shows in `alive`."""
        with suppress(BrokenPipeError):
            self._in.write(json.dumps(message) + "\n")
            self._in.flush()

    def messages(self, seconds: float) -> list[dict[str, Any]]:
        """What it said, after waiting for at most so long."""
        handle = self._out.fileno()
        if select.select([handle], [], [], seconds)[0]:
            self._buffer += os.read(handle, 1 << 16).decode("utf-8")
        *lines, self._buffer = self._buffer.split("\n")
        messages = [json.loads(line) for line in lines]
        self.ready = self.ready or any(message["event"] == "ready" for message in messages)
        return messages

    def save_and_stop(self) -> None:
        """Has it save its trial and end; ends it at once if that takes too long."""
        if self.alive and self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self.send(go_on=True)  # one that waits for an answer would not hear the signal
        until = time.monotonic() + _SAVE_SECONDS
        while self.alive and time.monotonic() < until:
            if any(message["event"] == "report" for message in self.messages(0.2)):
                self.send(go_on=True)
        self.stop()

    def stop(self) -> None:
        """Ends it at once."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._in, self._out):
            with suppress(BrokenPipeError):
                pipe.close()
        self._process = None


def _python_path() -> str:
    """Where this package lies, in front of what PYTHONPATH says already."""
    here = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)


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
    """
    process = _Process(config, rank, study.directory / f"worker-{rank.rank}.log")
    with sigterm() as terminated:
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
    process: _Process,
    trial: Trial,
    done: Callable[[], bool],
    terminated: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """One trial from claim to end."""
    began = time.monotonic()
    directory = study.directory / trial.name

    def end(state: Any, **how: Any) -> None:
        study.finish(trial, state, seconds=time.monotonic() - began, **how)
        if state != "waiting":
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)

    def alive() -> None:
        study.check_held(trial)
        done()
        if terminated():
            raise Stopped

    try:
        # What a worker that is gone wrote down decides again as it would have then.
        for step, loss in trial.reports.items():
            if not study.survives(trial, step, loss, alive):
                return end("stopped")
        cache = study.directory / f"cache-{rank.rank}"
        job = proxy_config(config, trial.values, seed=trial.seed, directory=directory, cache=cache)
        while True:
            process.start()
            process.send(config=_plain(job), source=config.source)
            died = _follow(config, study, process, trial, end, alive, say)
            if died is None:
                return None
            trial = study.died(trial)
            if trial.attempts >= _ATTEMPTS:
                return end("failed", reason=f"{died}, twice")
            say(f"{trial.name}: {died}; it goes on from its last checkpoint")
    except Lost:
        process.stop()
        say(f"{trial.name}: this worker had been silent for too long, another one has it now")
        return None
    except Overtaken:
        process.save_and_stop()
        end("waiting")
        return None
    except (Stopped, UserError):
        # SIGTERM, or the first rank is gone: the trial is saved, and waits for the next launch.
        process.save_and_stop()
        end("waiting")
        raise
    except BaseException:
        process.stop()
        end("waiting")
        raise


def _follow(
    config: Config,
    study: Study,
    process: _Process,
    trial: Trial,
    end: Callable[..., None],
    alive: Callable[[], None],
    say: Callable[[str], None],
) -> str | None:
    """Hears a trial out; returns how its process died, None if the trial came to an end."""
    heard = said = time.monotonic()
    steps = tuning_steps(config)
    while True:
        alive()
        messages = process.messages(0.2)
        for message in messages:
            event = message["event"]
            if event == "report":
                # A loss that is no number has no place in the order; the trial itself says that it diverged.
                loss = message["loss"] if math.isfinite(message["loss"]) else math.inf
                process.send(go_on=study.survives(trial, message["step"], loss, alive))
            elif event == "step" and time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                say(f"{trial.name}, on this process: step {message['step']}/{steps}, loss {message['loss']:.4f}")
            elif event == "complete" and math.isfinite(message["loss"]):
                end("complete", loss=message["loss"])
                return None
            elif event in ("complete", "diverged"):
                end("diverged", reason=message.get("reason", "the evaluation loss is no finite number"))
                return None
            elif event == "stopped":
                end("stopped")
                return None
            elif event == "disk_full":
                raise DiskFull(config.run.dir, os.strerror(errno.ENOSPC).lower())
            elif event == "failed":
                process.stop()
                end("failed", reason=message["reason"])
                return None
        if messages:
            heard = time.monotonic()
        elif not process.alive:
            alive()  # a launcher's SIGTERM reaches the trial too, and may reach it first
            status = process.exit_status
            process.stop()
            return f"its process died ({_exit(status)})"
        elif time.monotonic() - heard > (limit := _patience(config, process)):
            process.stop()
            end("failed", reason=f"no step in {limit} s (tuning.hang_timeout)")
            return None


def _patience(config: Config, process: _Process) -> int:
    """Seconds of silence after which a process is taken to hang; imports may take long on a cold file system."""
    timeout = config.tuning.hang_timeout
    return timeout if process.ready else max(timeout, _START_SECONDS)


def _exit(status: int | None) -> str:
    if status is not None and status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def _plain(config: Config) -> dict[str, Any]:
    """A config as the YAML it could have been."""
    return json.loads(json.dumps(config.model_dump()))
