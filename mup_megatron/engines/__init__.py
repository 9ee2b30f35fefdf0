"""Engines: who steps the model. One protocol; DeepSpeed's engine (deepspeed.py) implements it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mup_megatron.data.batches import Batch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step.

    Args:
        loss: nats per token, averaged over the global batch; the same on every rank.
        grad_norm: global gradient norm before clipping; the same on every rank.
    """

    loss: float
    grad_norm: float


class Engine(Protocol):
    """What the training loop needs of an engine. Every method is collective."""

    def step(self, micro_batches: Sequence[Batch], base_lr: float) -> StepResult:
        """One optimizer step on this rank's micro-batches of a global batch, at the base learning rate given."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Loss in nats per token on a global batch; the same on every rank."""
        ...

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Writes weights, optimizer and `state` (plain values and tensors) into an empty folder."""
        ...

    def load(self, directory: Path) -> dict[str, Any]:
        """Reads what `save` wrote under the same layout; returns its `state`."""
        ...

    def close(self) -> None:
        """Lets go of hooks and buffers, so that another engine can be built in this process."""
        ...
