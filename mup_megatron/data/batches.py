"""megatron-core's datasets as batches in an order that depends on the step alone.

Public names: `Batches`, `build_datasets`. Which dataset a model is trained on, and what its batches hold, the module of
its family says (families.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.data.batch import Batch, Sample
from mup_megatron.data.cache import own_cache
from mup_megatron.data.exact_reads import read_exactly
from mup_megatron.data.families import family_of
from mup_megatron.data.parts import check_parts
from mup_megatron.data.prepare import still_there
from mup_megatron.data.record import Prepared
from mup_megatron.data.tokenizer import load_tokenizer
from mup_megatron.parallel.layout import Layout
from mup_megatron.util.disk import full_disk
from mup_megatron.util.errors import UserError


def build_datasets(
    config: Config,
    prepared: Prepared,
    say: Callable[[str], None] = lambda _line: None,
    samples: int | None = None,
) -> tuple[Any, Any]:
    """Training and validation dataset, long enough for the run. Collective: every rank calls it.

    Args:
        config: the run.
        prepared: its data.
        say: takes a line where another process is to be waited for.
        samples: that the training data's order is drawn for; None for those of the run.

    Raises:
        UserError: a split that is needed has no documents, or the data was replaced meanwhile.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    training = config.training
    # megatron-core names the files of its index by everything but the tokens.
    cache = Path(config.data.cache_dir or prepared.corpus.directory / "cache") / prepared.digest[:16]
    common = {
        "random_seed": config.run.seed,
        "sequence_length": training.seq_length,
        "blend": prepared.blend,
        "split": config.data.split,
        "path_to_cache": str(cache),
        "mmap_bin_files": False,
        "tokenizer": load_tokenizer(config, Path(prepared.tokenizer) if prepared.tokenizer else None),
    }
    dataset, dataset_config = family_of(config.model).dataset(config, common)
    sizes = [
        samples or training.train_steps * training.global_batch_size,
        training.eval_steps * training.global_batch_size if training.eval_interval else 0,
        0,
    ]
    splits = dataset_config.split_matrix
    for number, size in enumerate(sizes):
        if not size:
            splits[number] = None  # upstream would build it, and never end if it has no documents
    # megatron-core loops for ever over an empty one.
    check_parts(config, prepared.blend[0], validation=bool(sizes[1]), say=say)
    with ExitStack() as held:
        held.enter_context(full_disk(cache, "the index of samples", lambda: 12 * sum(sizes)))  # at least
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            held.enter_context(own_cache(cache, say))  # the first rank builds; the others then read
        try:
            train, valid, _ = BlendedMegatronDatasetBuilder(dataset, sizes, lambda: True, dataset_config).build()
        except (ValueError, EOFError, IndexError, pickle.UnpicklingError) as error:  # of NumPy, which reads the index
            raise UserError(f"{cache}: cannot read the index of the samples ({error}); remove that folder") from None
    still_there(prepared)
    for part in (train, valid):
        read_exactly(part)
    return train, valid


class Batches:
    """Global batches of a dataset: batch i holds samples [i·g + shift, (i+1)·g + shift), whatever the layout.

    Micro-batch k of data-parallel rank r takes its samples from (k·ranks + r)·b on, as Megatron's sampler does. The
    shift is 0 but in a run whose batch was another before (`order.Order`). It takes config and layout apart, since a
    `Setup` lies above data in the order of imports.
    """

    def __init__(
        self, dataset: Any, config: Config, layout: Layout, rank: int, device: torch.device, shift: int = 0
    ) -> None:
        self._dataset, self._shift = dataset, shift
        self._training = config.training
        self._layout = layout
        self._data_rank = layout.data_rank(rank)
        self.maker = family_of(config.model).maker(config, layout, rank, device)

    def __getitem__(self, number: int) -> Sequence[Batch]:
        """This rank's micro-batches of a global batch."""
        start = number * self._training.global_batch_size + self._shift
        return [self._micro_batch(start, k) for k in range(self._layout.micro_batches)]

    def _micro_batch(self, start: int, k: int) -> Batch:
        size = self._training.micro_batch_size
        first = start + (k * self._layout.data + self._data_rank) * size
        return self.maker.batch([self._sample(index % len(self._dataset)) for index in range(first, first + size)])

    def _sample(self, index: int) -> Sample:
        """One sample. An embedding reads past its end where a token is not in the vocabulary: on a GPU, anything.

        Raises:
            UserError: the data holds such a token.
        """
        sample: Sample = self._dataset[index]
        tokens = self.maker.tokens(sample)
        low, high = int(tokens.min()), int(tokens.max())
        vocabulary = int(self._dataset.config.tokenizer.vocab_size)
        if low < 0 or high >= vocabulary:
            raise UserError(
                f"data: sample {index} holds token {low if low < 0 else high}, but the tokenizer has "
                f"{vocabulary} entries; the dataset was written with another one, or is damaged"
            )
        return sample
