"""The process that runs trials, as seen from the one that started it.

Public names: `TrialProcess`, `ATTEMPTS`, `environment`.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mup_megatron.ranks import Rank

ATTEMPTS = 2
"""Processes that may die under a run; it has then failed."""

# What a launcher tells its ranks; a trial is a run of one process and must not take itself for one of them.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK")
_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "GROUP_WORLD", "ROLE_", "CROSS_")
_SAVE_SECONDS = 120.0
_START_SECONDS = 600
_AWAKE_SECONDS = 5.0  # between two looks; beyond it this process itself was stopped, not the other silent
_ENDS = ("complete", "stopped", "diverged", "failed", "terminated", "disk_full", "busy")


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


class TrialProcess:
    """The process that runs trials (trial.py): started when needed, again after it died.

    Args:
        rank: the worker's; its local rank chooses the GPU.
        log: file for whatever libraries print.
    """

    def __init__(self, rank: Rank, log: Path) -> None:
        self._rank, self._log = rank, log
        self._process: subprocess.Popen[str] | None = None
        self._in: IO[str] = io.StringIO()
        self._out: IO[str] = io.StringIO()
        self._buffer = ""
        self._looked = 0.0
        self._owes_answer = False
        self.ready = False
        """Whether it has imported what it needs."""
        self.silence = 0.0
        """Seconds, of those in which this process was awake, since it said or was told something."""

    def start(self) -> None:
        """Starts it where it is not there. It may die while it starts, as later (`alive`)."""
        if self._process is not None and self._process.poll() is None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer, self.ready, self._owes_answer = "", False, False
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

    def how_it_died(self) -> str:
        """For people."""
        status = self._process.poll() if self._process is not None else None
        named = signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"
        return f"its process died ({named})"

    def patience(self, timeout: int) -> int:
        """Seconds of silence after which it hangs: `timeout`, more while it imports from a cold file system."""
        return timeout if self.ready else max(timeout, _START_SECONDS)

    def send(self, **message: Any) -> None:
        """One message; a process that is gone shows in `alive`."""
        self._owes_answer, self.silence, self._looked = False, 0.0, time.monotonic()
        with suppress(BrokenPipeError):
            self._in.write(json.dumps(message) + "\n")
            self._in.flush()

    def messages(self, seconds: float) -> list[dict[str, Any]]:
        """What it said, after waiting for at most so long."""
        handle = self._out.fileno()
        looked = time.monotonic()
        if select.select([handle], [], [], seconds)[0]:
            self._buffer += os.read(handle, 1 << 16).decode("utf-8")
        *lines, self._buffer = self._buffer.split("\n")
        messages = [json.loads(line) for line in lines]
        self.ready = self.ready or any(message["event"] == "ready" for message in messages)
        self._owes_answer = self._owes_answer or any(message["event"] == "report" for message in messages)
        now = time.monotonic()
        self.silence = 0.0 if messages else self.silence + min(now - min(self._looked, looked), _AWAKE_SECONDS)
        self._looked = now
        return messages

    def save_and_stop(self, report: Callable[[int, float], None] = lambda _step, _loss: None) -> None:
        """Has it save its trial and end; ends it at once if that takes too long.

        Args:
            report: takes step and loss of every evaluation that it reports meanwhile: it saves at that very step once
                it is answered, and goes on behind it.
        """
        if self._process is None:
            return
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        if self._owes_answer:
            self.send(go_on=True)  # one that waits for an answer would not hear the signal
        until = time.monotonic() + _SAVE_SECONDS
        ended = False
        while not ended and time.monotonic() < until:
            alive = self.alive
            messages = self.messages(0.2)
            for message in messages:
                if message["event"] == "report":
                    report(message["step"], message["loss"])
                    self.send(go_on=True)
            # One that has come to its end already waits for the next trial, and not for a signal.
            ended = any(message["event"] in _ENDS for message in messages) or not (alive or messages)
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
