"""BLEU: one sentence by hand, the signature, and what is said where sacrebleu is missing."""

from __future__ import annotations

import sys

import pytest

from mup_megatron.evaluate.translation.bleu import bleu
from mup_megatron.util.errors import UserError


def test_by_hand() -> None:
    """Of 6, 5, 4 and 3 n-grams 5 (the second "the" is one too many), 3, 2 and 1 are in the reference; no penalty."""
    found = bleu(["the cat sat on the mat"], ["the cat sat on a mat"])
    assert found.score == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert (found.brevity_penalty, found.length_ratio) == (1.0, 1.0)
    assert found.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_a_corpus_is_no_mean_of_sentences() -> None:
    """N-grams are counted over all sentences: 8 of 8, 6 of 6, 4 of 4, 2 of 2; exp(1 - 9/8) for a word that lacks."""
    found = bleu(["a b c d", "e f g h"], ["a b c d", "e f g h i"])
    assert found.score == pytest.approx(100 * 2.718281828459045 ** (1 - 9 / 8))
    assert found.length_ratio == pytest.approx(8 / 9)


def test_without_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"BLEU needs sacrebleu .*; expected: pip install 'mup-megatron\[bleu\]'"):
        bleu(["a"], ["a"])
