"""What an engine sees of data. Public names: `Batch`, `Sample`, `BatchMaker`, `Family`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout

Sample = Mapping[str, torch.Tensor]
"""One item of a dataset, by the dataset's own names."""


class Batch(ABC):
    """One micro-batch on a device: what the model is called with, and how the loss is made from what it returns."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are."""

    @abstractmethod
    def forward(self, model: Any) -> Any:
        """What the model returns for it; of a stage before the last, what the next one takes.

        Args:
            model: megatron-core's, or what an engine wraps it in.
        """

    @abstractmethod
    def loss(self, output: Any) -> torch.Tensor:
        """The mean loss of the micro-batch, in nats per token that counts, from what the last stage returns."""


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

    def dataset(self, config: Config, common: Mapping[str, Any]) -> tuple[type, Any]:
        """The class of megatron-core's dataset, and its config.

        Args:
            config: the run.
            common: what every one of upstream's dataset configs takes: seed, sequence length, blend, split, folder of
                the index, tokenizer.
        """
        ...

    def maker(self, config: Config, layout: Layout, rank: int, device: torch.device) -> BatchMaker:
        """What makes batches on a rank."""
        ...
