"""BLEU by sacrebleu. Public names: `bleu`, `Bleu`, `check_installed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mup_megatron.util.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Bleu:
    """What sacrebleu says of a corpus.

    Args:
        score: BLEU, 0 to 100.
        brevity_penalty: its factor for translations that are shorter than the references.
        length_ratio: words of the translations over words of the references.
        signature: how it was computed (case, tokenizer, smoothing, version), to be quoted with the score.
    """

    score: float
    brevity_penalty: float
    length_ratio: float
    signature: str


def check_installed() -> None:
    """Asked before the work begins. Raises UserError where sacrebleu is not installed."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise UserError(f"BLEU needs sacrebleu ({error}); expected: pip install 'mup-megatron[bleu]'") from None


def bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of a corpus, with sacrebleu's defaults: mixed case, its tokenizer 13a, exponential smoothing.

    Args:
        translations: by the model, plain text.
        references: what they should be, one each.

    Raises:
        UserError: sacrebleu is not installed.
    """
    check_installed()
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    found = metric.corpus_score(list(translations), [list(references)])
    return Bleu(
        score=found.score, brevity_penalty=found.bp, length_ratio=found.ratio, signature=str(metric.get_signature())
    )
