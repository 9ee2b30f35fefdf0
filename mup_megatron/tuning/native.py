"""A run of megatron.training in processes of its own: started as its command line says, heard and answered.

Public names: `NativeProcess`, `Task`, `process_for`, `own_launch`, `last_lines`. `NativeProcess` is what process.py's
`RunProcess` is for this project's own engine: it says the same messages. They go through files in a folder of the run,
because a launcher stands between the two: the run's last rank (which has the loss) adds a line to SAID for each
message, and waits for ANSWER after an evaluation. megatron_training/watched.py is the other end.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict

from mup_megatron.config import Config, Model
from mup_megatron.errors import DiskFull, UserError
from mup_megatron.files import as_yaml, write_whole
from mup_megatron.ranks import Rank
from mup_megatron.secrets import masked
from mup_megatron.tuning.native_command import PLACES, NativeCommand, given_options, native_options, replaced
from mup_megatron.tuning.process import Answer, End, Evaluation, RunProcess, Said, Step, environment, receive

SAID, ANSWER, FAILED, PROCESS, TASK = "said.jsonl", "answer-{}.json", "failed-{}.json", "process-{}", "task.json"
"""Files of a conversation: what was said, the answer after a step, the end of a rank, its process id, the task."""
LOG = "log.txt"
"""File in a run's folder: what it printed."""

_END_SECONDS, _SAVE_SECONDS, _START_SECONDS = 60.0, 600.0, 600
_LAST_LINES, _LAST_BYTES = 3, 1 << 14
# What the options of a command line say, by section of a config.
_TRAINING = (
    *("global_batch_size", "micro_batch_size", "seq_length", "train_steps", "lr_schedule", "lr_warmup_init"),
    *("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps", "lr_wsd_decay_style", "min_lr_ratio", "clip_grad"),
)


