"""What an engine's step was like. Public name: `StepResult`."""

from __future__ import annotations

import torch

from mup_megatron.parallel.late import Late


class StepResult:
    """One optimizer step, which the device may not have done yet.

    Args:
        loss: nats per token, averaged over the global batch; a scalar, the same on every rank.
        grad_norm: global gradient norm before clipping; the same on every rank.
    """

    def __init__(self, *, loss: torch.Tensor, grad_norm: torch.Tensor | float) -> None:
        self._late = Late(loss, grad_norm)

    @property
    def loss(self) -> float:
        """Waits for the device."""
        return self._late.read()[0]

    @property
    def grad_norm(self) -> float:
        """Waits for the device."""
        return self._late.read()[1]
