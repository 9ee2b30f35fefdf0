"""Which samples each update of a run reads, and that a run which goes on does not read others.

Public names: `Order`, `ordered_datasets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mup_megatron.config import Config
from mup_megatron.data.batches import build_datasets
from mup_megatron.data.record import Prepared

_PROBES = 32


@dataclass(frozen=True, kw_only=True)
class Order:
    """Update i (from 0 on) reads the samples [i·g + shift, (i+1)·g + shift) of an order of all of them.

    Args:
        batch: g, training.global_batch_size.
        drawn: samples that the order was drawn for. megatron-core shuffles otherwise where a text is read once more.
        shift: not 0 where an earlier part of the run had another batch.
    """

    batch: int
    drawn: int
    shift: int = 0

    @classmethod
    def of_run(cls, config: Config) -> Order:
        """Of a run that begins."""
        training = config.training
        return cls(batch=training.global_batch_size, drawn=training.train_steps * training.global_batch_size)

    @classmethod
    def of_resumed(cls, config: Config, step: int, samples: int, drawn: int) -> Order:
        """Of a run that goes on where it stopped, with a batch that may be another.

        Args:
            config: the run, as it goes on.
            step: updates done.
            samples: that they read.
            drawn: that the order was drawn for.

        Raises:
            UserError: the loss of pairs is a mean over their batch, which would begin inside of another.
        """
        batch = config.training.global_batch_size
        if config.data.of_pairs and samples % batch:
            raise config.error(
                "training.global_batch_size",
                f"{batch} does not divide the {samples:,} pairs that {step} steps read; expected a batch that does",
            )
        return cls(batch=batch, drawn=drawn, shift=samples - step * batch)

    def samples(self, step: int) -> int:
        """Samples read by so many updates of the whole run."""
        return step * self.batch + self.shift


def ordered_datasets(
    config: Config, prepared: Prepared, order: Order, done: int, say: Callable[[str], None]
) -> tuple[tuple[Any, Any], Order]:
    """Training and validation dataset in a run's order, and that order. Collective.

    A run that became longer reads its text in the order that it has begun with, and once more in the same. A blend is
    drawn anew, since it has no more samples than it was drawn for; where that changes its order, it is said.

    Args:
        config: the run.
        prepared: its data.
        order: of its samples so far.
        done: updates.
        say: takes a line.

    Raises:
        UserError: as `build_datasets`.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset

    datasets = build_datasets(config, prepared, say, order.drawn)
    needed = order.samples(config.training.train_steps)
    if needed <= len(datasets[0]) or isinstance(datasets[0], GPTDataset):
        return datasets, order
    longer = build_datasets(config, prepared, say, needed)
    read = order.samples(done)
    probes = sorted({number * read // _PROBES for number in range(_PROBES)} if read else ())
    if not all(_is_same(datasets[0][index], longer[0][index]) for index in probes):
        say(
            f"warning: a run of {needed:,} samples has another order than one of {order.drawn:,}: from step {done + 1} "
            f"on it reads some of the {read:,} samples again that it has read, and others later"
        )
    return longer, replace(order, drawn=needed)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two samples hold the same."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