class Task(BaseModel):
    """What is asked of a watched run.

    Args:
        kind: `config`: write the run as a config, and leave; `trial`: say losses, and stop where told; `coordinates`:
            measure every module at every step, on one batch, and leave.
        path: of the config that is written, or of the measurements; of a trial its folder.
        expected: what the options have to be read as, by dotted key; a run that is another one fails.
        command: the command line that a config is written for.
        interval: steps between evaluations of a trial.
        steps: of the run.
        broken: the rule that a check takes out.
        ranges: whether a check measures ranges of values too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["config", "trial", "coordinates"]
    path: str
    expected: dict[str, Any] = {}
    command: list[str] = []
    interval: int = 1
    steps: int = 1
    broken: str | None = None
    ranges: bool = False


def said_by_options(config: Config) -> dict[str, Any]:
    """What a command line's options are read as, by dotted key: where two runs agree in it, they are the same run.

    Args:
        config: every `auto` resolved.
    """
    sections = {
        "model": {
            **config.model.model_dump(mode="json", exclude={*Model.PLAIN_KERNELS, "architecture", "vocab_size"}),
            "max_position_embeddings": config.max_position_embeddings,
        },
        "base": config.base.model_dump(mode="json"),
        "parametrization": config.parametrization.model_dump(mode="json"),
        "hparams": config.hparams.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json", exclude={"implementation"}),
        "training": config.training.model_dump(mode="json", include={*_TRAINING}),
        "run": {"seed": config.run.seed},
    }
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The keys in which a run is another one than was asked for, in words; floats may differ in their last digit."""
    return [
        f"{key}: {found.get(key)} by its options, {value} expected"
        for key, value in expected.items()
        if not _same(value, found.get(key))
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def process_for(config: Config, rank: Rank, log: Path) -> RunProcess | NativeProcess:
    """The process that trains a config's proxies: a run of megatron.training where `tuning.command` says one.

    Args:
        config: the study's.
        rank: of the process that starts it.
        log: file for whatever libraries print; a run of megatron.training has one in its own folder.
    """
    return NativeProcess(rank) if config.tuning.command else RunProcess(rank, log)


class NativeProcess:
    """One run of megatron.training after the other. The methods are `RunProcess`'s.

    Args:
        rank: of the process that starts them; its local rank chooses the GPUs.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._directory = self._talk = Path()
        self._read = 0
        self._buffer = b""
        self._heard = False
        self._owed: Evaluation | None = None
        self._silence, self._looked = 0.0, 0.0

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
        command = NativeCommand.read(config.tuning.command)
        self.launch(command, trial_arguments(command, config), task, directory)

    def launch(self, command: NativeCommand, arguments: list[str], task: Task, directory: Path) -> None:
        """Starts a watched run.

        Args:
            command: whose launcher and script are taken.
            arguments: of the script.
            task: what is asked of it.
            directory: of the run, for its log and its conversation.
        """
        self.stop()
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("talk-*"):  # of a process that is gone, or that ends now because its parent is
            shutil.rmtree(old, ignore_errors=True)
        self._directory, self._talk = directory, Path(tempfile.mkdtemp(prefix="talk-", dir=directory)).absolute()
        self._read, self._buffer, self._heard, self._owed = 0, b"", False, None
        self._silence, self._looked = 0.0, time.monotonic()
        write_whole(self._talk / TASK, task.model_dump_json(indent=1))
        write_whole(directory / "command.txt", masked(shlex.join(command.words(arguments))) + "\n")
        self._log = (directory / LOG).open("ab")
        try:
            self._process = subprocess.Popen(  # noqa: S603  (the user's own command line, word by word)
                command.words(arguments, self._talk / TASK),
                stdin=subprocess.PIPE,  # its ranks end when this end of it is closed, however this process went
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(command, self._rank),
                start_new_session=True,  # Ctrl-C is for this process, which then has the run saved
            )
        except OSError as error:
            raise UserError(f"tuning.command: {command.launcher[0]}: cannot be started: {error.strerror}") from None

    def listen(
        self,
        seconds: float,
        hang_timeout: int,
        *,
        evaluated: Callable[[Evaluation], bool] = lambda _evaluation: True,
        stepped: Callable[[Step], None] = lambda _step: None,
    ) -> End | None:
        """As `RunProcess.listen`."""
        alive = self._alive
        messages = self._messages()
        for message in messages:
            if isinstance(message, Step):
                stepped(message)
            elif isinstance(message, Evaluation):
                self._owed = message
                go_on = evaluated(message)
                self._answer(message, go_on)
            elif isinstance(message, End) and message.state != "terminated":
                return self._ended(message)
        if not messages and not alive:
            return self._ended(self._how_it_ended())
        if not messages:
            time.sleep(seconds)
        limit = hang_timeout if self._heard else max(hang_timeout, _START_SECONDS)
        if self._silence > limit:
            return self._ended(End(state="died", reason=f"no step in {limit} s (tuning.hang_timeout)"))
        return None

    @property
    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ended(self, end: End) -> End:
        if end.state in ("complete", "stopped", "diverged"):
            with suppress(subprocess.TimeoutExpired):
                if self._process is not None:
                    self._process.wait(_END_SECONDS)
        self.stop()
        if end.state == "disk_full":
            raise DiskFull(end.reason)
        return end

    def _how_it_ended(self) -> End:
        """Of a run that is gone without a word: what one of its ranks left behind, else the end of its log."""
        for path in sorted(self._talk.glob(FAILED.format("*"))):
            with suppress(ValueError, OSError):
                return End.model_validate_json(path.read_text(encoding="utf-8"))
        status = self._process.poll() if self._process is not None else None
        named = signal.Signals(-status).name if status is not None and status < 0 else f"exit status {status}"
        said = last_lines(self._directory / LOG)
        return End(state="died", reason=f"its process ended ({named})" + (f": {said}" if said else ""))

    def _messages(self) -> list[Said]:
        with suppress(FileNotFoundError), (self._talk / SAID).open("rb") as file:
            file.seek(self._read)
            data = file.read()
            self._read += len(data)
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        messages = [receive(line.decode()) for line in lines]
        now = time.monotonic()
        # Of the seconds in which this process was awake; it may have been stopped itself.
        self._silence = 0.0 if messages else self._silence + min(now - self._looked, 5.0)
        self._looked, self._heard = now, self._heard or bool(messages)
        return messages

    def _answer(self, evaluation: Evaluation, go_on: bool) -> None:
        self._owed, self._silence, self._looked = None, 0.0, time.monotonic()
        write_whole(self._talk / ANSWER.format(evaluation.step), Answer(go_on=go_on).line())

    def save_and_stop(self, report: Callable[[Evaluation], None] = lambda _evaluation: None) -> None:
        """As `RunProcess.save_and_stop`: Megatron saves at SIGTERM (--exit-signal-handler)."""
        if self._process is None:
            return
        self._terminate()
        if self._owed is not None:
            self._answer(self._owed, True)
        until = time.monotonic() + _SAVE_SECONDS
        while self._alive and time.monotonic() < until:
            messages = self._messages()
            for message in messages:
                if isinstance(message, Evaluation):
                    report(message)
                    self._answer(message, True)
            if any(isinstance(message, End) for message in messages):
                break
            time.sleep(0.1)
        self.stop()

    def _terminate(self) -> None:
        """SIGTERM to every rank; to the launcher where none is known yet. torchrun would kill ranks that still save."""
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
        shutil.rmtree(self._talk, ignore_errors=True)


def trial_arguments(command: NativeCommand, config: Config) -> list[str]:
    """Arguments of the user's script for a trial: the proxy's sizes, its schedule, its values; its own folder.

    Args:
        command: `tuning.command`.
        config: of the trial.
    """
    directory = Path(config.run.dir)
    options = {
        **native_options(config),
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


def own_launch(command: NativeCommand, arguments: list[str], task: Task, directory: Path) -> None:
    """Runs a watched run to its end, where nothing is said on the way.

    Raises:
        UserError: it failed; says how.
    """
    process = NativeProcess(Rank())
    process.launch(command, arguments, task, directory)
    try:
        while (end := process.listen(0.1, _START_SECONDS)) is None:
            pass
    finally:
        process.stop()
    if end.state != "complete":
        raise UserError(end.reason)


def _environment(command: NativeCommand, rank: Rank) -> dict[str, str]:
    """As of a trial (process.environment); with as many GPUs as its launcher starts processes."""
    parent = dict(os.environ)
    if command.processes == 1:
        found = environment(rank, parent)
    else:
        found = environment(rank, {**parent, "CUDA_VISIBLE_DEVICES": ""})
        found.pop("CUDA_VISIBLE_DEVICES", None)
        visible = parent.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(number) for number in range(_gpus())]
        if command.processes is not None and len(devices) > command.processes:
            first = rank.local_rank * command.processes % len(devices)
            devices = devices[first : first + command.processes]
        if devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if command.is_srun:
        found |= {name: value for name, value in parent.items() if name.startswith("SLURM_")}
    return found


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
