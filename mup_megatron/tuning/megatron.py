"""A run of megatron.training in processes of its own: started as its command line says, heard and answered.

Public names: `MegatronProcess`, `process_for`, `own_process`, `own_launch`, `last_lines`. `MegatronProcess` has
the messages of process.py. They go through files in a folder of the run (megatron_task.py), because a launcher stands
between the two: the run's last rank, which has the loss, adds a line to SAID for each message, and waits for ANSWER
after an evaluation. The other end is megatron_training/watched.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mup_megatron.config import Config
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning.megatron_command import PLACES, MegatronCommand, given_options, megatron_options, replaced
from mup_megatron.tuning.megatron_task import (
    ANSWER,
    FAILED,
    IDLE,
    LOG,
    NEXT,
    PROCESS,
    SAID,
    TASK,
    Task,
    said_by_options,
)
from mup_megatron.tuning.process import (
    Answer,
    End,
    Evaluation,
    RunProcess,
    Said,
    TrialProcess,
    environment,
    exit_of,
    gpus,
    receive,
)
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_yaml, write_whole
from mup_megatron.util.secrets import masked

_END_SECONDS, _START_SECONDS, _POLL_SECONDS = 60.0, 600, 0.05
_LAST_LINES, _LAST_BYTES = 3, 1 << 14


def process_for(config: Config, rank: Rank, log: Path, abreast: int = 1) -> TrialProcess:
    """The process that trains a config's proxies: a run of megatron.training where `tuning.command` says one.

    Args:
        config: the study's.
        rank: of the process that starts it.
        log: file for whatever libraries print; a run of megatron.training has one in its own folder.
        abreast: trials that run at the same time on one device, at most.
    """
    return MegatronProcess(rank) if config.tuning.command else RunProcess(rank, log, abreast)


class MegatronProcess(TrialProcess):
    """One run of megatron.training after the other, whose messages are files of its own folder.

    The launcher's processes live on from run to run (megatron_training/forked.py), where they can.

    Args:
        rank: of the process that starts them; its local rank chooses the GPUs.
    """

    _SAVE_SECONDS = 600.0

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self._log: IO[bytes] | None = None
        self._directory = self._talk = Path()
        self._launched: list[str] = []
        self._talks: list[Path] = []
        self._read = 0
        self._buffer = b""

    def start(self, config: Config) -> None:
        """Has megatron.training run a config: of a trial, as space.proxy_config makes it."""
        directory = Path(config.run.dir)
        task = Task(
            kind="trial",
            path=str(directory),
            expected=said_by_options(config),
            interval=config.training.eval_interval or config.training.train_steps,
            steps=config.training.train_steps,
        )
        command = MegatronCommand.read(config.tuning.command)
        self.launch(command, trial_arguments(command, config), task, directory)

    def launch(self, command: MegatronCommand, arguments: list[str], task: Task, directory: Path) -> None:
        """Starts a watched run.

        Args:
            command: whose launcher and script are taken.
            arguments: of the script.
            task: what is asked of it.
            directory: of the run, for its log and its conversation.
        """
        before = self._talk
        launched = command.words([])
        goes_on = self._is_idle and before.is_dir() and self._launched == launched
        if not goes_on:
            self.stop()
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("talk-*"):  # of a process that is gone, or that ends now because its parent is
            if old.absolute() not in self._talks:
                shutil.rmtree(old, ignore_errors=True)
        self._directory, self._talk = directory, Path(tempfile.mkdtemp(prefix="talk-", dir=directory)).absolute()
        self._read, self._buffer, self._heard = 0, b"", False
        self._told()
        self._talks.append(self._talk)
        task = Task.model_validate({**task.model_dump(), "arguments": arguments})
        write_whole(self._talk / TASK, task.model_dump_json(indent=1))
        write_whole(directory / "command.txt", masked(shlex.join(command.words(arguments))) + "\n")
        if goes_on:
            write_whole(before / NEXT, str(self._talk / TASK))
            self._forget(self._talks[:-2])  # whose ranks have read what came next
            return
        self._launched, self._log = launched, (directory / LOG).open("ab")
        try:
            self._process = subprocess.Popen(  # noqa: S603  (the user's own command line, word by word)
                command.words([], self._talk / TASK),
                stdin=subprocess.PIPE,  # its ranks end when this end of it is closed, however this process went
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(command, self._rank),
                start_new_session=True,  # Ctrl-C is for this process, which then has the run saved
            )
        except OSError as error:
            raise UserError(f"tuning.command: {command.launcher[0]}: cannot be started: {error.strerror}") from None

    def _settle(self, end: End) -> None:
        if end.state in ("complete", "stopped", "diverged"):
            until = time.monotonic() + _END_SECONDS
            while self._is_running and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        if not self._is_idle:
            self.stop()

    @property
    def _is_running(self) -> bool:
        return self._alive and not self._is_idle

    @property
    def _is_idle(self) -> bool:
        """Whether each rank has ended its run, and waits for the next one."""
        idle = list(self._talk.glob(IDLE.format("*"))) if self._alive else []
        return bool(idle) and len(idle) == int(idle[0].read_text(encoding="utf-8"))

    def _how_it_ended(self) -> End:
        """Of a run that is gone without a word: what one of its ranks left behind, else the end of its log."""
        for path in sorted(self._talk.glob(FAILED.format("*"))):
            with suppress(ValueError, OSError):
                return End.model_validate_json(path.read_text(encoding="utf-8"))
        named = "exit status 0" if self._is_idle else exit_of(self._process)
        said = last_lines(self._directory / LOG)
        return End(state="died", reason=f"its process ended ({named})" + (f": {said}" if said else ""))

    def _messages(self, seconds: float) -> list[Said]:
        with suppress(FileNotFoundError), (self._talk / SAID).open("rb") as file:
            file.seek(self._read)
            data = file.read()
            self._read += len(data)
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if not lines:
            time.sleep(seconds)
        return [receive(line.decode()) for line in lines]

    def _send(self, evaluation: Evaluation, answer: Answer) -> None:
        write_whole(self._talk / ANSWER.format(evaluation.step), answer.line())

    def _terminate(self) -> None:
        """SIGTERM to every rank, at which Megatron saves (--exit-signal-handler); to the launcher where none is known.

        At the launcher's, torchrun would kill ranks that still save.
        """
        if self._is_idle:
            return
        found = False
        for path in self._talk.glob(PROCESS.format("*")):
            with suppress(ValueError, ProcessLookupError, PermissionError):
                os.kill(int(path.read_text()), signal.SIGTERM)
                found = True
        if not found and self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """Ends it at once."""
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._log is not None:
            self._log.close()
        self._forget(self._talks)

    def _forget(self, talks: list[Path]) -> None:
        for talk in talks:
            shutil.rmtree(talk, ignore_errors=True)
        self._talks = [talk for talk in self._talks if talk not in talks]


def trial_arguments(command: MegatronCommand, config: Config) -> list[str]:
    """Arguments of the user's script for a trial: the proxy's sizes, its schedule, its values; its own folder.

    Args:
        command: `tuning.command`.
        config: of the trial.
    """
    directory = Path(config.run.dir)
    options = {
        **megatron_options(config),
        "mup-config": str(write_sections(directory, config)),
        "save": str(directory / "checkpoints"),
        "load": str(directory / "checkpoints"),
        "save-interval": str(config.training.eval_interval or config.training.train_steps),
        "tensorboard-dir": str(directory / "tensorboard"),
    }
    reports = {"wandb-exp-name": config.run.name, "wandb-save-dir": str(directory)}
    if given_options(command, ("wandb-project",)):
        options |= reports
    flags = ("exit-signal-handler", "no-check-for-nan-in-loss-and-grad")
    return replaced(command, options, flags, dropped=PLACES)


def write_sections(directory: Path, config: Config) -> Path:
    """`--mup-config` of a run: the base, the rules, and the multipliers, for which Megatron has no options."""
    multipliers = {
        name: value
        for name, value in config.hparams.model_dump(mode="json").items()
        if name.endswith("_multiplier") and value is not None
    }
    factors = {entry: said.model_dump(exclude_defaults=True) for entry, said in config.hparams.per_tensor.items()}
    sections = {
        "base": config.base.model_dump(mode="json", exclude_defaults=True),
        "parametrization": config.parametrization.model_dump(mode="json", exclude_defaults=True),
        "hparams": {**multipliers, **({"per_tensor": factors} if factors else {})},
    }
    path = directory / "mup.yaml"
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(path, as_yaml({name: held for name, held in sections.items() if held}))
    return path


def last_lines(log: Path) -> str:
    """What a log ends with, on one line."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
        return " / ".join([line for line in lines if line][-_LAST_LINES:])[-400:]
    return ""


