"""A watched run: one that `tune --megatron`, `coord-check --megatron` or `stability --megatron` started, from inside.

`mup-megatron run --watched FILE SCRIPT` reads from FILE what is asked of the run (tuning/megatron_task.py, `Task`). The
run says its losses and how it ended in the folder of that file, and waits there for an answer after each evaluation.
All ranks wait for the same answer, so that all leave the training loop at the same step.

Public names: `begin`, `hold`, `task`, `check`, `failed`, `finished`, `forget`, `without_rule`; `count_runs`,
`end_with`, `is_pipe` (of a process that is forked); `sees_training`, `sees_steps`, `sees_evaluation`, `sees_results`,
`decides_exit`, `meets_apart` (decorators on symbols of upstream's, which patches/ puts on).
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.checkpoints.run_directory import Busy, own_run_directory
from mup_megatron.parallel.ranks import Rank, read_rank
from mup_megatron.tuning.megatron_task import ANSWER, FAILED, PROCESS, SAID, Task, differing, said_by_options
from mup_megatron.tuning.process import Answer, End, Evaluation, Said, Step
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_whole

if TYPE_CHECKING:
    from mup_megatron.config import Config
    from mup_megatron.parallel.layout import Layout
    from mup_megatron.rules.table import Parametrization

Function = Callable[..., Any]
_TELL_SECONDS, _POLL_SECONDS = 2.0, 0.1
_LOSS = "lm loss"
METRICS = "metrics.jsonl"


class _Watch:
    """The run at hand."""

    def __init__(self, task: Task, talk: Path) -> None:
        self.task = task
        self._talk, self._rank = talk, read_rank()
        self._told = 0.0
        self._ended = False
        self._validation: list[float] = []
        self._held = ExitStack()
        write_whole(talk / PROCESS.format(self._rank.rank), str(os.getpid()))

    def hold(self) -> None:
        """Holds the trial's folder, from the first rank, until this process ends. Raises Busy."""
        if self._rank.is_first and self.task.kind == "trial":
            self._held.enter_context(own_run_directory(Path(self.task.path), Rank()))

    @property
    def tells(self) -> bool:
        """Whether this rank has the loss: the last one is in the last pipeline stage."""
        return self._rank.rank == self._rank.world_size - 1

    def say(self, message: Said) -> None:
        """One message."""
        self._ended = self._ended or isinstance(message, End)
        with (self._talk / SAID).open("a", encoding="utf-8") as file:
            file.write(message.line())

    def step(self, iteration: int, losses: dict[str, Any]) -> None:
        """A step is done; `losses` is empty where this rank has none."""
        if not losses or not self.tells:
            return
        loss = loss_of(losses)
        self._note(step=iteration, loss=loss)
        if not math.isfinite(loss):
            self.say(End(state="diverged", reason=f"loss is {loss} at step {iteration}"))
            raise SystemExit(0)
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._told = time.monotonic()
            self.say(Step(step=iteration, loss=loss))

    def evaluates(self) -> None:
        """An evaluation begins: on one or more sets."""
        self._validation = []

    def evaluated(self, losses: dict[str, Any] | None) -> None:
        """An evaluation on one set is done."""
        if losses:
            self._validation.append(loss_of(losses))

    def reached(self, iteration: int, *, validates: bool, interval: int | None) -> None:
        """A step, its evaluation with it, is over: reports at rungs, and leaves where the run is over.

        Args:
            iteration: that was reached.
            validates: whether the run evaluates on a validation set.
            interval: between its evaluations.
        """
        last = iteration >= self.task.steps
        if not last and iteration % self.task.interval:
            return
        if validates and (not interval or iteration % interval):
            return  # evaluated behind the loop
        self.report(iteration, last=last)

    def report(self, iteration: int, *, last: bool) -> None:
        """Says a loss, waits for the answer, and leaves where that says so or no step is left."""
        loss = 0.0
        if self.tells:
            loss = self._mean(self._validation) if self._validation else self._training_loss(iteration)
            self._note(step=iteration, eval_loss=loss)
            self.say(Evaluation(step=iteration, loss=loss))
        answer = self._talk / ANSWER.format(iteration)
        while not answer.exists():
            time.sleep(_POLL_SECONDS)
        go_on = Answer.model_validate(json.loads(answer.read_text(encoding="utf-8"))).go_on
        if go_on and not last:
            return
        _leave_groups()
        if self.tells:
            if not go_on:
                self.say(End(state="stopped"))
            elif math.isfinite(loss):
                self.say(End(state="complete", loss=loss))
            else:
                self.say(End(state="diverged", reason="the evaluation loss is no finite number"))
        raise SystemExit(0)

    def measured(self) -> None:
        """The measurements of a check are written: this run is over."""
        _leave_groups()
        if self.tells:
            self.say(End(state="complete", loss=0.0))
        raise SystemExit(0)

    def finished(self) -> None:
        """The script came to its end."""
        if self._ended or not self.tells:
            return
        if self.task.kind != "trial":
            self.say(End(state="complete", loss=0.0))
        else:
            self.say(End(state="terminated", reason="the script ended before its last step"))

    def failed(self, error: BaseException) -> None:
        """Leaves behind how this rank ended."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return self.finished()
        from mup_megatron.tuning.trial import is_out_of_memory

        if isinstance(error, SystemExit) and error.__context__ is not None:
            error = error.__context__
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
        state: Any = "failed"
        if isinstance(error, Busy):
            state = "busy"
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            state = "disk_full"
        elif is_out_of_memory(error):
            state = "died"
        with suppress(OSError):
            path = self._talk / FAILED.format(self._rank.rank)
            write_whole(path, End(state=state, reason=reason[:1000]).line())

    def _note(self, **line: Any) -> None:
        if self.task.kind == "trial":
            with (Path(self.task.path) / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _training_loss(self, iteration: int) -> float:
        """Mean of the training loss over the steps since the evaluation before, also those of an earlier process."""
        losses = {}
        for line in (Path(self.task.path) / METRICS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError):  # a line that a killed process left half written; an evaluation
                held = json.loads(line)
                losses[held["step"]] = held["loss"]
        first = (iteration - 1) // self.task.interval * self.task.interval + 1
        return self._mean([losses[step] for step in range(first, iteration + 1) if step in losses])

    @staticmethod
    def _mean(losses: list[float]) -> float:
        return sum(losses) / len(losses) if losses else math.nan


_watch: _Watch | None = None
_before = 0


def begin(path: Path) -> Task:
    """Reads what is asked of this run; from now on it is watched.

    Raises:
        UserError: the file is no task.
    """
    global _watch
    try:
        asked = Task.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--watched {path}: not a task of mup-megatron's: {error}") from None
    _watch = _Watch(asked, path.parent)
    return asked


def hold() -> None:
    """Holds a trial's folder until this process ends.

    Raises:
        Busy: another run holds it.
    """
    if _watch is not None:
        _watch.hold()


def task() -> Task | None:
    """What is asked of this run; None where it is not watched."""
    return None if _watch is None else _watch.task


def failed(error: BaseException) -> None:
    """Tells whoever watches how this process ends."""
    if _watch is not None:
        _watch.failed(error)


def finished() -> None:
    """Tells whoever watches that the script came to its end."""
    if _watch is not None:
        _watch.finished()


def forget() -> None:
    """Is watched no longer."""
    global _watch
    _watch = None


def check(config: Config) -> None:
    """Whether this run is the one that was asked for.

    Args:
        config: as its options were read.

    Raises:
        UserError: another size, value or schedule; names the keys.
    """
    asked = task()
    if asked is None or not asked.expected:
        return
    if found := differing(asked.expected, said_by_options(config)):
        raise UserError(
            f"this run is not the one that was asked for ({'; '.join(found[:8])}): the command line, the script or "
            "the config of the study was changed, or an option of the script decides it; expected the same"
        )


def without_rule(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """The run's rules without the one that a check takes out; the same where it takes none."""
    asked = task()
    if asked is None or asked.broken is None:
        return parametrization
    from mup_megatron.proof.controls import control

    return control(asked.broken).break_(parametrization, layout)


