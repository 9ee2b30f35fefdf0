"""Beam search over a function that says what may come next. Public names: `Search`, `Next`, `search`.

A hypothesis is a sequence of tokens that ends with the end token. Its score is the sum of its log-probabilities over
its length, end included, to the power of the length penalty, as in fairseq. The search keeps the most probable open
sequences of each sentence. An end token among the best candidates closes a hypothesis. A sentence is done with as many
hypotheses as beams. At the greatest length nothing but the end token is allowed. One beam is greedy decoding.

Shapes: n sentences, k beams, v entries of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mup_megatron.evaluate.scores import DIVERGED
from mup_megatron.util.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Search:
    """How hypotheses are looked for.

    Args:
        beams: open sequences of a sentence.
        length_penalty: power of the length that a hypothesis's log-probability is divided by; 0 prefers short ones.
        max_length: tokens of a hypothesis, end included.

    Raises:
        UserError: a number out of its range.
    """

    beams: int = 1
    length_penalty: float = 1.0
    max_length: int

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise UserError(f"--beams: expected a whole number > 0, found {self.beams}")
        if not 0 <= self.length_penalty < float("inf"):
            raise UserError(f"--length-penalty: expected a number >= 0, found {self.length_penalty}")
        if self.max_length < 1:
            raise UserError(f"--max-length: expected a whole number > 0, found {self.max_length}")


class Next(Protocol):
    """What may come next after each open sequence."""

    def __call__(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Logits after the last token of each sequence: [n · k, v], of the entries that may be chosen.

        Args:
            tokens: [n · k] int64, the last token of each.
            parents: [n · k] int64, which sequence of the call before each of them goes on from; in the first call
                itself.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A sequence that ended.

    Args:
        tokens: without the end.
        log_probability: of all of them and the end, natural logarithm.
        score: what hypotheses are compared by.
    """

    tokens: list[int]
    log_probability: float
    score: float


@torch.no_grad()
def search(following: Next, sentences: int, *, begin: int, end: int, settings: Search) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, the best first.

    Args:
        following: what may come next; called once per token, with all sentences' sequences.
        sentences: n.
        begin: the token that every sequence begins with, and no hypothesis holds.
        end: the token that ends one.
        settings: how to search.

    Raises:
        UserError: logits are no numbers.
    """
    k = settings.beams
    found: list[list[Hypothesis]] = [[] for _ in range(sentences)]
    tokens = torch.full((sentences, k, 0), 0)
    last, parents = torch.full((sentences * k,), begin), torch.arange(sentences * k)
    totals = torch.full((sentences, k), float("-inf"), dtype=torch.float64)
    totals[:, 0] = 0.0  # at first all sequences of a sentence are the same
    for length in range(1, settings.max_length + 1):
        logits = following(last, parents).detach().to("cpu", torch.float64)
        if not logits.isfinite().all():
            raise UserError(DIVERGED)
        likely = logits.log_softmax(-1).view(sentences, k, -1)
        if length == settings.max_length:
            likely[..., torch.arange(likely.shape[-1]) != end] = float("-inf")
        values, rows, ids = _candidates(totals, likely, k)
        for sentence in range(sentences):
            _close(found[sentence], tokens[sentence], values[sentence], rows[sentence], ids[sentence], end, settings)
        if length == settings.max_length or all(len(each) >= k for each in found):
            break
        values = values.masked_fill(ids == end, float("-inf"))
        totals, order = values.topk(k)
        rows, ids = rows.gather(1, order), ids.gather(1, order)
        tokens = torch.cat([tokens.gather(1, rows[..., None].expand(-1, -1, tokens.shape[-1])), ids[..., None]], dim=-1)
        last, parents = ids.flatten(), (rows + k * torch.arange(sentences)[:, None]).flatten()
    return [sorted(each, key=lambda hypothesis: -hypothesis.score) for each in found]


def _candidates(totals: torch.Tensor, likely: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best 2k continuations of each sentence, so that k of them go on where k end: values, sequences, tokens."""
    vocabulary = likely.shape[-1]
    every = (totals[..., None] + likely).flatten(1)
    values, places = every.topk(min(2 * k, every.shape[1]))
    return values, places // vocabulary, places % vocabulary


def _close(
    found: list[Hypothesis],
    tokens: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    end: int,
    settings: Search,
) -> None:
    """Adds what ends among a sentence's best k candidates, until it has k hypotheses."""
    length = tokens.shape[-1] + 1
    for value, row, token in list(zip(values.tolist(), rows.tolist(), ids.tolist(), strict=True))[: settings.beams]:
        if token == end and value > float("-inf") and len(found) < settings.beams:
            score = value / length**settings.length_penalty
            found.append(Hypothesis(tokens=tokens[row].tolist(), log_probability=value, score=score))
