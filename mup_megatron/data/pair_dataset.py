"""Pairs as padded samples in an order that depends on seed and step alone, for an encoder-decoder.

Public names: `PairDataset`, `PairDatasetConfig`. A sample has the names of megatron-core's T5MaskedWordPieceDataset.
The decoder begins with the token that ends documents, as fairseq's does, so that a tokenizer needs no further pieces.
What pads a sample is known by its length, never by a token's value.

Shapes: s source length (training.seq_length), t target length (training.decoder_seq_length).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from mup_megatron.data.parts import pairs_that_fit


@dataclass(kw_only=True)
class PairDatasetConfig(BlendedMegatronDatasetConfig):
    """megatron-core's, with what pairs need beside it; `sequence_length` is the encoder's.

    Args:
        sequence_length_decoder: t.
        global_batch_size: samples of a global batch.
    """

    sequence_length_decoder: int
    global_batch_size: int


class PairDataset(MegatronDataset):
    """Samples of one part of the pairs: an epoch is a permutation of its own. Pairs that do not fit are left out.

    Args:
        dataset: pair i is its sequences 2i (source) and 2i + 1 (target), each with the token that ends documents.
        dataset_path: its prefix.
        indices: numbers of the part's pairs.
        num_samples: how many samples there are; None is an epoch.
        index_split: which part it is.
        config: lengths, seed and tokenizer.
    """

    def __init__(
        self,
        dataset: Any,
        dataset_path: str,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: PairDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._lengths = (config.sequence_length, config.sequence_length_decoder)
        self._pairs = indices[pairs_that_fit(dataset.sequence_lengths, *self._lengths)[indices]]
        self._end = int(config.tokenizer.eod)
        self._batch = (-1, 0.0)
        self._epochs: deque[tuple[int, np.ndarray]] = deque(maxlen=2)  # a batch may begin in one and end in the next

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """How many pairs there are, which data.split divides."""
        return len(low_level_dataset.sequence_lengths) // 2

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PairDatasetConfig) -> Any:
        """megatron-core's indexed dataset."""
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    @property
    def pairs(self) -> int:
        """How many pairs of the part fit; the first so many samples are each one of its own."""
        return len(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs) if self.num_samples is None else self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample.

        Returns:
            text_enc: [s] int64, source and end, padded.
            text_dec: [t] int64, begin and target, padded.
            labels: [t] int64, target and end, padded.
            loss_mask: [t] float32, 1 where a label counts.
            enc_mask: [s] bool, True on tokens, False on what pads.
            dec_mask: [t] bool, True on tokens, False on what pads.
            mean_labels: [] float32, labels that count in its global batch over the batch's samples.
        """
        number = self._pair(index)
        source, target = (np.asarray(self.dataset[2 * number + side], dtype=np.int64) for side in (0, 1))
        s, t = self._lengths
        counted = torch.arange(t) < len(target)
        return {
            "text_enc": self._padded(source, s),
            "text_dec": self._padded(np.concatenate([[self._end], target[:-1]]), t),
            "labels": self._padded(target, t),
            "loss_mask": counted.float(),
            "enc_mask": torch.arange(s) < len(source),
            "dec_mask": counted,
            "mean_labels": torch.tensor(self._mean_labels(index)),
        }

    def _mean_labels(self, index: int) -> float:
        """From the index file alone, so that every rank knows it of samples that others read."""
        size = self.config.global_batch_size
        first = index // size * size
        if self._batch[0] != first:
            pairs = np.array([self._pair(each) for each in range(first, first + size)])
            self._batch = first, float(self.dataset.sequence_lengths[2 * pairs + 1].mean())
        return self._batch[1]

    def _pair(self, index: int) -> int:
        epoch, place = divmod(index, len(self._pairs))
        found = next((pairs for number, pairs in self._epochs if number == epoch), None)
        if found is None:
            seed = [self.config.random_seed, self.index_split.value, epoch]
            found = self._pairs[np.random.RandomState(seed).permutation(len(self._pairs))]
            self._epochs.append((epoch, found))
        return int(found[place])

    def _padded(self, tokens: np.ndarray, length: int) -> torch.Tensor:
        padded = torch.full((length,), self._end, dtype=torch.int64)
        padded[: len(tokens)] = torch.from_numpy(tokens)
        return padded
