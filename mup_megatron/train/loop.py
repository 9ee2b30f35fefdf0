"""The training loop, which run.py makes and hooks hang on.

Public names: `Loop`, `Terminated`, `Alarmed`, `Diverged`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

import torch
import torch.distributed

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches
from mup_megatron.engines import Engine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.parallel.ranks import stop_signal
from mup_megatron.train.hooks import Ask, Evaluation, Hook, Step
from mup_megatron.train.saver import Saver


class Terminated(Exception):
    """SIGTERM or Ctrl-C was handled: the run is saved."""


class Alarmed(Exception):
    """The run does not look as it should, and `watch.action` is `stop`: the run is saved."""


class Diverged(Exception):
    """The loss is not a finite number; the last checkpoint stays as it is."""


class Loop:
    """Steps, evaluations and checkpoints of one run, in their order. Collective.

    Args:
        config: the run.
        engine: steps the model.
        batches: of the training data.
        evaluation: of the validation data.
        saver: writes checkpoints.
        hooks: called in this order at each place.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        batches: Batches,
        evaluation: Batches,
        saver: Saver,
        hooks: Sequence[Hook],
    ) -> None:
        self._training, self._engine, self._saver, self._hooks = config.training, engine, saver, tuple(hooks)
        self._batches, self._evaluation = batches, evaluation
        self._schedule = LearningRateSchedule(config.training, config.hparams.lr)
        self._tokens = config.training.global_batch_size * config.sample_tokens

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
            go_on = [hook.before_run() for hook in self._hooks]
            if not all(go_on):
                return None
            for done in range(start + 1, self._training.train_steps + 1):
                for hook in self._hooks:
                    hook.before_step(done)
                step = self._step(done)
                for hook in self._hooks:
                    hook.after_step(step)
                if not math.isfinite(step.loss):
                    raise Diverged(f"loss is {step.loss} at step {done}")
                if self._is_due(done, self._training.eval_interval):
                    found = Evaluation(step=done, measures={"eval_loss": self._evaluate()})
                    go_on = [hook.after_evaluation(found) for hook in self._hooks]
                    if not all(go_on):
                        return found
                asked = _most([Ask.END if terminated() else Ask.NOTHING, *(hook.asks() for hook in self._hooks)])
                if asked or self._is_due(done, self._training.checkpoint_interval):
                    path = self._saver.save(done)
                    for hook in self._hooks:
                        hook.after_checkpoint(done, path)
                    if asked >= Ask.STOP and done < self._training.train_steps:
                        kind = Terminated if asked is Ask.END else Alarmed
                        raise kind(f"saved step {done} to {path}")
        return found

    def _step(self, done: int) -> Step:
        """One optimizer step, after which `done` are."""
        began, lr = time.perf_counter(), self._schedule(done - 1)
        result = self._engine.step(self._batches[done - 1], lr)
        seconds = time.perf_counter() - began
        return Step(
            number=done,
            tokens=done * self._tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            seconds=seconds,
            tokens_per_second=self._tokens / seconds,
        )

    def _is_due(self, done: int, interval: int | None) -> bool:
        """What is done at an interval is done after the last step too; without an interval never."""
        return bool(interval and (done % interval == 0 or done == self._training.train_steps))

    def _evaluate(self) -> float:
        losses = [self._engine.evaluate(self._evaluation[number]) for number in range(self._training.eval_steps)]
        return sum(losses) / len(losses)


def _most(asked: Sequence[Ask]) -> Ask:
    """The most that is asked on any rank: all must leave the loop at the same step. Collective."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    value = torch.tensor(int(max(asked)), device=device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return Ask(int(value))
