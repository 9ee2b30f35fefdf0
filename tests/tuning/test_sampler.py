"""Which values a study tries: how evenly `quasi_random` covers the ranges, against `random`."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import derive
from mup_megatron.tuning.sampler import points
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import UserError
from tests.helpers.studies import study_config

SEARCH = {
    "lr": {"log_uniform": [1e-4, 1e-2]},
    "output_multiplier": {"uniform": [2, 10]},
    "lr_schedule": {"choice": ["cosine", "linear"]},
}


def drawn(path: Path, sampler: str, trials: int = 16, seed: int = 7) -> list[dict[str, Any]]:
    config = study_config(path, tuning__sampler=sampler, tuning__trials=trials, tuning__search=SEARCH, run__seed=seed)
    return points(config)


def sixteenths(found: list[dict[str, Any]]) -> tuple[set[int], set[int]]:
    """Which of 16 equal parts of each range hold a point: of lr in the logarithm, of the multiplier in itself."""
    return (
        {int((math.log10(point["lr"]) + 4) / 2 * 16) for point in found},
        {int((point["output_multiplier"] - 2) / 8 * 16) for point in found},
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_part_of_a_range_is_tried_once(tmp_path: Path, seed: int) -> None:
    found = drawn(tmp_path, "quasi_random", seed=seed)
    assert sixteenths(found) == (set(range(16)), set(range(16)))
    assert Counter(point["lr_schedule"] for point in found) == {"cosine": 8, "linear": 8}
    random = sixteenths(drawn(tmp_path, "random", seed=seed))  # negative control: it leaves about a third out
    assert max(map(len, random)) < 14


def test_more_trials_go_on_and_another_seed_draws_others(tmp_path: Path) -> None:
    few, many = (drawn(tmp_path, "quasi_random", trials) for trials in (5, 16))
    assert many[:5] == few
    assert drawn(tmp_path, "quasi_random", 5, seed=8) != few


def test_a_study_plans_them(tmp_path: Path) -> None:
    config = study_config(tmp_path, tuning__sampler="quasi_random", tuning__search=SEARCH)
    planned = [trial.values for trial in Study.create(config).trials()]
    assert planned == points(config)[: len(planned)]
    assert len(planned) > 3


@pytest.mark.parametrize("sampler", ["quasi_random", "tpe"])
def test_fewer_trials_than_wait(tmp_path: Path, sampler: str) -> None:
    """What waits beyond a number that was lowered is no trial, until it is raised again; what runs or ended stays."""
    six = study_config(tmp_path, tuning__sampler=sampler, tuning__search=SEARCH, tuning__trials=6)
    two = derive(six, {"tuning.trials": 2})
    study = Study.create(six)
    first, second, third = (study.claim() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    for trial in (first, third):
        study.finish(trial, "complete", loss=5.0)
    fewer = Study.create(two)
    assert [trial.slot for trial in fewer.trials()] == [0, 1, 2]
    assert fewer.plan(fewer.trials()) == 0
    again = fewer.claim()  # was running when its process ended
    assert again is not None
    assert again.slot == 1
    assert fewer.claim() is None
    assert [trial.slot for trial in Study.create(six).trials()] == list(range(6))
    stage = {"tuning.descent.trials": 4, "tuning.repeat_best": 1, "tuning.repeat_seeds": 1}
    with pytest.raises(UserError, match=r"tuning\.trials: 2 is fewer than this study has planned; expected as many"):
        Study.create(derive(two, stage))
