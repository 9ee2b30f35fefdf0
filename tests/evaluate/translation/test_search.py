"""Beam search beside enumeration of every sequence, and beside a search that is written down sentence by sentence."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from mup_megatron.evaluate.translation.search import Search, search
from mup_megatron.util.errors import UserError

VOCABULARY, BEGIN, END = 4, 3, 0


class Table:
    """Logits that depend on the sentence and its whole prefix, drawn once each; remembers what it was asked."""

    def __init__(self, beams: int, seed: int = 0, scale: float = 2.0) -> None:
        self.beams, self.seed, self.scale = beams, seed, scale
        self.prefixes: list[tuple[int, ...]] = []
        self.calls = 0

    def logits(self, sentence: int, prefix: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, sentence, prefix)) % 2**31)
        return self.scale * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)

    def __call__(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        before = self.prefixes or [()] * len(tokens)
        self.calls += 1
        self.prefixes = [(*before[int(p)], int(t)) for p, t in zip(parents, tokens, strict=True)]
        return torch.stack([self.logits(row // self.beams, prefix) for row, prefix in enumerate(self.prefixes)])


def log_probability(table: Table, sentence: int, labels: tuple[int, ...], max_length: int) -> float:
    """Of labels that end with END; at the greatest length the end is certain to be allowed alone, at its own cost."""
    total = 0.0
    prefix: tuple[int, ...] = (BEGIN,)
    for label in labels:
        logits = table.logits(sentence, prefix).tolist()
        peak = max(logits)
        total += logits[label] - peak - math.log(math.fsum(math.exp(each - peak) for each in logits))
        prefix = (*prefix, label)
    return total


def enumerated(table: Table, sentence: int, max_length: int, penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """Every sequence of at most `max_length` labels, the best first."""
    found = []
    for length in range(1, max_length + 1):
        for inner in itertools.product([t for t in range(VOCABULARY) if t != END], repeat=length - 1):
            total = log_probability(table, sentence, (*inner, END), max_length)
            found.append((total / length**penalty, inner))
    return sorted(found, reverse=True)


def by_hand(table: Table, sentence: int, beams: int, max_length: int, penalty: float) -> tuple[int, ...]:
    """One sentence's search over plain lists."""
    open_: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_length + 1):
        candidates = []
        for prefix, _ in open_:
            for token in range(VOCABULARY):
                if length < max_length or token == END:
                    labels = (*prefix, token)
                    candidates.append((log_probability(table, sentence, labels, max_length), labels))
        candidates = sorted(candidates, reverse=True)[: 2 * beams]
        for total, labels in candidates[:beams]:
            if labels[-1] == END and len(ended) < beams:
                ended.append((total / length**penalty, labels[:-1]))
        if len(ended) == beams:
            break
        open_ = [(labels, total) for total, labels in candidates if labels[-1] != END][:beams]
    return max(ended)[1]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_with_enough_beams_it_is_enumeration(penalty: float) -> None:
    """3 + 9 + 27 + 81 sequences at most are open: 150 beams hold all. The order of all hypotheses is the same."""
    table = Table(150)
    settings = Search(beams=150, length_penalty=penalty, max_length=5)
    for sentence, found in enumerate(search(table, 3, begin=BEGIN, end=END, settings=settings)):
        expected = enumerated(table, sentence, 5, penalty)
        assert len(expected) == 1 + 3 + 9 + 27 + 81
        assert [tuple(hypothesis.tokens) for hypothesis in found] == [tokens for _, tokens in expected]
        assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in expected], rel=1e-12)


@pytest.mark.parametrize("beams", [1, 3, *(pytest.param(beams, marks=pytest.mark.slow) for beams in (2, 5))])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_few_beams_are_a_search_by_hand(beams: int, penalty: float) -> None:
    table = Table(beams)
    found = search(table, 40, begin=BEGIN, end=END, settings=Search(beams=beams, length_penalty=penalty, max_length=6))
    expected = [by_hand(table, sentence, beams, 6, penalty) for sentence in range(40)]
    assert [tuple(each[0].tokens) for each in found] == expected
    if beams < 3:  # and a search that were exact would not pass
        assert expected != [enumerated(table, sentence, 6, penalty)[0][1] for sentence in range(40)]


def test_one_beam_is_greedy() -> None:
    table = Table(1)
    found = search(table, 30, begin=BEGIN, end=END, settings=Search(max_length=6))
    for sentence, (hypothesis,) in enumerate(found):
        tokens: tuple[int, ...] = (BEGIN,)
        while len(tokens) < 6 and (token := int(table.logits(sentence, tokens).argmax())) != END:
            tokens = (*tokens, token)
        assert tuple(hypothesis.tokens) == tokens[1:]
    assert {len(hypothesis.tokens) for (hypothesis,) in found} == set(range(6))


def test_sentences_do_not_touch_each_other() -> None:
    settings = Search(beams=3, max_length=6)
    together = search(Table(3), 10, begin=BEGIN, end=END, settings=settings)
    assert [len(each) for each in together] == [3] * 10
    shorter = search(Table(3), 4, begin=BEGIN, end=END, settings=settings)
    assert shorter == together[:4]


def test_it_ends_when_every_sentence_has_its_hypotheses() -> None:
    class Ending(Table):
        def logits(self, sentence: int, prefix: tuple[int, ...]) -> torch.Tensor:
            return torch.tensor([9.0 if len(prefix) > 2 else -9.0, 0.0, 0.0, 0.0], dtype=torch.float64)

    table = Ending(1)
    (found,) = search(table, 1, begin=BEGIN, end=END, settings=Search(max_length=50))
    assert len(found[0].tokens) == 2
    assert table.calls == 3


def test_a_longer_penalty_prefers_longer_ones() -> None:
    """Ending at once has log-probability -1, three tokens and the end -1.5: over their lengths -1 and -0.375."""
    going = math.log(1 - math.exp(-1.0))  # the first of the three tokens; the other two are certain

    class Two(Table):
        def logits(self, sentence: int, prefix: tuple[int, ...]) -> torch.Tensor:
            stop = {1: -1.0, 4: -1.5 - going}.get(len(prefix), -2000.0)
            go_on = math.log(-math.expm1(stop))
            return torch.tensor([stop, go_on, -900.0, -900.0], dtype=torch.float64)

    for penalty, length in ((0.0, 0), (1.0, 3)):
        settings = Search(beams=2, length_penalty=penalty, max_length=4)
        (found,) = search(Two(2), 1, begin=BEGIN, end=END, settings=settings)
        assert len(found[0].tokens) == length
        assert found[0].log_probability == pytest.approx(-1.5 if length else -1.0)


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(UserError, match="logits are not finite numbers"):
        search(
            lambda tokens, _: torch.full((len(tokens), 4), float("nan")),
            1,
            begin=3,
            end=0,
            settings=Search(max_length=2),
        )


@pytest.mark.parametrize(
    ("values", "option"),
    [({"beams": 0}, "--beams"), ({"length_penalty": -1.0}, "--length-penalty"), ({"max_length": 0}, "--max-length")],
)
def test_numbers_out_of_range(values: dict[str, Any], option: str) -> None:
    with pytest.raises(UserError, match=option):
        Search(**{"max_length": 4, **values})
