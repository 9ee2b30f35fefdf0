"""Figures by hand: perplexities, accuracies, windows, and what the tokenizer makes of a pair of texts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mup_megatron.evaluate.requests import requests_of
from mup_megatron.evaluate.scores import Answer, choices, last_word, perplexity
from mup_megatron.evaluate.tasks import Example
from mup_megatron.util.errors import UserError


def answer(log_likelihood: float, tokens: int = 1, *, greedy: bool = False) -> Answer:
    return Answer(log_likelihood=log_likelihood, tokens=tokens, greedy=greedy)


def test_three_denominators() -> None:
    """-12 ln 2 over 6 tokens, 3 words, 24 bytes: 2 bits a token, 4 a word, 1/2 a byte."""
    found = perplexity(-12 * math.log(2), 6, 3, 24)
    assert found["token_perplexity"] == pytest.approx(4.0)
    assert found["word_perplexity"] == pytest.approx(16.0)
    assert found["byte_perplexity"] == pytest.approx(math.sqrt(2))
    assert found["bits_per_byte"] == pytest.approx(0.5)


def test_nothing_to_count_and_too_much() -> None:
    assert perplexity(0.0, 0, 0, 0)["token_perplexity"] is None
    found = perplexity(-1000.0, 100, 1, 100)  # a text without white space is one word
    assert found["word_perplexity"] is None
    assert found["token_perplexity"] == pytest.approx(math.exp(10))


def test_last_words() -> None:
    """Two of four; sqrt(1/2 · 1/2 / 3). Perplexity per word, however many tokens it has: exp(8 / 4)."""
    found = last_word([answer(-1, greedy=True), answer(-4, 3), answer(-2, 2, greedy=True), answer(-1)])
    assert found == {
        "accuracy": 0.5,
        "accuracy_error": pytest.approx(math.sqrt(1 / 12)),
        "word_perplexity": pytest.approx(math.exp(2)),
    }
    assert last_word([answer(-1, greedy=True)])["accuracy_error"] is None


def test_choices() -> None:
    """Three answers of -6, -7, -9. Characters 2, 7, 6: -3, -1, -1.5. Tokens 2, 2, 9: -3, -3.5, -1."""
    answers = [answer(-6, 2), answer(-7, 2), answer(-9, 9)]
    texts = ["ab", "abcdefg", "abcdef"]
    for label, right in enumerate(("accuracy", "accuracy_per_character", "accuracy_per_token")):
        found = choices([(answers, texts, label)])
        assert {name for name, value in found.items() if value == 1.0} == {right}
    shares = choices([(answers, texts, 0), (answers, texts, 0), (answers, texts, 1)])
    assert shares["accuracy"] == pytest.approx(2 / 3)
    assert shares["accuracy_error"] == pytest.approx(math.sqrt(2 / 9 / 2))


def test_of_equal_answers_the_first_counts() -> None:
    assert choices([([answer(-2), answer(-2)], ["a", "b"], 1)])["accuracy"] == 0.0


# --- tokens: words of up to two signs, a space before them included ---


class Pairs:
    """A token is two signs, the last may be one; 99 ends a document."""

    eod = 99

    def tokenize(self, text: str) -> list[int]:
        return [sum(map(ord, text[start : start + 2])) for start in range(0, len(text), 2)]


def requests(kind: str, *pairs: tuple[str, str], tokenizer: Any = None, **given: Any) -> list[tuple[list[int], int]]:
    example = Example(line=7, pairs=pairs)
    asked = {"window": 4, "positions": None, "where": "file.jsonl", **given}
    found = requests_of(kind, example, tokenizer or NUMBERS, **asked)
    return [(list(request.tokens), request.scored) for request in found]


NUMBERS = SimpleNamespace(eod=99, tokenize=lambda text: [int(word) for word in text.split()])


def test_windows_score_each_token_once() -> None:
    """Window 4: the first begins after the end of a document, the last as far back as it can."""
    ten = " ".join(map(str, range(10)))
    assert requests("perplexity", ("", ten)) == [
        ([99, 0, 1, 2, 3], 4),
        ([3, 4, 5, 6, 7], 4),
        ([5, 6, 7, 8, 9], 2),
    ]
    assert requests("perplexity", ("", "1 2 3 4")) == [([99, 1, 2, 3, 4], 4)]
    assert requests("perplexity", ("", "1 2")) == [([99, 1, 2], 2)]
    assert requests("perplexity", ("", " ")) == []


@pytest.mark.parametrize("size", range(1, 14))
def test_no_token_is_lost_or_counted_twice(size: int) -> None:
    found = requests("perplexity", ("", " ".join(map(str, range(size)))))
    assert [token for tokens, scored in found for token in tokens[-scored:]] == list(range(size))
    assert all(len(tokens) <= 5 for tokens, _ in found)


def test_a_continuation_begins_where_the_context_ends() -> None:
    assert requests("choice", ("1 2", " 3 4"), ("1 2", " 5")) == [([1, 2, 3, 4], 2), ([1, 2, 5], 1)]
    assert requests("choice", ("", "3 4")) == [([99, 3, 4], 2)]


def test_spaces_between_belong_to_the_continuation() -> None:
    """`ab c` is the tokens `ab`, ` c`; the context `ab ` would have been `ab`, ` `."""
    expected = [ord("a") + ord("b"), ord(" ") + ord("c")]
    assert requests("choice", ("ab ", "c"), tokenizer=Pairs()) == [(expected, 1)]
    assert requests("choice", ("ab", " c"), tokenizer=Pairs()) == [(expected, 1)]


def test_longer_than_the_positions() -> None:
    """Six tokens, of which five are fed."""
    assert len(requests("choice", ("1 2 3", " 4 5 6"), positions=5)) == 1
    message = r"file\.jsonl, line 7: 5 tokens, but the model learned 4 positions \(model\.max_position_embeddings\)"
    with pytest.raises(UserError, match=message):
        requests("choice", ("1", " 2"), ("1 2 3", " 4 5 6"), positions=4)


def test_text_that_the_tokenizer_cannot_read() -> None:
    with pytest.raises(UserError, match=r"file\.jsonl, line 7: the tokenizer cannot read the text \(invalid literal"):
        requests("perplexity", ("", "one"))
    with pytest.raises(UserError, match=r"line 7: the tokenizer makes no token of ' '"):
        requests("choice", ("1", " "))
