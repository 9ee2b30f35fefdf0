"""`run.telemetry_interval`: what a run writes, that it changes nothing, and that a stopped run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mup_megatron.telemetry.series import Series, read_series
from mup_megatron.train.telemetry import interval_of
from tests.helpers.commands import metrics
from tests.helpers.configs import HEAD_SIZE, MIXED, make
from tests.helpers.distributed import Ranks
from tests.train.two_ranks import train, without_times

EVERY_OTHER: dict[str, Any] = {"run__telemetry_interval": 2}
FIRST_QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def series_of(run: Path) -> Series:
    return read_series(run / "telemetry.jsonl")


def test_it_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and norms with readings at every step are those without any; nothing is written where there is none."""
    (tmp_path / "off").mkdir()
    on = train(ranks, tmp_path, run__telemetry_interval=1)
    off = train(ranks, tmp_path / "off", run__telemetry_interval=0)
    assert without_times(on) == without_times(off)
    assert series_of(on).steps == [1, 2, 3, 4]
    assert not (off / "telemetry.jsonl").exists()


def test_where_it_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """The first step, every other and the last; TensorBoard has the same numbers."""
    run = train(ranks, tmp_path, **{**EVERY_OTHER, "training__train_steps": 5})
    series = series_of(run)
    assert series.steps == [1, 2, 4, 5]
    updates = series.values[FIRST_QKV, "update over weight"]
    assert updates[0] == 0  # the warm-up begins with a rate of 0
    assert min(updates[1:]) > 0
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    told = events.Scalars(f"update over weight/{FIRST_QKV}")
    assert [event.step for event in told] == series.steps
    assert [event.value for event in told] == pytest.approx(updates, rel=1e-5)
    assert {name for name in events.Tags()["scalars"] if name.startswith("largest logit/")} == {
        f"largest logit/decoder.layers.{layer}.self_attention.core_attention" for layer in (0, 1)
    }


@pytest.mark.slow
def test_the_share_of_steps_that_were_clipped(ranks: Ranks, tmp_path: Path) -> None:
    """Of the norms in metrics.jsonl, since the reading before; nothing where nothing is clipped."""
    (tmp_path / "off").mkdir()
    keys: dict[str, Any] = {"run__telemetry_interval": 3, "training__train_steps": 7}
    norms = [line["grad_norm"] for line in metrics(train(ranks, tmp_path / "off", training__clip_grad=0.0, **keys))]
    assert ("run", "clipped") not in series_of(tmp_path / "off" / "run").values
    limit = sorted(norms)[3]
    run = train(ranks, tmp_path, training__clip_grad=limit, **keys)
    above = [line["grad_norm"] > limit for line in metrics(run) if "grad_norm" in line]
    assert True in above
    assert False in above
    series = series_of(run)
    assert series.steps == [1, 3, 6, 7]
    parts = [above[:1], above[1:3], above[3:6], above[6:]]
    assert series.values["run", "clipped"] == pytest.approx([sum(part) / len(part) for part in parts], rel=1e-5)


@pytest.mark.slow
def test_it_goes_on_in_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    """A run of two steps, of which a kill left half a line behind; two more with other ranks: as one that never
    stopped."""
    decay: dict[str, Any] = {**EVERY_OTHER, "training__lr_decay_steps": 4}
    (tmp_path / "whole").mkdir()
    whole = series_of(train(ranks, tmp_path / "whole", **decay))
    run = train(ranks, tmp_path, training__train_steps=2, **decay)
    with (run / "telemetry.jsonl").open("a") as file:
        file.write('{"step": 3, "values": [1.0, 2.')
    train(ranks, tmp_path, parallel__tensor_model_parallel_size=1, training__micro_batch_size=2, **decay)
    again = series_of(run)
    assert again.steps == whole.steps == [1, 2, 4]
    assert again.values.keys() == whole.values.keys()
    for name, values in whole.values.items():
        assert again.values[name] == pytest.approx(values, rel=1e-4, nan_ok=True), name


def test_readings_behind_the_checkpoint_are_made_again(ranks: Ranks, tmp_path: Path) -> None:
    """A run that is killed goes on at its last checkpoint: readings of later steps are there once."""
    run = train(ranks, tmp_path, **EVERY_OTHER)
    path = run / "telemetry.jsonl"
    before = path.read_text()
    path.write_text(before + before.splitlines()[-1].replace('"step": 4', '"step": 6') + "\n")
    train(ranks, tmp_path, **EVERY_OTHER, training__train_steps=6, training__lr_decay_steps=4)
    assert series_of(run).steps == [1, 2, 4, 6]


def test_the_interval() -> None:
    """100 where nothing is said; a thousand readings of a long run are enough."""
    steps = {steps: interval_of(make(MIXED, training__train_steps=steps)) for steps in (10, 100_000, 500_000)}
    assert steps == {10: 100, 100_000: 100, 500_000: 500}
    assert interval_of(make(MIXED, run__telemetry_interval=0)) == 0


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"optimizer__name": "adam", "hparams__weight_decay": 0.0}, marks=pytest.mark.slow),
        pytest.param({"optimizer__name": "sgd", "growth": HEAD_SIZE}, marks=pytest.mark.slow),
        {"parametrization__scaling": "unit", "parallel__engine": "megatron", "parametrization__weight_decay": "sqrt"},
        pytest.param({"parametrization__name": "standard"}, marks=pytest.mark.slow),
    ],
    ids=["adam", "sgd", "unit scale", "standard"],
)
def test_groups_that_are_right_raise_no_alarm(ranks: Ranks, tmp_path: Path, changed: dict[str, Any]) -> None:
    """Rates and decay of every tensor's group are the table's, at every step of the schedule."""
    run = train(ranks, tmp_path, run__telemetry_interval=1, **changed)
    assert series_of(run).steps == [1, 2, 3, 4]
    assert not (run / "alarms.jsonl").exists()
