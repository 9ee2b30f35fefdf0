"""A run in a process of its own: how it is started, what is said to it and what it says.

Public names: `TrialProcess`, `RunProcess`, `Start`, `Answer`, `Ready`, `Step`, `Evaluation`, `End`, `receive`,
`ATTEMPTS`, `environment`, `exit_of`, `gpus`, `local_ranks`. The trials of tuning (worker.py) and the runs of a
stability grid (proof/grid.py) are such runs; trial.py is the program of the process. Each message is one line of JSON,
on the process's standard input and output:

    Start                to the process: the config of its next run
    Ready                from it, once: it has imported what every run needs
    Step, Evaluation     from it, while it trains; it waits for an Answer after every Evaluation
    Answer               to it: whether the run goes on
    End                  from it: how the run ended
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mup_megatron.config import Config
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import DiskFull

ATTEMPTS = 2
"""Processes that may die under a run; it has then failed."""

# What a launcher tells its ranks; a trial is a run of one process and must not take itself for one of them.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK")
_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "GROUP_WORLD", "ROLE_", "CROSS_")
_START_SECONDS = 600
_AWAKE_SECONDS = 5.0  # between two looks; beyond it this process itself was stopped, not the other silent


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def line(self) -> str:
        """As it is sent."""
        return json.dumps(self.model_dump()) + "\n"


class Start(_Message):
    """What to run: a config as the YAML it could have been, and the file that messages about it name."""

    config: dict[str, Any]
    source: str | None

    @classmethod
    def of(cls, config: Config) -> Start:
        """The run of a config."""
        return cls(config=config.model_dump(), source=config.source)


class Answer(_Message):
    """Whether the run goes on after an evaluation."""

    go_on: bool


class Ready(_Message):
    """The process has imported what every run needs."""

    event: Literal["ready"] = "ready"


class Step(_Message):
    """The run has done so many steps; sent every few seconds. The loss is in nats per token.

    Args:
        memory: most that its process has taken, as a share of its device's (abreast.memory_share); 0 where it does not
            say.
    """

    event: Literal["step"] = "step"
    step: int
    loss: float
    memory: float = 0.0


class Evaluation(_Message):
    """An evaluation behind a step; the run waits for an Answer. The loss is in nats per token."""

    event: Literal["evaluation"] = "evaluation"
    step: int
    loss: float


class End(_Message):
    """The run is over in this process.

    Args:
        state: `complete`; `stopped` by an Answer; `diverged`: a loss was no finite number; `failed`: another process
            would fail too; `died`: this process was killed, hung, or had no memory left, and another one can go on from
            the last checkpoint; `terminated` by SIGTERM, and saved; `disk_full`; `busy`: another process holds the
            run's folder.
        loss: nats per token; of a run that is complete, and finite.
        reason: of a run that is neither complete nor stopped.
    """

    event: Literal["end"] = "end"
    state: Literal["complete", "stopped", "diverged", "failed", "died", "terminated", "disk_full", "busy"]
    loss: float | None = None
    reason: str = ""


Said = Ready | Step | Evaluation | End
_SAID: TypeAdapter[Said] = TypeAdapter(Annotated[Said, Field(discriminator="event")])


def receive(line: str) -> Said:
    """A message of the process, from the line that it sent."""
    return _SAID.validate_python(json.loads(line))


def local_ranks(rank: Rank, parent: Mapping[str, str]) -> int:
    """How many workers the launcher of this one started on this machine."""
    return int(parent.get("LOCAL_WORLD_SIZE") or parent.get("LOCAL_SIZE") or rank.world_size)


def environment(rank: Rank, parent: Mapping[str, str], abreast: int = 1) -> dict[str, str]:
    """The environment of a trial's process: the parent's without its launcher, one GPU, a share of the cores.

    Args:
        rank: of the worker.
        parent: its environment.
        abreast: trials that it runs at a time, at most.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    sharing = max(1, local_ranks(rank, parent)) * abreast
    kept.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // sharing)))
    visible = parent.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else None
    if devices:
        kept["CUDA_VISIBLE_DEVICES"] = devices[rank.local_rank % len(devices)]
    elif visible is None and (count := gpus()):
        kept["CUDA_VISIBLE_DEVICES"] = str(rank.local_rank % count)
    return kept


def gpus() -> int:
    """Of this machine."""
    import torch

    return torch.cuda.device_count()  # asks the driver, makes no context


