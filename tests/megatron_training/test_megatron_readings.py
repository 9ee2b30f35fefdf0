"""Readings of runs of megatron.training: what is written, the same numbers in every layout, and no bit changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.telemetry.series import Series, read_series
from tests.helpers import megatron_faults, megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = needs_training

RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

TENSOR = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")
"""The vocabulary is padded to a multiple of 64 on each rank, and to one of 128 where there is one."""

ADAM: dict[str, Any] = {"adam_eps": 1e-4}
"""Far above what rounding leaves of a gradient of 0, whose sign would decide an update."""


def run(ranks: Ranks, folder: Path, interval: int, *words: str, **changed: Any) -> dict[str, Any]:
    """Four steps on two ranks; what the last one, which has the losses, said."""
    folder.mkdir(exist_ok=True)
    more = [*words, "--mup-telemetry-interval", str(interval), "--save", str(folder / "saved")]
    keys: dict[str, Any] = {"save_interval": 2, "train_iters": 4, "global_batch_size": 4, "lr_decay_iters": 4}
    results = ranks.run(2, megatron_runs.train, words=megatron_runs.words(folder, *more, **keys, **ADAM, **changed))
    assert all(result["status"] == 0 for result in results), results[0]["said"]
    assert "not measured" not in results[0]["said"]
    assert not (folder / "saved" / "alarms.jsonl").exists()
    return results[-1]


def series_of(folder: Path) -> Series:
    return read_series(folder / "saved" / "telemetry.jsonl")


@pytest.mark.slow
def test_it_changes_no_bit_and_is_the_same_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Under recomputation, and beside evaluations, of which nothing is measured."""
    whole = run(ranks, tmp_path / "one", 2, *TENSOR)
    off = run(ranks, tmp_path / "off", 0, *TENSOR)
    assert whole["losses"] == off["losses"]
    assert not (tmp_path / "off" / "saved" / "telemetry.jsonl").exists()
    expected = series_of(tmp_path / "one")
    assert expected.steps == [1, 2, 4]
    assert ("decoder.layers.0.mlp.linear_fc2.weight", "update over weight") in expected.values
    other = {
        "recomputed": (*TENSOR, *RECOMPUTED.split(), "--eval-interval", "1"),
        "stages": ("--pipeline-model-parallel-size", "2"),
        "replicas": ("--use-distributed-optimizer",),
    }
    for name, layout in other.items():
        run(ranks, tmp_path / name, 2, *layout)
        found = series_of(tmp_path / name)
        assert found.steps == expected.steps, name
        assert found.values.keys() == expected.values.keys(), name
        for key, values in expected.values.items():
            assert found.values[key] == pytest.approx(values, rel=1e-4, nan_ok=True), (name, key)


@pytest.mark.slow
def test_a_resumed_run_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """The first step of a process is read too."""
    run(ranks, tmp_path, 4, *TENSOR, exit_interval=2)
    run(ranks, tmp_path, 4, *TENSOR, "--load", str(tmp_path / "saved"))
    assert series_of(tmp_path).steps == [1, 3, 4]


def test_rates_that_somebody_resets_are_named(ranks: Ranks, tmp_path: Path) -> None:
    """From the first step of the scheduler on; the run goes on."""
    more = [*TENSOR, "--mup-telemetry-interval", "1", "--mup-audit", "off", "--save", str(tmp_path / "saved")]
    words = megatron_runs.words(tmp_path, *more, train_iters=3, save_interval=3)
    results = ranks.run(2, megatron_faults.audited, words=words, faults=(megatron_faults.ONE_RATE,))
    assert results[0]["status"] == 0
    alarms = [json.loads(line) for line in (tmp_path / "saved" / "alarms.jsonl").read_text().splitlines()]
    assert {alarm["step"] for alarm in alarms} == {2}
    assert {alarm["quantity"] for alarm in alarms} == {"rate"}
    assert "mup-megatron: alarm: rate of " in results[0]["said"]
