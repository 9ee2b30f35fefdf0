"""Data of models that predict the next token: megatron-core's GPTDataset.

Public names: `dataset`, `maker`, `GPTBatch`, `GPTMaker`, `sequence_part`.

Shapes: b micro-batch size, s sequence length, under context parallelism this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.data.batch import Batch, Sample, sent
from mup_megatron.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class GPTBatch(Batch):
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

    def forward(self, model: Any) -> Any:
        """Losses of the tokens, [b, s]; see Batch.forward."""
        return model(self.tokens, self.position_ids, self.attention_mask, labels=self.labels)

    def loss(self, output: Any) -> torch.Tensor:
        """Mean over the tokens that count; see Batch.loss."""
        return (output.float() * self.loss_mask).sum() / self.loss_mask.sum()


def dataset(_config: Config, common: Mapping[str, Any]) -> tuple[type, Any]:
    """GPTDataset; see Family.dataset."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    return GPTDataset, GPTDatasetConfig(
        **common,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


class GPTMaker:
    """Makes this rank's micro-batches; see BatchMaker."""

    def __init__(self, config: Config, layout: Layout, rank: int, device: torch.device) -> None:
        self._rank, self._ranks, self._device = layout.context_rank(rank), layout.context, device
        size = config.training.seq_length
        self._attention_mask = (
            torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None] if self._ranks == 1 else None
        )

    def tokens(self, sample: Sample) -> torch.Tensor:
        """Tokens and labels of a sample."""
        return torch.stack([sample["tokens"], sample["labels"]])

    def batch(self, samples: Sequence[Sample]) -> GPTBatch:
        """One micro-batch of the dataset's samples."""
        stacked = {
            name: sent(self._part(torch.stack([sample[name] for sample in samples])), self._device)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        return GPTBatch(attention_mask=self._attention_mask, **stacked)

    def of(self, tokens: torch.Tensor) -> GPTBatch:
        """This rank's part of whole sequences that are not the dataset's: [b, s] int64. Their loss means nothing."""
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        tokens, positions = (self._part(each).contiguous().to(self._device) for each in (tokens, positions))
        return GPTBatch(
            tokens=tokens,
            labels=tokens,
            loss_mask=torch.ones_like(tokens, dtype=torch.float32),
            position_ids=positions,
            attention_mask=self._attention_mask,
        )

    def _part(self, sequences: torch.Tensor) -> torch.Tensor:
        return sequence_part(sequences, self._rank, self._ranks)


maker = GPTMaker


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
