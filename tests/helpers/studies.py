"""Studies whose objective is made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.tuning.lease import Leases
from mup_megatron.tuning.outcome import Trial
from mup_megatron.tuning.study import Study
from tests.helpers.configs import MIXED, make

SEARCH = {"lr": {"log_uniform": [1e-3, 1e-1]}, "output_multiplier": {"log_uniform": [0.25, 4.0]}}


def study_config(path: Path, **overrides: Any) -> Config:
    keys = {"tuning__search": SEARCH, "tuning__trials": 8, "tuning__train_steps": 16, **overrides}
    return make(MIXED, "gpt3", run__dir=str(path), **{"proxy": {"hidden_size": 64}, **keys})


def loss_of(trial: Trial, step: int) -> float:
    """A made-up loss that depends on nothing but the trial and the step."""
    return 5 + abs(math.log(float(trial.values["lr"]) / 0.01)) / 3 - 0.01 * step + 0.001 * (trial.seed % 7)


def joined(config: Config, path: Path, seconds: float = 1.0) -> Study:
    """The study as another worker sees it."""
    study = Study.join(config, Leases(path / "tuning", seconds))
    assert study is not None
    return study
