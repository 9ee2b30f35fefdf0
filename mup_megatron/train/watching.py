"""Who looks on while a run trains and may stop it, as its study does. Public names: `Watcher`, `Watching`."""

from __future__ import annotations

import math
from typing import Protocol

from mup_megatron.config import Config
from mup_megatron.train.hooks import Evaluation, Hook, Step
from mup_megatron.train.metrics import Metrics


class Watcher(Protocol):
    """Who looks on. Called on the first rank, which then must be the only one."""

    def step(self, step: int, loss: float) -> None:
        """A step is done."""
        ...

    def evaluated(self, step: int, loss: float) -> bool:
        """An evaluation is done; whether to go on."""
        ...


class Watching(Hook):
    """Tells a watcher of steps and evaluations, also of those that an earlier process made and saved behind.

    Args:
        config: the run.
        watcher: looks on.
        metrics: know of earlier evaluations.
    """

    def __init__(self, config: Config, watcher: Watcher, metrics: Metrics) -> None:
        self._of_bleu = config.tuning.objective == "bleu"
        self._watcher, self._metrics = watcher, metrics

    def judged(self, evaluation: Evaluation) -> float:
        """What a trial is compared by (tuning/objective.py), smaller is better."""
        of_bleu = self._of_bleu and "bleu" in evaluation.measures
        return 100.0 - evaluation.measures["bleu"] if of_bleu else evaluation.loss

    def before_run(self) -> bool:
        """Tells of earlier evaluations."""
        return all(self.after_evaluation(each) for each in self._metrics.evaluations)

    def after_step(self, step: Step) -> None:
        """Tells of a step whose loss is a number."""
        if math.isfinite(step.loss):
            self._watcher.step(step.number, step.loss)

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        """Tells of an evaluation; the watcher decides whether to go on."""
        return self._watcher.evaluated(evaluation.step, self.judged(evaluation))
