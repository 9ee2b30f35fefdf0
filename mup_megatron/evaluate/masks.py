"""Masks of a text filled by a model that predicts masked tokens: `mup-megatron generate CHECKPOINT "a [MASK] b"`.

Public names: `fill`, `masked_tokens`, `Filled`, `Candidate`. Each mask is one token, and each is predicted with all
others still masked, as in training (arXiv 1810.04805, section 3.1). Spaces before a mask are the masked token's own:
where words carry the space before them, as SentencePiece's do, training has masked it with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mup_megatron.data.tokenizer import MASK
from mup_megatron.evaluate.generate import Reader
from mup_megatron.evaluate.requests import tokens_of
from mup_megatron.evaluate.scores import DIVERGED
from mup_megatron.parallel.upstream import inference_mode
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from mup_megatron.model.architectures.bert import BertModel

CANDIDATES = 5
"""How many tokens are named for each mask unless told."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What may stand in a mask's place.

    Args:
        id: of the token.
        text: of the token, with the space before it where it has one.
        probability: among the tokenizer's entries.
    """

    id: int
    text: str
    probability: float


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A text whose masks are filled.

    Args:
        text: with the likeliest token in each place.
        masks: the candidates of each mask, the likeliest first.
    """

    text: str
    masks: Sequence[Sequence[Candidate]]


def masked_tokens(tokenizer: Any, text: str, name: str) -> list[int]:
    """The tokens of a text with masks, as a document: between two ends.

    Args:
        tokenizer: megatron-core's tokenizer object; the mask is the entry after its last.
        text: with MASK in each place that is to be filled.
        name: of the text, for the message.

    Raises:
        UserError: the text has no mask, or the tokenizer cannot read it.
    """
    if MASK not in text:
        raise UserError(f"{name}: expected {MASK} in each place that is to be filled")
    end, mask = int(tokenizer.eod), int(tokenizer.vocab_size)
    parts = text.split(MASK)
    found = [end]
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        found += [*tokens_of(tokenizer, part if last else part.rstrip(" "), name), end if last else mask]
    return found


# Not inference_mode: megatron-core's global memory buffer outlives the call, and training could not use it then.
@torch.no_grad()
def fill(model: BertModel, tokenizer: Any, text: str, *, candidates: int = CANDIDATES) -> Filled:
    """Fills the masks of a text.

    Args:
        model: whole, on one rank, in evaluation mode.
        tokenizer: megatron-core's tokenizer object, of the same checkpoint.
        text: with MASK in each place that is to be filled.
        candidates: tokens that are named for each mask.

    Raises:
        UserError: as `masked_tokens`; the text is longer than the model's positions; the logits are not numbers.
    """
    tokens = masked_tokens(tokenizer, text, "PROMPT")
    positions = model.max_sequence_length
    if model.position_embedding_type == "learned_absolute" and len(tokens) > positions:
        raise UserError(
            f"PROMPT: {len(tokens)} tokens with both ends, but the model learned {positions} positions "
            "(model.max_position_embeddings); expected a shorter text"
        )
    vocabulary = int(tokenizer.vocab_size)
    fed = torch.tensor([tokens], device=next(model.parameters()).device)
    types = torch.zeros_like(fed) if model.add_binary_head else None
    with inference_mode():
        logits, _ = model(fed, torch.ones_like(fed), tokentype_ids=types)
    places = [place for place, token in enumerate(tokens) if token == vocabulary]
    # Neither the mask nor what pads the vocabulary can stand in a text.
    probabilities = logits[0, places, :vocabulary].to("cpu", torch.float64).softmax(-1)
    if not probabilities.isfinite().all():
        raise UserError(DIVERGED)
    best = probabilities.sort(descending=True, stable=True)
    filled = list(tokens)
    for row, place in enumerate(places):
        filled[place] = int(best.indices[row, 0])
    masks = []
    for row, place in enumerate(places):
        entries = zip(best.indices[row, :candidates].tolist(), best.values[row, :candidates].tolist(), strict=True)
        before = filled[1:place]
        masks.append([Candidate(id=i, text=_shown(tokenizer, before, i), probability=p) for i, p in entries])
    return Filled(text=str(tokenizer.detokenize(filled[1:-1])), masks=masks)


def _shown(tokenizer: Any, before: Sequence[int], token: int) -> str:
    return Reader(tokenizer, before).read([token], last=True)
