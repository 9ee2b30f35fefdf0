"""A T5Model as what beam search asks: the encoder once, then the decoder token by token, with its cache.

Public names: `Decoder`, `translate`.

megatron-core's own T5 inference keeps no cache in either release (inference/model_inference_wrappers/t5: "T5 inference
not yet support kv_cache"): T5Model.forward counts positions from 0 at each call. Here its parts are called instead,
embedding, decoder and head, with megatron-core's StaticInferenceContext in the decoder's self-attention. The encoder's
output is computed once. Cross-attention makes its keys and values of it anew for each token
(model/layers/attention.py).

Shapes: n sentences, k beams, s source length, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mup_megatron.data.t5 import pair_masks
from mup_megatron.evaluate.translation.search import Search, search
from mup_megatron.parallel.upstream import inference_mode

if TYPE_CHECKING:
    from megatron.core.models.T5 import T5Model


class Decoder:
    """Sequences of some sentences on their way through the decoder; see search.Next.

    Args:
        model: this rank's part, in evaluation mode; tensor-parallel ranks call it together.
        sources: tokens of each sentence with their end.
        beams: k, sequences of each sentence.
        length: the most tokens that will be fed to each.
        vocabulary: entries of the tokenizer; what pads the vocabulary is never chosen.

    Raises:
        ValueError: the model is in training mode, in which upstream ignores the cache in part.
    """

    def __init__(
        self, model: T5Model, sources: Sequence[Sequence[int]], *, beams: int, length: int, vocabulary: int
    ) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        if model.training:
            raise ValueError("expected a model in evaluation mode")
        self._model, self._vocabulary = model, vocabulary
        self._device = next(model.parameters()).device
        tokens, present = padded(sources)
        tokens, present = tokens.to(self._device), present.to(self._device)
        masks = pair_masks(present, 1)
        with torch.no_grad():
            hidden = model(tokens, None, masks[0], None, None, output_encoder_hidden_only=True)
        self._hidden = hidden.repeat_interleave(beams, dim=1)  # [s, n · k, h]
        self._mask = masks[2].repeat_interleave(beams, dim=0)  # [n · k, 1, 1, s]
        rows = len(sources) * beams
        self._context = StaticInferenceContext(max_batch_size=rows, max_sequence_length=length)

    # Not inference_mode: megatron-core's global memory buffer outlives the call, and training could not use it then.
    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Logits after each sequence's next token: [n · k, v] float32; see search.Next."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        model, context = self._model, self._context
        if context.sequence_len_offset:
            context.swap_key_value_dict(parents.to(self._device))
        tokens = tokens.to(self._device)[:, None]
        embedded = model.embedding(tokens, torch.full_like(tokens, context.sequence_len_offset))
        with inference_mode():
            hidden = model.decoder(
                hidden_states=embedded,
                # Every position that is cached is seen. On a CPU upstream cannot make a mask itself.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self._device),
                context=self._hidden,
                context_mask=self._mask,
                inference_context=context,
                rotary_pos_emb=self._rotary(),
                attention_bias=self._position_bias(),
            )
        context.increment_sequence_len_offset(1)
        context.enable_decode_mode()
        tied = model.share_embeddings_and_output_weights
        logits = model.lm_head(hidden, model.shared_embedding_or_output_weight() if tied else None)
        return gather_from_tensor_model_parallel_region(logits)[0, :, : self._vocabulary].float()

    def _rotary(self) -> Any:
        if self._model.position_embedding_type != "rope":
            return None
        return self._model.rotary_pos_emb(self._context.max_sequence_length)

    def _position_bias(self) -> torch.Tensor | None:
        """Of relative positions, the new token's row [1, heads of this rank, 1, cached tokens and itself]."""
        from megatron.core.tensor_parallel import scatter_to_tensor_model_parallel_region

        if self._model.position_embedding_type != "relative":
            return None
        keys = self._context.sequence_len_offset + 1
        row = self._model.decoder_relative_pos_emb(keys, keys)[:, :, -1:]
        return scatter_to_tensor_model_parallel_region(row.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of different lengths as one tensor [n, s] int64, padded with their own last token; True on tokens."""
    size = max(map(len, sequences))
    tokens = torch.tensor([[*sequence, *[sequence[-1]] * (size - len(sequence))] for sequence in sequences])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return tokens, torch.arange(size) < lengths[:, None]


def translate(
    model: T5Model,
    sources: Sequence[Sequence[int]],
    tokenizer: Any,
    settings: Search,
    batch_size: int,
    say: Callable[[int], None] = lambda _count: None,
) -> list[list[int]]:
    """The best translation of each sentence, as tokens without the end. Tensor-parallel ranks call it together.

    Args:
        model: as for `Decoder`.
        sources: tokens of each sentence with their end.
        tokenizer: megatron-core's tokenizer object.
        settings: how to search.
        batch_size: sentences at once.
        say: takes how many are done.

    Raises:
        UserError: logits are no numbers.
    """
    end, vocabulary = int(tokenizer.eod), int(tokenizer.vocab_size)
    order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        batch = [sources[number] for number in numbers]
        decoder = Decoder(model, batch, beams=settings.beams, length=settings.max_length, vocabulary=vocabulary)
        best = search(decoder, len(batch), begin=end, end=end, settings=settings)
        found.update((number, each[0].tokens) for number, each in zip(numbers, best, strict=True))
        say(len(found))
    return [found[number] for number in range(len(sources))]
