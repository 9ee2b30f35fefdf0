"""A worker of a study whose objective is made up: `python -m tests.helpers.study_worker CONFIG LOG`. Imports no torch.

Writes a line to LOG for every trial that it claims, and one where it ends it; leaves when all trials of the study have
ended.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mup_megatron.config import load_config
from mup_megatron.tuning.lease import Leases, Lost, Overtaken
from mup_megatron.tuning.outcome import FINISHED
from mup_megatron.tuning.space import rungs, tuning_steps
from mup_megatron.tuning.study import Study


def loss_of(values: Mapping[str, Any], step: int) -> float:
    """Made up; depends on nothing but the trial's values and the step."""
    return 5 + abs(math.log(float(values["lr"]) / 0.01)) / 3 - 0.01 * step


def main(path: str, log: str) -> None:
    """Works until nothing is left."""
    config = load_config(path)
    leases = Leases(Path(config.run.dir) / "tuning", config.tuning.lease_timeout)
    while (study := Study.join(config, leases)) is None:
        time.sleep(0.1)
    steps = [*rungs(config), tuning_steps(config)]
    with Path(log).open("a", encoding="utf-8", buffering=1) as lines:
        while True:
            trial = study.claim()
            if trial is None:
                ended = sum(each.state in FINISHED for each in study.trials())
                if ended == config.tuning.trials:
                    break
                time.sleep(0.3)
                continue
            lines.write(f"claimed {trial.name}\n")
            try:
                for step in steps:
                    study.check_held(trial)
                    if not study.survives(trial, step, loss_of(trial.values, step), partial(study.check_held, trial)):
                        study.finish(trial, "stopped")
                        break
                else:
                    study.finish(trial, "complete", loss=loss_of(trial.values, steps[-1]))
                lines.write(f"ended {trial.name}\n")
            except Lost:
                continue
            except Overtaken:
                study.finish(trial, "waiting")
    if "torch" in sys.modules:
        raise SystemExit("a worker that shares a study imported torch")


if __name__ == "__main__":
    main(*sys.argv[1:])
