"""What hangs on the training loop: `Hook`, what the loop tells it (`Step`, `Evaluation`), and what it asks (`Ask`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mup_megatron.engines.step_result import StepResult


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step.

    Args:
        number: updates done, this one among them.
        tokens: trained on so far.
        loss: nats per token, averaged over the global batch.
        grad_norm: global gradient norm before clipping.
        lr: the base learning rate of this step.
        seconds: that the step took.
        tokens_per_second: of this step.
    """

    number: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured on the validation data after a step.

    Args:
        step: updates done.
        measures: numbers by name: `eval_loss` in nats per token, and what hooks add for those behind them.
    """

    step: int
    measures: dict[str, float]

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.measures["eval_loss"]


class Ask(enum.IntEnum):
    """What a hook asks of the loop behind a step; the more comes later."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    """Behind a checkpoint."""
    END = 3
    """Behind a checkpoint, because of a signal."""


class Hook:
    """One concern of a training run, called by the loop at the places that it overrides; a context while the loop runs.

    Every rank has the same hooks in the same order, so a method may be collective.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        pass

    def before_run(self) -> bool:
        """Before the first step of this process; whether to go on."""
        return True

    def before_step(self, number: int) -> None:
        """Before an optimizer step, after which so many updates are done."""

    def after_update(self, number: int, result: StepResult) -> None:
        """Directly behind an optimizer step, after which so many updates are done; to read its result is to wait."""

    def after_step(self, step: Step) -> None:
        """What a step was like: before an evaluation or a checkpoint behind it, otherwise behind the next one."""

    def asks(self) -> Ask:
        """What it asks behind a step; what any rank asks is done on all."""
        return Ask.NOTHING

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        """After an evaluation; whether to go on."""
        return True

    def after_checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint is whole."""