class TrialProcess(ABC):
    """A process that takes one run after the other, is heard, and is answered: the one loop that listens.

    What carries the messages is its subclass's: pipes (`RunProcess`), or files (megatron.py).
    """

    _SAVE_SECONDS: ClassVar[float]
    """How long saving may take."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[Any] | None = None
        self._owed: Evaluation | None = None
        self._heard = False
        # Seconds, of those in which this process was awake, since the other one said or was told something.
        self._silence, self._looked = 0.0, 0.0

    @abstractmethod
    def start(self, config: Config) -> None:
        """Has it run a config; starts the process where none is there. It may die at any time, as `listen` says."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it at once."""

    @abstractmethod
    def _messages(self, seconds: float) -> list[Said]:
        """What it said; where that is nothing, after so long."""

    @abstractmethod
    def _send(self, evaluation: Evaluation, answer: Answer) -> None: ...

    @abstractmethod
    def _terminate(self) -> None:
        """Asks a run that is under way to save and end."""

    @abstractmethod
    def _settle(self, end: End) -> None:
        """After a run's end: stops the process where no other run can start in it."""

    @abstractmethod
    def _how_it_ended(self) -> End:
        """Of a run that is gone without a word."""

    @property
    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _is_running(self) -> bool:
        """Whether there may be more to hear of its run."""
        return self._alive

    def listen(
        self,
        seconds: float,
        hang_timeout: int,
        *,
        evaluated: Callable[[Evaluation], bool] = lambda _evaluation: True,
        stepped: Callable[[Step], None] = lambda _step: None,
    ) -> End | None:
        """Hears what its run says, and answers its evaluations.

        Args:
            seconds: to wait for a message.
            hang_timeout: seconds of silence after which it hangs; while it starts they are 600 or more.
            evaluated: whether the run goes on after an evaluation; may raise, and the answer is owed then.
            stepped: takes a step that was done.

        Returns:
            How the run ended; None while it is under way. The process lives on where its next run can start there.

        Raises:
            DiskFull: the run could not write.
        """
        running = self._is_running
        messages = self._hear(seconds)
        for message in messages:
            if isinstance(message, Step):
                stepped(message)
            elif isinstance(message, Evaluation):
                self._owed = message
                self._answer(message, go_on=evaluated(message))
            elif isinstance(message, End) and message.state != "terminated":  # SIGTERM: its process dies
                return self._ended(message)
        if not messages and not running:
            return self._ended(self._how_it_ended())
        limit = hang_timeout if self._heard else max(hang_timeout, _START_SECONDS)
        if self._silence > limit:
            return self._ended(End(state="died", reason=f"no step in {limit} s (tuning.hang_timeout)"))
        return None

    def save_and_stop(self, report: Callable[[Evaluation], None] = lambda _evaluation: None) -> None:
        """Has it save its run and end; ends it at once if that takes too long.

        Args:
            report: takes every evaluation that it makes meanwhile: once it is answered it saves at that very step, and
                goes on behind it.
        """
        if self._process is None:
            return
        self._terminate()
        if self._owed is not None:
            self._answer(self._owed, go_on=True)  # one that waits for an answer would not hear the signal
        until = time.monotonic() + self._SAVE_SECONDS
        ended = False
        while not ended and time.monotonic() < until:
            running = self._is_running
            messages = self._hear(0.2)
            for message in messages:
                if isinstance(message, Evaluation):
                    report(message)
                    self._answer(message, go_on=True)
            # One that has come to its end already waits for the next run, and not for a signal.
            ended = any(isinstance(message, End) for message in messages) or not (running or messages)
        self.stop()

    def _hear(self, seconds: float) -> list[Said]:
        messages = self._messages(seconds)
        now = time.monotonic()
        self._silence = 0.0 if messages else self._silence + min(now - self._looked, _AWAKE_SECONDS)
        self._looked, self._heard = now, self._heard or bool(messages)
        return messages

    def _answer(self, evaluation: Evaluation, *, go_on: bool) -> None:
        self._told()
        self._send(evaluation, Answer(go_on=go_on))

    def _told(self) -> None:
        """It was told something just now, and owes the next word."""
        self._owed, self._silence, self._looked = None, 0.0, time.monotonic()

    def _ended(self, end: End) -> End:
        self._settle(end)
        if end.state == "disk_full":
            raise DiskFull(end.reason)
        return end


class RunProcess(TrialProcess):
    """The process of this project's own engine (trial.py), whose messages are lines on its pipes.

    Args:
        rank: of the process that starts it; its local rank chooses the GPU.
        log: file for whatever libraries print.
        abreast: runs that are started so on the same device, at most; they share its cores.
    """

    _SAVE_SECONDS = 120.0

    def __init__(self, rank: Rank, log: Path, abreast: int = 1) -> None:
        super().__init__()
        self._rank, self._log, self._abreast = rank, log, abreast
        self._in: IO[str] = io.StringIO()
        self._out: IO[str] = io.StringIO()
        self._buffer = ""

    def start(self, config: Config) -> None:
        """Has it run a config; starts the process where none is there. It may die at any time, as `listen` says."""
        if not self._alive:
            self._launch()
        self._told()
        self._write(Start.of(config))

    def _launch(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._buffer, self._heard = "", False
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mup_megatron.tuning.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment(self._rank, os.environ, self._abreast), "PYTHONPATH": _python_path()},
            )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._in, self._out = self._process.stdin, self._process.stdout

    def _settle(self, end: End) -> None:
        if end.state in ("failed", "died", "busy"):
            self.stop()

    def _how_it_ended(self) -> End:
        return End(state="died", reason=f"its process died ({exit_of(self._process)})")

    def _send(self, evaluation: Evaluation, answer: Answer) -> None:
        self._write(answer)

    def _write(self, message: Start | Answer) -> None:
        with suppress(BrokenPipeError):  # a process that is gone shows in `listen`
            self._in.write(message.line())
            self._in.flush()

    def _messages(self, seconds: float) -> list[Said]:
        handle = self._out.fileno()
        if select.select([handle], [], [], seconds)[0]:
            self._buffer += os.read(handle, 1 << 16).decode("utf-8")
        *lines, self._buffer = self._buffer.split("\n")
        return [receive(line) for line in lines]

    def _terminate(self) -> None:
        if self._process is not None and self._alive:
            self._process.send_signal(signal.SIGTERM)

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


def exit_of(process: subprocess.Popen[Any] | None) -> str:
    """How a process ended, in words."""
    status = process.poll() if process is not None else None
    return signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"


def _python_path() -> str:
    """Where this package lies, in front of what PYTHONPATH says already."""
    here = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(part for part in (here, os.environ.get("PYTHONPATH")) if part)
