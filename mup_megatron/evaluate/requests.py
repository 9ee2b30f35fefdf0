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
        tokens: two or more; the last is never fed, but to a model that predicts masked tokens.
        scored: how many of the last tokens are scored, fewer than there are.
        after: how many come behind these; none but where the model sees both directions.
    """

    tokens: Sequence[int]
    scored: int
    after: int = 0


def requests_of(
    kind: str, example: Example, tokenizer: Any, *, window: int, positions: int | None, where: str, masked: bool = False
) -> list[Request]:
    """The requests of an example: one per answer, of a document one per window.

    Args:
        kind: of tasks.KINDS.
        example: the example.
        tokenizer: megatron-core's tokenizer object.
        window: tokens of a document that are fed at once.
        positions: of the model, where it learned them; None where any number can be fed.
        where: the file, for messages.
        masked: whether the model predicts masked tokens: then a text stands between two ends, as in its training.

    Raises:
        UserError: the tokenizer cannot read a text, or it is longer than the model's positions; names the line.
    """
    place = f"{where}, line {example.line}"
    end = int(tokenizer.eod)
    ends = [end] if masked else []
    if kind == "perplexity":
        # Where tokens are masked the last one is fed too, and so is the end behind the text.
        tokens = tokens_of(tokenizer, example.pairs[0][1], place)
        return _windows(tokens, end, window - 2 if masked else window, ends)
    found = [_pair(tokenizer, *pair, place, ends) for pair in example.pairs]
    longest = max(len(request.tokens) - (not masked) for request in found)
    if positions is not None and longest > positions:
        raise UserError(
            f"{place}: {longest} tokens, but the model learned {positions} positions (model.max_position_embeddings); "
            "expected a shorter text"
        )
    return found


def _windows(tokens: Sequence[int], begin: int, window: int, ends: Sequence[int]) -> list[Request]:
    """A document in windows that score each token once; all but the first begin as far back as they can."""
    found = []
    for start in range(0, len(tokens), window):
        end = min(start + window, len(tokens))
        read = [begin, *tokens[:end]] if start == 0 else tokens[end - window - 1 : end]
        after = ends if end == len(tokens) else []
        found.append(Request(tokens=[*read, *after], scored=end - start, after=len(after)))
    return found


def _pair(tokenizer: Any, context: str, continuation: str, place: str, ends: Sequence[int]) -> Request:
    kept = context.rstrip()
    before = tokens_of(tokenizer, kept, place)
    after = tokens_of(tokenizer, context + continuation, place)[len(before) :]
    if not after:
        raise UserError(f"{place}: the tokenizer makes no token of {continuation!r}")
    begun = [*ends, *before] or [int(tokenizer.eod)]
    return Request(tokens=[*begun, *after, *ends], scored=len(after), after=len(ends))


def tokens_of(tokenizer: Any, text: str, place: str) -> list[int]:
    """A text's tokens. Raises UserError where the tokenizer cannot read it; `place` says where the text stands."""
    try:
        return [int(token) for token in tokenizer.tokenize(text)] if text else []
    except Exception as error:  # the libraries raise whatever they like; the null tokenizer reads numbers alone
        raise UserError(f"{place}: the tokenizer cannot read the text ({error})") from None
