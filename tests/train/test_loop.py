"""What the loop tells its hooks, in which order, and that a hook can end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import load_config
from mup_megatron.engines.setup import resolve
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train import run
from mup_megatron.train.hooks import Evaluation, Hook, Step
from tests.helpers.breakages import replaced
from tests.helpers.commands import metrics
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

HEARD: list[tuple[Any, ...]] = []


class Recorder(Hook):
    """In the place of the screen's hook."""

    def __init__(self, *_: Any, ends_at: int | None = None) -> None:
        self._ends_at = ends_at

    def __enter__(self) -> Recorder:
        HEARD.append(("enter",))
        return self

    def __exit__(self, *_: Any) -> None:
        HEARD.append(("exit",))

    def before_run(self) -> bool:
        HEARD.append(("before",))
        return True

    def after_step(self, step: Step) -> None:
        HEARD.append(("step", step.number, step.tokens))

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        HEARD.append(("evaluation", evaluation.step, sorted(evaluation.measures)))
        return evaluation.step != self._ends_at

    def after_checkpoint(self, step: int, path: Path) -> None:
        HEARD.append(("checkpoint", step, path.name))


def heard(_rank: Rank, *, path: Path, ends_at: int | None) -> tuple[list[tuple[Any, ...]], float | None]:
    HEARD.clear()
    with replaced(run, "Screen", lambda *_: Recorder(ends_at=ends_at)):
        loss = run.train(resolve(load_config(path), 1), Rank())
    return list(HEARD), loss


@pytest.mark.parametrize("ends_at", [None, 3])
def test_hooks_hear_everything_in_order(ranks: Ranks, tmp_path: Path, ends_at: int | None) -> None:
    """Four steps with an evaluation at 3 and 4 and a checkpoint at 2 and 4; a hook may end them at the evaluation."""
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(tmp_path / "run"),
        training__train_steps=4,
        training__eval_interval=3,
        training__eval_steps=1,
        training__checkpoint_interval=2,
        data__split="60,40,0",
        data__dir=str(tmp_path / "data"),
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    told, loss = ranks.run(1, heard, path=path, ends_at=ends_at)[0]
    tokens = config.training.global_batch_size * config.training.seq_length
    expected = [
        ("enter",),
        ("before",),
        ("step", 1, tokens),
        ("step", 2, 2 * tokens),
        ("checkpoint", 2, "step_00000002"),
        ("step", 3, 3 * tokens),
        ("evaluation", 3, ["eval_loss"]),
        ("step", 4, 4 * tokens),
        ("evaluation", 4, ["eval_loss"]),
        ("checkpoint", 4, "step_00000004"),
        ("exit",),
    ]
    if ends_at is not None:
        expected[7:10] = []
    assert told == expected
    assert loss == metrics(tmp_path / "run")[-1]["eval_loss"]
