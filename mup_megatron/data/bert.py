"""Data of models that predict masked tokens: megatron-core's GPTDataset, masked (masked.py).

Public names: `dataset`, `maker`, `BertBatch`, `BertMaker`.

Shapes: b micro-batch size, s sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.data import gpt
from mup_megatron.data.batch import Batch, Sample, sent
from mup_megatron.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    """One micro-batch on a device.

    Args:
        tokens: [b, s] int64, some of them masked.
        labels: [b, s] int64, the tokens before they were masked.
        loss_mask: [b, s] float32, 1 where a token is to be predicted.
        attention_mask: [b, s] int64, 0 where a position is padding, which no position attends to.
        types: [b, s] int64, 0 in the first segment and 1 in the second; None without next-sentence prediction.
        is_random: [b] int64, 1 where the second segment does not follow the first; None without that.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor
    types: torch.Tensor | None = None
    is_random: torch.Tensor | None = None

    def forward(self, model: Any) -> Any:
        """Losses of all tokens [b, s] and logits of the binary head [b, 2] or None; see Batch.forward."""
        return model(self.tokens, self.attention_mask, tokentype_ids=self.types, lm_labels=self.labels)

    def loss(self, output: Any) -> torch.Tensor:
        """Mean over the masked tokens, and the mean loss of the binary head on top; see Batch.loss."""
        losses, logits = output
        loss = (losses.float() * self.loss_mask).sum() / self.loss_mask.sum()
        if self.is_random is not None:
            loss = loss + torch.nn.functional.cross_entropy(logits.float(), self.is_random)
        return loss


def dataset(config: Config, common: Mapping[str, Any]) -> tuple[type, Any]:
    """GPTDataset with masked tokens, in pairs of segments with a binary head; see Family.dataset."""
    from mup_megatron.data.masked import MaskedDataset, PairedDataset  # which import megatron-core

    _, settings = gpt.dataset(config, common)
    return PairedDataset if config.model.bert_binary_head else MaskedDataset, settings


class BertMaker:
    """Makes this rank's micro-batches; see BatchMaker."""

    def __init__(self, _config: Config, _layout: Layout, _rank: int, device: torch.device) -> None:
        self._device = device

    def tokens(self, sample: Sample) -> torch.Tensor:
        """The tokens of a sample as they were before they were masked."""
        return sample["labels"]

    def batch(self, samples: Sequence[Sample]) -> BertBatch:
        """One micro-batch. Sequences are whole, so nothing is padding."""
        stacked = {
            name: sent(torch.stack([sample[name] for sample in samples]), self._device)
            for name in ("tokens", "labels", "loss_mask", "types", "is_random")
            if name in samples[0]
        }
        return BertBatch(attention_mask=torch.ones_like(stacked["tokens"]), **stacked)


maker = BertMaker
