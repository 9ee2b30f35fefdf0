"""What a person sees of a run while it trains. Public name: `Screen`."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from mup_megatron.config.training import Training
from mup_megatron.train.hooks import Evaluation, Hook, Step
from mup_megatron.util.progress import Progress


class Screen(Hook):
    """A bar or a line for steps, a line for an evaluation and for a checkpoint.

    Args:
        training: section of the config.
        progress: speaks on the first rank alone.
    """

    def __init__(self, training: Training, progress: Progress) -> None:
        self._training, self._progress = training, progress
        self._recent: deque[Step] = deque(maxlen=training.log_interval)
        self._is_first = True

    def after_step(self, step: Step) -> None:
        """Moves the bar, or writes a line at the interval, with the mean speed since the last one.

        Telemetry and the reading of a loss make the steps that are told slower than the others. The first step of a
        process, which allocates and compiles, counts for itself alone.
        """
        self._recent.append(step)
        tokens = sum(each.tokens_per_second * each.seconds for each in self._recent)
        speed = tokens / sum(each.seconds for each in self._recent)
        total, interval = self._training.train_steps, self._training.log_interval
        self._progress.step(step.number, total, step.loss, speed, interval)
        if self._is_first:
            self._is_first = False
            self._recent.clear()

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        """Says loss, perplexity and BLEU."""
        perplexity = math.exp(min(evaluation.loss, 700.0))  # more would overflow
        bleu = evaluation.measures.get("bleu")
        self._progress.say(
            f"step {evaluation.step}: evaluation loss {evaluation.loss:.4f}, perplexity {perplexity:.4g}"
            + ("" if bleu is None else f", BLEU {bleu:.2f}")
        )
        return True

    def after_checkpoint(self, step: int, path: Path) -> None:
        """Says where it is."""
        self._progress.say(f"saved {path}")
