"""Examples as tokens: what the model reads, and which of it is scored.

Public names: `Request`, `requests_of`, `tokens_of`.

Text becomes tokens as lm-evaluation-harness makes them (EleutherAI's `lm_eval`, api/model.py), so that its numbers on
an exported checkpoint and these are the same: context and continuation are tokenized together, spaces between them
belong to the continuation, and a document is read in windows that score every token once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mup_megatron.evaluate.tasks import Example
from mup_megatron.util.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence whose last tokens are scored, each after all that come before it.

    Args:
        tokens: two or more; the last is never fed.
        scored: how many of the last tokens are scored, fewer than there are.
    """

    tokens: Sequence[int]
    scored: int


def requests_of(
    kind: str, example: Example, tokenizer: Any, *, window: int, positions: int | None, where: str
) -> list[Request]:
    """The requests of an example: one per answer, of a document one per window.

    Args:
        kind: of tasks.KINDS.
        example: the example.
        tokenizer: megatron-core's tokenizer object.
        window: tokens of a document that are fed at once.
        positions: of the model, where it learned them; None where any number can be fed.
        where: the file, for messages.

    Raises:
        UserError: the tokenizer cannot read a text, or it is longer than the model's positions; names the line.
    """
    place = f"{where}, line {example.line}"
    if kind == "perplexity":
        return _windows(tokens_of(tokenizer, example.pairs[0][1], place), int(tokenizer.eod), window)
    found = [_pair(tokenizer, *pair, place) for pair in example.pairs]
    longest = max(len(request.tokens) - 1 for request in found)
    if positions is not None and longest > positions:
        raise UserError(
            f"{place}: {longest} tokens, but the model learned {positions} positions (model.max_position_embeddings); "
            "expected a shorter text"
        )
    return found


def _windows(tokens: Sequence[int], begin: int, window: int) -> list[Request]:
    """A document in windows that score each token once; all but the first begin as far back as they can."""
    found = []
    for start in range(0, len(tokens), window):
        end = min(start + window, len(tokens))
        read = [begin, *tokens[:end]] if start == 0 else tokens[end - window - 1 : end]
        found.append(Request(tokens=read, scored=end - start))
    return found


def _pair(tokenizer: Any, context: str, continuation: str, place: str) -> Request:
    kept = context.rstrip()
    before = tokens_of(tokenizer, kept, place)
    after = tokens_of(tokenizer, context + continuation, place)[len(before) :]
    if not after:
        raise UserError(f"{place}: the tokenizer makes no token of {continuation!r}")
    return Request(tokens=[*(before or [int(tokenizer.eod)]), *after], scored=len(after))


def tokens_of(tokenizer: Any, text: str, place: str) -> list[int]:
    """A text's tokens. Raises UserError where the tokenizer cannot read it; `place` says where the text stands."""
    try:
        return [int(token) for token in tokenizer.tokenize(text)] if text else []
    except Exception as error:  # the libraries raise whatever they like; the null tokenizer reads numbers alone
        raise UserError(f"{place}: the tokenizer cannot read the text ({error})") from None
