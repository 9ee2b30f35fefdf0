"""Data of an encoder-decoder: pairs of source and target.

Public names: `dataset`, `maker`, `T5Batch`, `pair_masks`.

Shapes: b micro-batch size, s source length (training.seq_length), t target length (training.decoder_seq_length).
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
class T5Batch(Batch):
    """One micro-batch on a device; masks are True where attention is masked.

    Args:
        encoder_tokens: [b, s] int64.
        decoder_tokens: [b, t] int64, the target after the begin token.
        labels: [b, t] int64, the target and its end.
        loss_mask: [b, t] float32.
        encoder_mask: [b, 1, s, s] bool.
        decoder_mask: [1, 1, t, t] bool, causal.
        cross_mask: [b, 1, t, s] bool, of the decoder over the encoder.
        mean_labels: [] float32, labels that count in the global batch over its samples.
    """

    encoder_tokens: torch.Tensor
    decoder_tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    encoder_mask: torch.Tensor
    decoder_mask: torch.Tensor
    cross_mask: torch.Tensor
    mean_labels: torch.Tensor

    def forward(self, model: Any) -> Any:
        """Losses of the labels, [b, t]; see Batch.forward."""
        masks = (self.encoder_mask, self.decoder_mask, self.cross_mask)
        return model(self.encoder_tokens, self.decoder_tokens, *masks, lm_labels=self.labels)

    def loss(self, output: Any) -> torch.Tensor:
        """This micro-batch's part of the mean over the global batch's labels.

        Targets differ in length. The mean of these over micro-batches and replicas is the mean over all labels of the
        global batch, whatever the layout; a mean over this micro-batch's own labels would not be.
        """
        return (output.float() * self.loss_mask).sum() / (len(self.labels) * self.mean_labels)


def dataset(config: Config, common: Mapping[str, Any]) -> tuple[type, Any]:
    """PairDataset; see Family.dataset."""
    from mup_megatron.data.pair_dataset import PairDataset, PairDatasetConfig

    return PairDataset, PairDatasetConfig(
        **common,
        sequence_length_decoder=config.training.decoder_length,
        global_batch_size=config.training.global_batch_size,
    )


class T5Maker:
    """Makes micro-batches; see BatchMaker. Every tensor-parallel rank and pipeline stage has the same."""

    def __init__(self, _config: Config, _layout: Layout, _rank: int, device: torch.device) -> None:
        self._device = device

    def tokens(self, sample: Sample) -> torch.Tensor:
        """Tokens of both sides, and labels."""
        return torch.cat([sample["text_enc"], sample["text_dec"], sample["labels"]])

    def batch(self, samples: Sequence[Sample]) -> T5Batch:
        """One micro-batch of the dataset's samples."""
        stacked = {name: sent(torch.stack([sample[name] for sample in samples]), self._device) for name in samples[0]}
        encoder, decoder, cross = pair_masks(stacked["enc_mask"], stacked["labels"].shape[1])
        return T5Batch(
            encoder_tokens=stacked["text_enc"],
            decoder_tokens=stacked["text_dec"],
            labels=stacked["labels"],
            loss_mask=stacked["loss_mask"],
            encoder_mask=encoder,
            decoder_mask=decoder,
            cross_mask=cross,
            mean_labels=stacked["mean_labels"][0],
        )


maker = T5Maker


def pair_masks(enc_mask: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention masks as megatron-core's T5Model takes them, True where attention is masked.

    Queries that pad see what tokens see: no row is masked as a whole, so that a softmax is over something. What pads
    the decoder comes last, where the causal mask hides it from every token.

    Args:
        enc_mask: [b, s] bool, True on tokens.
        length: t, of the decoder.

    Returns:
        Of the encoder [b, 1, s, s], of the decoder [1, 1, t, t], of the decoder over the encoder [b, 1, t, s].
    """
    batch, source = enc_mask.shape
    pads = ~enc_mask[:, None, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=enc_mask.device).triu(1)[None, None]
    return pads.expand(batch, 1, source, source), causal, pads.expand(batch, 1, length, source)
