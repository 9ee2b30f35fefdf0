"""BLEU of validation pairs at evaluations (`training.eval_translations`). Public name: `Bleu`."""

from __future__ import annotations

from mup_megatron.evaluate.translation.validation import Validation
from mup_megatron.train.hooks import Evaluation, Hook


class Bleu(Hook):
    """Adds `bleu`, 0 to 100, to the measures of an evaluation, for the hooks behind it. Collective."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        """Translates."""
        evaluation.measures["bleu"] = self._validation()
        return True
