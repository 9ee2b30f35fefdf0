"""What an engine sees of data. Public names: `Batch`, `Sample`, `BatchMaker`, `Family`, `sent`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout

Sample = Mapping[str, torch.Tensor]
"""One item of a dataset, by the dataset's own names."""


class Batch(ABC):
    """One micro-batch on a device: what the model is called with, and how the loss is made from what it returns."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(iter(vars(self).values())).device

    @abstractmethod
    def forward(self, model: Any) -> Any:
        """What the model returns for it; of a stage before the last, what the next one takes.

        Args:
            model: megatron-core's, or what an engine wraps it in.
        """

    @abstractmethod
    def loss(self, output: Any) -> torch.Tensor:
        """The mean loss of the micro-batch, in nats per token that counts, from what the last stage returns."""


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device. From memory that is not pinned, a copy waits for all that the device does."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class BatchMaker(Protocol):
    """Makes this rank's micro-batches from samples."""

    def tokens(self, sample: Sample) -> torch.Tensor:
        """Every token of a sample: all must be in the vocabulary."""
        ...

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """One micro-batch."""
        ...


class Family(Protocol):
    """What a family of models is trained on: a module of data/, named as the family is."""

    maker: Callable[[Config, Layout, int, torch.device], BatchMaker]
    """Makes what makes batches on a rank, of this number, on this device."""

    def dataset(self, config: Config, common: Mapping[str, Any]) -> tuple[type, Any]:
        """The class of megatron-core's dataset, and its config.

        Args:
            config: the run.
            common: what every one of upstream's dataset configs takes: seed, sequence length, blend, split, folder of
                the index, tokenizer.
        """
        ...