@contextmanager
def own_process() -> Iterator[MegatronProcess]:
    """A process for watched runs; it ends with the block."""
    process = MegatronProcess(Rank())
    try:
        yield process
    finally:
        process.stop()


def own_launch(
    command: MegatronCommand, arguments: list[str], task: Task, directory: Path, process: MegatronProcess | None = None
) -> None:
    """Runs a watched run to its end, where nothing is said on the way.

    Args:
        command: whose launcher and script are taken.
        arguments: of the script.
        task: what is asked of it.
        directory: of the run.
        process: that may have run others before; one of its own if none.

    Raises:
        UserError: it failed; says how.
    """
    if process is None:
        with own_process() as process:
            return own_launch(command, arguments, task, directory, process)
    process.launch(command, arguments, task, directory)
    while (end := process.listen(_POLL_SECONDS, _START_SECONDS)) is None:
        pass
    if end.state != "complete":
        raise UserError(end.reason)


def _environment(command: MegatronCommand, rank: Rank) -> dict[str, str]:
    """As of a trial (process.environment); with as many GPUs as its launcher starts processes."""
    parent = dict(os.environ)
    if command.processes == 1:
        found = environment(rank, parent)
    else:
        found = environment(rank, {**parent, "CUDA_VISIBLE_DEVICES": ""})
        found.pop("CUDA_VISIBLE_DEVICES", None)
        visible = parent.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(number) for number in range(gpus())]
        if command.processes is not None and len(devices) > command.processes:
            first = rank.local_rank * command.processes % len(devices)
            devices = devices[first : first + command.processes]
        if devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    found["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs starts no CUDA, with which none could be forked
    if command.is_srun:
        found |= {name: value for name, value in parent.items() if name.startswith("SLURM_")}
    return found
