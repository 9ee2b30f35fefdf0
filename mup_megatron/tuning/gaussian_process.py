"""A Gaussian process that learns from every trial, also from those that were stopped. Public name: `proposed`.

Optuna's GPSampler (log expected improvement, log-normal priors on the length scales) learns from complete trials alone,
and most trials are stopped by halving. Here a stopped trial counts with its last loss, which is higher than its final
one would have been: it was among the worse. docs/evidence/tuning-cost.md has what both are worth.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from mup_megatron.tuning.space import Value

_DRAWN = 4
"""Trials that are drawn at random before the first that is proposed."""

_ABOVE = 3.0
"""A loss counts as at most so many times as far above the lowest as the median is: a curve has no use for how far a
trial diverged."""


def proposed(trials: Sequence[FrozenTrial], space: Mapping[str, BaseDistribution], seed: int) -> dict[str, Value]:
    """Values of the next trial.

    Args:
        trials: all of the study; those that wait, or whose process died, tell nothing. Where one runs, the next is
            proposed as if another will be there.
        space: what is searched.
        seed: of this trial's draw.
    """
    trials = [trial for trial in trials if trial.params.keys() == space.keys()]  # none that waits or varies another
    known = [(trial.params, loss) for trial in trials if (loss := _loss(trial)) is not None]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    if len(known) < _DRAWN:
        return dict(study.ask(dict(space)).params)
    finite = sorted(loss for _, loss in known if math.isfinite(loss))
    most = finite[0] + _ABOVE * (statistics.median(finite) - finite[0]) if finite else 0.0
    for values, loss in known:
        made = optuna.trial.create_trial(params=values, distributions=dict(space), value=min(loss, most))
        study.add_trial(made)
    for trial in trials:
        if trial.state is TrialState.RUNNING:
            study.enqueue_trial(trial.params)
            study.ask(dict(space))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
    return dict(study.ask(dict(space)).params)


def _loss(trial: FrozenTrial) -> float | None:
    """Of a trial that ended by itself or was stopped: its last; infinite where it diverged, None where it has none."""
    if trial.state is TrialState.COMPLETE:
        return trial.value
    reports = trial.intermediate_values
    return reports[max(reports)] if trial.state is TrialState.PRUNED and reports else None