def measured() -> None:
    """Says that the measurements of a check are written, and leaves."""
    if _watch is not None:
        _watch.measured()


def sees_steps(training_log: Function) -> Function:
    """On `megatron.training.training.training_log`, which every rank calls after every step."""
    signature = inspect.signature(training_log)

    @functools.wraps(training_log)
    def log(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        losses = dict(given["loss_dict"])
        result = training_log(*args, **kwargs)
        if _watch is not None and _watch.task.kind == "trial":
            _watch.step(given["iteration"], losses)
        return result

    return log


def sees_evaluation(evaluate: Function) -> Function:
    """On `megatron.training.training.evaluate`, whose losses upstream prints and forgets."""

    @functools.wraps(evaluate)
    def see(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if _watch is not None:
            _watch.evaluated(result[0])
        return result

    return see


def sees_results(evaluate_and_print_results: Function) -> Function:
    """On `megatron.training.training.evaluate_and_print_results`, which knows whether the loop is over."""
    signature = inspect.signature(evaluate_and_print_results)

    @functools.wraps(evaluate_and_print_results)
    def see(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if _watch is not None:
            _watch.evaluates()
        result = evaluate_and_print_results(*args, **kwargs)
        if _watch is not None and str(given["prefix"]).endswith("on validation set"):
            _watch.report(given["iteration"], last=True)
        return result

    return see


def decides_exit(checkpoint_and_decide_exit: Function) -> Function:
    """On `megatron.training.training.checkpoint_and_decide_exit`: behind an evaluation and before its checkpoint."""
    signature = inspect.signature(checkpoint_and_decide_exit)

    @functools.wraps(checkpoint_and_decide_exit)
    def decide(*args: Any, **kwargs: Any) -> Any:
        if _watch is not None and _watch.task.kind == "trial":
            from megatron.training.global_vars import get_args

            upstreams = get_args()
            iteration = signature.bind(*args, **kwargs).arguments["iteration"]
            _watch.reached(iteration, validates=bool(upstreams.do_valid), interval=upstreams.eval_interval)
        return checkpoint_and_decide_exit(*args, **kwargs)

    return decide


def count_runs(before: int) -> None:
    """Says how many runs of the same launcher's processes have been before this one."""
    global _before
    _before = before


def meets_apart(create_store: Function) -> Function:
    """On torch's rendezvous `_create_c10d_store`: torchrun's store still has the addresses of earlier runs."""

    @functools.wraps(create_store)
    def create(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed import PrefixStore

        return PrefixStore(f"run-{_before}", create_store(*args, **kwargs))

    return create


def loss_of(losses: dict[str, Any]) -> float:
    """Megatron's own loss among those that a script reports; the first where it has another name."""
    return float(losses[_LOSS] if _LOSS in losses else next(iter(losses.values())))


def _leave_groups() -> None:
    """Every rank is here: they leave together."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def end_with(handle: int) -> None:
    """Ends this process when the other end of a pipe is gone; nothing where it is none.

    Standard input is one from the command that started the run. Where a launcher gives its ranks another one, they end
    with the launcher.

    Args:
        handle: file descriptor.
    """
    if not is_pipe(handle):
        return

    def wait() -> None:
        while os.read(handle, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def is_pipe(handle: int) -> bool:
    """Whether a file descriptor is open, and a pipe."""
    try:
        return stat.S_ISFIFO(os.fstat(handle).st_mode)
    except OSError:
        return False
