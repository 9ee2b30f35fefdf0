"""megatron-core's GPTDataset as batches in an order that depends on the step alone.

Public names: `Batch`, `Batches`, `build_datasets`, `sequence_part`.

Shapes: b micro-batch size, s sequence length, under context parallelism this rank's part of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.data.cache import own_cache
from mup_megatron.data.parts import check_parts
from mup_megatron.data.prepare import Prepared, data_directory, still_there
from mup_megatron.data.tokenizer import load_tokenizer
from mup_megatron.disk import full_disk
from mup_megatron.errors import UserError
from mup_megatron.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch on a device.

    Args:
        tokens: [b, s] int64.
        labels: [b, s] int64, tokens shifted by one.
        loss_mask: [b, s] float32.
        position_ids: [b, s] int64.
        attention_mask: [1, 1, s, s] bool, True where attention is masked (causal); None under context parallelism,
            where the core attention knows it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None


def build_datasets(
    config: Config, prepared: Prepared, say: Callable[[str], None] = lambda _line: None
) -> tuple[Any, Any]:
    """Training and validation dataset, long enough for the run. Collective: every rank calls it.

    Args:
        config: the run.
        prepared: its data.
        say: takes a line where another process is to be waited for.

    Raises:
        UserError: a split that is needed has no documents, or the data was replaced meanwhile.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    training = config.training
    # megatron-core names the files of its index by everything but the tokens.
    cache = Path(config.data.cache_dir or data_directory(config) / "cache") / prepared.digest[:16]
    dataset_config = GPTDatasetConfig(
        random_seed=config.run.seed,
        sequence_length=training.seq_length,
        blend=prepared.blend,
        split=config.data.split,
        path_to_cache=str(cache),
        tokenizer=load_tokenizer(config, Path(prepared.tokenizer) if prepared.tokenizer else None),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [
        training.train_steps * training.global_batch_size,
        training.eval_steps * training.global_batch_size if training.eval_interval else 0,
        0,
    ]
    splits = dataset_config.split_matrix
    for number, size in enumerate(sizes):
        if not size:
            splits[number] = None  # upstream would build it, and never end if it has no documents
    check_parts(config, prepared.blend[0], validation=bool(sizes[1]))  # megatron-core loops for ever over an empty one
    with ExitStack() as held:
        held.enter_context(full_disk(cache, "the index of samples", lambda: 12 * sum(sizes)))  # at least
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            held.enter_context(own_cache(cache, say))  # the first rank builds; the others then read
        try:
            train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config).build()
        except (ValueError, EOFError, IndexError, pickle.UnpicklingError) as error:  # of NumPy, which reads the index
            raise UserError(f"{cache}: cannot read the index of the samples ({error}); remove that folder") from None
    still_there(config, prepared)
    return train, valid


class Batches:
    """Global batches of a dataset: batch i holds samples [i·g, (i+1)·g), whatever the layout.

    Micro-batch k of data-parallel rank r takes the samples from i·g + (k·ranks + r)·b on, as Megatron's sampler does.
    It takes config and layout apart, since a `Setup` lies above data in the order of imports.
    """

    def __init__(self, dataset: Any, config: Config, layout: Layout, rank: int, device: torch.device) -> None:
        self._dataset = dataset
        self._training = config.training
        self._layout = layout
        self._data_rank, self._context_rank = layout.data_rank(rank), layout.context_rank(rank)
        self._device = device
        size = config.training.seq_length
        whole = layout.context == 1
        self._attention_mask = (
            torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None] if whole else None
        )

    def __getitem__(self, number: int) -> Sequence[Batch]:
        """This rank's micro-batches of a global batch."""
        start = number * self._training.global_batch_size
        return [self._micro_batch(start, k) for k in range(self._layout.micro_batches)]

    def _micro_batch(self, start: int, k: int) -> Batch:
        size = self._training.micro_batch_size
        first = start + (k * self._layout.data + self._data_rank) * size
        samples = [self._sample(index % len(self._dataset)) for index in range(first, first + size)]
        stacked = {
            name: self._part(torch.stack([sample[name] for sample in samples])).to(self._device)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        return Batch(attention_mask=self._attention_mask, **stacked)

    def of(self, tokens: torch.Tensor) -> Batch:
        """This rank's part of whole sequences that are not the dataset's: [b, s] int64. Their loss means nothing."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        tokens, positions = (self._part(each).contiguous().to(self._device) for each in (tokens, positions))
        return Batch(
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.ones_like(tokens, dtype=torch.float32),
            position_ids=positions,
            attention_mask=self._attention_mask,
        )

    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        """One sample. An embedding reads past its end where a token is not in the vocabulary: on a GPU, anything.

        Raises:
            UserError: the data holds such a token.
        """
        sample: dict[str, torch.Tensor] = self._dataset[index]
        tokens = torch.stack([sample["tokens"], sample["labels"]])
        low, high = int(tokens.min()), int(tokens.max())
        vocabulary = int(self._dataset.config.tokenizer.vocab_size)
        if low < 0 or high >= vocabulary:
            raise UserError(
                f"data: sample {index} holds token {low if low < 0 else high}, but the tokenizer has "
                f"{vocabulary} entries; the dataset was written with another one, or is damaged"
            )
        return sample

    def _part(self, sequences: torch.Tensor) -> torch.Tensor:
        return sequence_part(sequences, self._context_rank, self._layout.context)


def sequence_part(sequences: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A context-parallel rank's part: of 2 · ranks equal pieces one from either end, so that causal work is shared.

    As megatron-core's get_batch_on_this_cp_rank, which its rotary embeddings and Transformer Engine expect.

    Args:
        sequences: [b, s].
        rank: context-parallel rank.
        ranks: context-parallel size; 2 · ranks divides s.
    """
    if ranks == 1:
        return sequences
    pieces = sequences.chunk(2 * ranks, dim=1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)
