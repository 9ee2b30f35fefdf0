"""`tuning.sampler: gp`: what the Gaussian process learns from, what it asks once, and that it finds a minimum."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from mup_megatron.tuning.gaussian_process import proposed
from mup_megatron.tuning.study import Study
from tests.tuning.test_study import study_config

RATE = {"lr": FloatDistribution(1e-4, 1e-1, log=True)}
SPACE: dict[str, BaseDistribution] = {
    **RATE,
    "init_method_std": FloatDistribution(0.005, 0.08, log=True),
    "attention_multiplier": FloatDistribution(0.5, 2.0),
    "lr_schedule": CategoricalDistribution(("cosine", "linear")),
}


def ended(values: dict[str, Any], loss: float, space: dict[str, Any] = SPACE) -> FrozenTrial:
    return create_trial(params=values, distributions=dict(space), value=loss)


def stopped(values: dict[str, Any], loss: float, space: dict[str, Any] = SPACE) -> FrozenTrial:
    reports = {2: loss + 1.0, 4: loss}
    return create_trial(state=TrialState.PRUNED, params=values, distributions=dict(space), intermediate_values=reports)


def loss_of(values: dict[str, Any]) -> float:
    """Least at a rate of 0.008 and a deviation of 0.02, with cosine."""
    off = math.log2(values["lr"] / 0.008) ** 2 + math.log2(values["init_method_std"] / 0.02) ** 2
    return 4.0 + 0.02 * off + 0.05 * (values["lr_schedule"] == "linear")


def test_it_finds_a_minimum_sooner_than_chance() -> None:
    """Of ten trials; control: as many that are drawn, as the first four are."""
    excess: dict[bool, list[float]] = {True: [], False: []}
    for learns in excess:
        for search in range(2):
            trials: list[FrozenTrial] = []
            for slot in range(10):
                values = proposed(trials if learns else [], SPACE, 100 * search + slot)
                trials.append(ended(values, loss_of(values)))
            excess[learns].append(min(trial.value or 0.0 for trial in trials) - 4.0)
    assert statistics.median(excess[True]) < 0.25 * statistics.median(excess[False])


RISING = [ended({"lr": lr}, loss, RATE) for lr, loss in ((1e-4, 4.9), (1e-3, 4.4), (2e-3, 4.2), (4e-3, 4.0))]
"""The farther up the better, as far as they go."""


@pytest.mark.parametrize("loss", [5.0, math.inf])
def test_a_stopped_trial_counts(loss: float) -> None:
    """Above 0.01 all were stopped, or diverged; control: where nobody tried that, it is tried next."""
    bad = [stopped({"lr": lr}, loss, RATE) for lr in (0.01, 0.03, 0.1)]
    for seed in range(3):
        assert proposed([*RISING, *bad], RATE, seed)["lr"] < 0.01
        assert proposed(RISING, RATE, seed)["lr"] > 0.01


def test_how_far_a_trial_diverged_changes_little() -> None:
    """A loss of a million stands where one of three times the median's excess would, so the others keep their shape."""
    far, farther = (proposed([*RISING, ended({"lr": 0.1}, loss, RATE)], RATE, seed=1)["lr"] for loss in (1e3, 1e6))
    assert far == farther


def test_what_runs_is_not_proposed_again() -> None:
    """Four workers at a time: the next values are none of those that others try."""
    running: list[FrozenTrial] = []
    for slot in range(4):
        values = proposed([*RISING, *running], RATE, seed=slot)
        running.append(create_trial(state=TrialState.RUNNING, params=values, distributions=dict(RATE)))
    places = sorted(math.log2(trial.params["lr"]) for trial in running)
    assert min(later - earlier for earlier, later in pairwise(places)) > 0.05
    # Control: each by itself would go to one place.
    alone = [math.log2(proposed(RISING, RATE, seed=slot)["lr"]) for slot in range(4)]
    assert max(alone) - min(alone) < 0.5


def test_a_study_draws_four_and_then_learns(tmp_path: Path) -> None:
    """Each slot has a seed of its own; the same study again proposes the same."""
    search = {"lr": {"log_uniform": [1e-4, 1e-1]}, "lr_schedule": {"choice": ["cosine", "linear"]}}
    found = []
    for folder in ("one", "other"):
        config = study_config(
            tmp_path / folder, tuning__search=search, tuning__sampler="gp", tuning__trials=6, tuning__pruner="none"
        )
        study = Study.create(config)
        study.plan(study.trials())
        values = []
        while trial := study.claim():
            values.append(trial.values)
            study.finish(trial, "complete", loss=4.0 + math.log2(trial.values["lr"] / 0.004) ** 2)
            study.plan(study.trials())
        found.append(values)
    assert found[0] == found[1]
    assert len({each["lr"] for each in found[0]}) == 6
    nearest = [abs(math.log2(each["lr"] / 0.004)) for each in found[0]]
    assert min(nearest[4:]) < min(nearest[:4])
