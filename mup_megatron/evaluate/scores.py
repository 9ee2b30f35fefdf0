"""Log-probabilities to figures: perplexities, accuracies. Numbers in, numbers out.

Public names: `perplexity`, `last_word`, `choices`, `Answer`, `DIVERGED`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Metrics = dict[str, float | int | None]

DIVERGED = "the model's logits are not finite numbers; the checkpoint is of a run that diverged"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How likely a continuation is.

    Args:
        log_likelihood: of all its tokens together, natural logarithm.
        tokens: how many these are.
        greedy: whether each of them is the most likely one after those before it.
    """

    log_likelihood: float
    tokens: int
    greedy: bool


def perplexity(log_likelihood: float, tokens: int, words: int, size: int) -> Metrics:
    """Of a corpus, per token, per word and per byte: exp(-log-likelihood / how many there are).

    Args:
        log_likelihood: of all its tokens together, natural logarithm.
        tokens: how many were scored.
        words: parts of the text between white space.
        size: bytes of the text in UTF-8.

    Returns:
        A number is None where it would overflow, or where nothing is counted.
    """
    return {
        "tokens": tokens,
        "words": words,
        "bytes": size,
        "log_likelihood": log_likelihood,
        "token_perplexity": _perplexity(log_likelihood, tokens),
        "word_perplexity": _perplexity(log_likelihood, words),
        "byte_perplexity": _perplexity(log_likelihood, size),
        "bits_per_byte": -log_likelihood / size / math.log(2) if size else None,
    }


def last_word(answers: Sequence[Answer]) -> Metrics:
    """The share of words all of whose tokens are the most likely ones, and the perplexity per word.

    Args:
        answers: the word of each example.
    """
    total = math.fsum(answer.log_likelihood for answer in answers)
    return {
        **_accuracy("accuracy", [answer.greedy for answer in answers]),
        "word_perplexity": _perplexity(total, len(answers)),
    }


def choices(examples: Sequence[tuple[Sequence[Answer], Sequence[str], int]]) -> Metrics:
    """The share of examples whose right answer is the most likely one: as it is, per character, per token.

    Args:
        examples: answers, their texts, and which of them is right. Of equal ones the first counts.
    """
    plain, by_character, by_token = [], [], []
    for answers, texts, label in examples:
        scores = [answer.log_likelihood for answer in answers]
        plain.append(_best(scores) == label)
        by_character.append(_best([score / len(text) for score, text in zip(scores, texts, strict=True)]) == label)
        by_token.append(_best([answer.log_likelihood / answer.tokens for answer in answers]) == label)
    return {
        **_accuracy("accuracy", plain),
        **_accuracy("accuracy_per_character", by_character),
        **_accuracy("accuracy_per_token", by_token),
    }


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _accuracy(name: str, right: Sequence[bool]) -> Metrics:
    """A share with its standard error, which one example does not have."""
    count = len(right)
    share = sum(right) / count
    error = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return {name: share, f"{name}_error": error}


def _perplexity(log_likelihood: float, count: int) -> float | None:
    if not count or -log_likelihood / count > 700:
        return None
    return math.exp(-log_likelihood / count)
