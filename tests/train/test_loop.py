"""What the loop tells its hooks, in which order, and that a hook can end the run."""

from __future__ import annotations

import gc
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

import mup_megatron
from mup_megatron.config import load_config
from mup_megatron.engines.setup import resolve
from mup_megatron.engines.step_result import StepResult
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train import run
from mup_megatron.train.hooks import Evaluation, Hook, Step
from mup_megatron.util import collector
from tests.helpers.breakages import replaced
from tests.helpers.commands import metrics
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

_LIBRARY = Path(mup_megatron.__file__).parent
HEARD: list[tuple[Any, ...]] = []
USUAL = gc.get_threshold()


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
        HEARD.append(("before", gc.get_threshold() == USUAL))
        return True

    def before_step(self, number: int) -> None:
        HEARD.append(("begin", number))

    def after_update(self, number: int, result: StepResult) -> None:
        HEARD.append(("update", number))

    def after_step(self, step: Step) -> None:
        HEARD.append(("step", step.number, step.tokens))

    def after_evaluation(self, evaluation: Evaluation) -> bool:
        HEARD.append(("evaluation", evaluation.step, sorted(evaluation.measures)))
        return evaluation.step != self._ends_at

    def after_checkpoint(self, step: int, path: Path) -> None:
        HEARD.append(("checkpoint", step, path.name))


def heard(_rank: Rank, *, path: Path, ends_at: int | None) -> tuple[list[tuple[Any, ...]], float | None]:
    HEARD.clear()
    collector.rarely()  # as a command begins
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
        ("before", True),
        ("begin", 1),
        ("update", 1),
        ("begin", 2),
        ("step", 1, tokens),  # behind the next step
        ("update", 2),
        ("step", 2, 2 * tokens),  # before the checkpoint
        ("checkpoint", 2, "step_00000002"),
        ("begin", 3),
        ("update", 3),
        ("step", 3, 3 * tokens),
        ("evaluation", 3, ["eval_loss"]),
        ("begin", 4),
        ("update", 4),
        ("step", 4, 4 * tokens),
        ("evaluation", 4, ["eval_loss"]),
        ("checkpoint", 4, "step_00000004"),
        ("exit",),
    ]
    if ends_at is not None:
        expected[13:18] = []
    assert told == expected
    assert loss == metrics(tmp_path / "run")[-1]["eval_loss"]


@pytest.mark.parametrize(("interval", "steps"), [(None, [4]), (0, []), (3, [3, 4])], ids=["unset", "0", "3"])
def test_when_checkpoints_are_written(ranks: Ranks, tmp_path: Path, interval: int | None, steps: list[int]) -> None:
    """Of four steps: the last one unless told otherwise, none at all, every third and the last."""
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(tmp_path / "run"),
        training__train_steps=4,
        training__checkpoint_interval=interval,
        data__dir=str(tmp_path / "data"),
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    told, _ = ranks.run(1, heard, path=path, ends_at=None)[0]
    assert [event[1] for event in told if event[0] == "checkpoint"] == steps
    kept = sorted(folder.name for folder in tmp_path.glob("run/checkpoints/*"))
    assert kept == [f"step_{step:08d}" for step in steps]


class Reads(TorchDispatchMode):
    """Notes each line of the library that reads a number of a tensor: on a GPU the host waits there for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.extract_stack()[-2::-1]
            reader = next(frame for frame in frames if "/torch/" not in frame.filename)
            if reader.name != "_sample" and Path(reader.filename).is_relative_to(_LIBRARY):  # a sample is the host's
                self.lines.add(f"{Path(reader.filename).name}: {reader.line}")
        return function(*args, **(kwargs or {}))


class Reading(Recorder):
    """Looks from behind the audit's last step on to the run's last one."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.reads, self._last = Reads(), last

    def before_step(self, number: int) -> None:
        if number == 4:
            self.reads.__enter__()
        if number == self._last:
            self.reads.__exit__(None, None, None)


def lines_that_wait(_rank: Rank, *, path: Path) -> set[str]:
    config = load_config(path)
    reading = Reading(config.training.train_steps)
    with replaced(run, "Screen", lambda *_: reading):
        run.train(resolve(config, 1), Rank())
    return reading.reads.lines


@pytest.mark.parametrize(
    ("engine", "changed"),
    [
        ("deepspeed", {"parallel__zero_stage": 0}),  # the gradient is clipped here
        pytest.param("deepspeed", {"parallel__zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param("megatron", {}, marks=pytest.mark.slow),
        ("megatron", {"training__clip_norm": "invariant"}),
    ],
)
def test_no_step_waits_for_the_device(ranks: Ranks, tmp_path: Path, engine: str, changed: dict[str, Any]) -> None:
    """Steps, metrics, readings and alarms read nothing of a step before the next one is under way."""
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(tmp_path / "run"),
        run__telemetry_interval=2,
        training__train_steps=8,
        training__eval_interval=None,
        training__checkpoint_interval=0,
        data__dir=str(tmp_path / "data"),
        parallel__engine=engine,
        **changed,
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    assert ranks.run(1, lines_that_wait, path=path) == [set()]
