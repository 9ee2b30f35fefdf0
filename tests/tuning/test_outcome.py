"""Which values a study chooses: the mean over seeds decides, and noise, ranges and edges are told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.tuning.outcome import Range, Trial, choose
from mup_megatron.util.errors import UserError
from tests.helpers.studies import study_config


def trial(slot: int, loss: float | None, *, seed: int = 7, state: Any = "complete", lr: float = 0.01) -> Trial:
    return Trial(
        id=slot,
        slot=slot,
        values={"lr": lr},
        seed=seed,
        repeats=seed != 7,
        state=state,
        loss=loss,
        reports={} if loss is None else {16: loss},
        seconds=1.0,
        reason=None,
        attempts=0,
    )


def test_the_choice_by_hand(tmp_path: Path) -> None:
    trials = [
        trial(0, 3.00, lr=0.02),
        trial(0, 3.20, seed=8, lr=0.02),
        trial(1, 3.05, lr=0.03),
        trial(1, 3.07, seed=8, lr=0.03),
        trial(2, 3.90, lr=0.01),
        trial(3, 3.50, state="stopped", lr=0.04),
        trial(4, math.inf, state="diverged", lr=0.9),
        trial(5, None, state="failed", lr=0.05),
    ]
    choice = choose(study_config(tmp_path), trials)
    # Means 3.10 and 3.06: the better single run is not the better candidate.
    assert choice.slot == 1
    assert choice.loss == pytest.approx(3.06)
    # Deviations ±0.10 and ±0.01: sqrt((2·0.01 + 2·0.0001) / 2) = sqrt(0.0101).
    assert choice.noise == pytest.approx(math.sqrt(0.0101))
    # 0.04 apart, two standard errors are 2 · 0.1005 · sqrt(1/2 + 1/2) = 0.2010.
    assert [(c.slot, c.within_noise) for c in choice.candidates] == [(1, False), (0, True)]
    # Searched from 1e-3 to 1e-1. Below 0.03 log(3) was tried down to 0.01, log(10) was not; above all of it was.
    assert choice.interior == {"lr": False}
    assert choice.ranges == {"lr": Range(low=1e-3, high=1e-1, log=True)}
    low = [trial(9, None, state="failed", lr=0.004)]  # log(7.5) and log(4)
    assert choose(study_config(tmp_path), [*trials, *low]).interior == {"lr": True}
    assert choice.as_json()["trials"][6]["loss"] is None


def test_at_the_edge(tmp_path: Path) -> None:
    trials = [trial(0, 3.0, lr=0.1), trial(1, 4.0, lr=0.01), trial(2, 4.0, lr=0.02, state="stopped")]
    assert choose(study_config(tmp_path), trials).interior == {"lr": False}
    assert choose(study_config(tmp_path), trials).noise is None


def test_a_candidate_that_diverged_with_another_seed_is_not_chosen(tmp_path: Path) -> None:
    trials = [trial(0, 3.0), trial(0, math.inf, seed=8, state="diverged"), trial(1, 3.5), trial(1, 3.5, seed=8)]
    assert choose(study_config(tmp_path), trials).slot == 1


def test_one_lucky_loss_is_no_mean(tmp_path: Path) -> None:
    """Slot 0 has the lowest loss, by which it was chosen, and its repetition failed: slot 1 was confirmed."""
    trials = [trial(0, 3.0), trial(0, None, seed=8, state="failed"), trial(1, 3.01), trial(1, 3.0, seed=8)]
    choice = choose(study_config(tmp_path), trials)
    assert [(each.slot, len(each.losses)) for each in choice.candidates] == [(1, 2), (0, 1)]
    alone = choose(study_config(tmp_path), trials[:2])  # where none was confirmed it is all that there is
    assert (alone.slot, alone.noise) == (0, None)


def test_every_candidate_diverged_with_another_seed(tmp_path: Path) -> None:
    trials = [trial(0, 3.0), trial(0, math.inf, seed=8, state="diverged")]
    with pytest.raises(UserError, match="each of the best 2 trials diverged with another seed"):
        choose(study_config(tmp_path), trials)


def test_nothing_to_choose_from(tmp_path: Path) -> None:
    trials = [trial(0, math.inf, state="diverged"), trial(1, None, state="failed")]
    with pytest.raises(UserError, match=r"none of the 2 trials ended with a finite loss .*; expected lower rates"):
        choose(study_config(tmp_path), trials)
    with pytest.raises(
        UserError, match=r"none of the 1 trials ended with a finite loss \(failed\); see tuning/worker-"
    ):
        choose(study_config(tmp_path), trials[1:])  # nothing says that rates were too high
