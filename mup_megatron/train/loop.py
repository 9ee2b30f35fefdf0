"""The training loop, which run.py makes and hooks hang on.

Public names: `Loop`, `Terminated`, `Alarmed`, `Diverged`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches
from mup_megatron.data.order import Order
from mup_megatron.engines import Engine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.step_result import StepResult
from mup_megatron.parallel.late import Late, Stopwatch
from mup_megatron.parallel.ranks import stop_signal
from mup_megatron.train.hooks import Ask, Evaluation, Hook, Step
from mup_megatron.train.saver import Saver
from mup_megatron.util.errors import UserError


class Terminated(Exception):
    """SIGTERM or Ctrl-C was handled: the run is saved."""


class Alarmed(Exception):
    """The run does not look as it should, and `watch.action` is `stop`: the run is saved."""


class Diverged(Exception):
    """The loss is not a finite number; the last checkpoint stays as it is."""


@dataclass(frozen=True, kw_only=True)
class _Update:
    """An optimizer step that the device was given, and may not have done."""

    number: int
    lr: float
    result: StepResult
    watch: Stopwatch


class Loop:
    """Steps, evaluations and checkpoints of one run, in their order. Collective.

    What a step was like, and whether some rank asks to stop, is read behind the next step, so that a device never waits
    for the host; at once where an evaluation, a checkpoint or the end is due.

    Args:
        config: the run.
        engine: steps the model.
        batches: of the training data.
        order: of its samples.
        evaluation: of the validation data.
        saver: writes checkpoints.
        hooks: called in this order at each place.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batches: Batches,
        order: Order,
        evaluation: Batches,
        saver: Saver,
        hooks: Sequence[Hook],
    ) -> None:
        self._training, self._engine, self._saver, self._hooks = config.training, engine, saver, tuple(hooks)
        self._batches, self._order, self._evaluation = batches, order, evaluation
        self._schedule = LearningRateSchedule(config.training, config.hparams.lr)
        self._sample_tokens = config.sample_tokens
        self._device = torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
        self._untold: _Update | None = None
        self._asked: list[Late] = []

    def run(self, start: int) -> Evaluation | None:
        """Steps from `start` updates done to the last.

        Returns:
            The last evaluation; None where there was none.

        Raises:
            Terminated: SIGTERM or Ctrl-C came before the last step; a checkpoint was written.
            Alarmed: a hook asked to stop; a checkpoint was written.
            Diverged: the loss became infinite or no number.
        """
        found = None
        with contextlib.ExitStack() as stack, stop_signal() as terminated:
            for hook in self._hooks:
                stack.enter_context(hook)
            stack.enter_context(self._finishing())
            go_on = [hook.before_run() for hook in self._hooks]
            if not all(go_on):
                return None
            for done in range(start + 1, self._training.train_steps + 1):
                evaluates = self._is_due(done, self._training.eval_interval)
                saves = self._is_due(done, self._training.steps_between_checkpoints)
                waits = evaluates or saves or done == self._training.train_steps
                self._update(done)
                if waits:
                    self._tell()
                if evaluates:
                    found = Evaluation(step=done, measures={"eval_loss": self._evaluate()})
                    go_on = [hook.after_evaluation(found) for hook in self._hooks]
                    if not all(go_on):
                        return found
                asked, is_written = self._ask(terminated, waits=waits)
                if is_written:
                    self._finish()
                if asked or saves:
                    self._tell()
                    self._save(done, asked)
        return found

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[None]:
        """At its end a checkpoint that is being written becomes whole. Where a rank fails alone, it is lost."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Diverged) or torch.distributed.get_world_size() == 1:
                self._finish()
            raise
        self._finish()

    def _save(self, done: int, asked: Ask) -> None:
        """Writes the checkpoint of a step, or begins to. Raises Terminated and Alarmed, as `run`."""
        self._finish()
        self._saver.begin(done)
        if self._training.async_save and asked < Ask.STOP:
            return
        path = self._finish()
        if asked >= Ask.STOP and done < self._training.train_steps:
            kind = Terminated if asked is Ask.END else Alarmed
            raise kind(f"saved step {done} to {path}")

    def _finish(self) -> Path | None:
        """Makes the checkpoint whole that is being written; where it is, None if there is none."""
        finished = self._saver.finish()
        if finished is None:
            return None
        for hook in self._hooks:
            hook.after_checkpoint(*finished)
        return finished[1]

    def _update(self, done: int) -> None:
        """One optimizer step, after which `done` are; meanwhile what the one before was like is told."""
        for hook in self._hooks:
            hook.before_step(done)
        watch, lr = Stopwatch(self._device), self._schedule(done - 1)
        result = self._engine.step(self._batches[done - 1], lr)
        watch.stop()
        self._tell()
        self._untold = _Update(number=done, lr=lr, result=result, watch=watch)
        try:
            for hook in self._hooks:
                hook.after_update(done, result)
        except UserError:
            self._tell()  # it was done all the same
            raise

    def _tell(self) -> None:
        """What the last step was like, where that was not told yet. Raises Diverged."""
        if self._untold is None:
            return
        update, self._untold = self._untold, None
        seconds = update.watch.seconds()
        step = Step(
            number=update.number,
            tokens=self._order.samples(update.number) * self._sample_tokens,
            loss=update.result.loss,
            grad_norm=update.result.grad_norm,
            lr=update.lr,
            seconds=seconds,
            tokens_per_second=self._order.batch * self._sample_tokens / seconds,
        )
        for hook in self._hooks:
            hook.after_step(step)
        if not math.isfinite(step.loss):
            raise Diverged(f"loss is {step.loss} at step {step.number}")

    def _ask(self, terminated: Callable[[], bool], *, waits: bool) -> tuple[Ask, bool]:
        """The most that any rank asks, and whether all have written their checkpoint; of the step before. Collective.

        Where the loop waits it is of this step too. What follows from it, all ranks do at the same step.
        """
        asks = [Ask.END if terminated() else Ask.NOTHING, *(hook.asks() for hook in self._hooks)]
        own = (int(max(asks)), int(not self._saver.is_written()))
        most = torch.stack([torch.full((), each, dtype=torch.float64, device=self._device) for each in own])
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        self._asked.append(Late(*most))
        read, self._asked = (self._asked, []) if waits else (self._asked[:-1], self._asked[-1:])
        found = [late.read() for late in read]
        return Ask(int(max((asked for asked, _ in found), default=0))), bool(found) and not found[-1][1]

    def _is_due(self, done: int, interval: int | None) -> bool:
        """What is done at an interval is done after the last step too; without an interval never."""
        return bool(interval and (done % interval == 0 or done == self._training.train_steps))

    def _evaluate(self) -> float:
        losses = [self._engine.evaluate(self._evaluation[number]) for number in range(self._training.eval_steps)]
        return sum(losses) / len(losses)
