"""What a checkpoint costs the steps of a run, written in the background and not: `python -m benchmarks.checkpoints`.

The two ways in turn, in one process and on the disk of the temporary folder. The run stands still while its state is
copied and while the checkpoint is made whole; in the background a thread writes and hashes the files in between.
Writes results/checkpoints/3.12.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.harness import in_turn, ratios, spread, write_apart
from mup_megatron.checkpoints.checkpoint import Checkpoints
from mup_megatron.checkpoints.manifest import make_manifest
from mup_megatron.engines.deepspeed import DeepSpeedEngine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import resolve
from mup_megatron.engines.state import Saving, begin_state, state_bytes
from mup_megatron.model.build import build_model, parametrize
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train.saver import Saver
from mup_megatron.util.provenance import machine

_VOCABULARIES, _RUNS, _WARMUP = (8192, 50304), 15, 2
_TARGET = 0.05
"""Of the time that writing takes, what the run may stand still."""


def measure(vocabulary: int, runs: int, *, tiny: bool = False) -> dict[str, Any]:
    """Seconds of both ways to save a model of `benchmarks.contenders`, and of its steps meanwhile."""
    bench = contenders.start(vocabulary, tiny=tiny)
    setup = resolve(bench.config, 1)
    table = parametrize(setup.config, vocabulary)
    engine = DeepSpeedEngine(setup, table, build_model(table, setup.layout, 0, bench.device))
    rate = LearningRateSchedule(setup.config.training, setup.config.hparams.lr)(1)
    size = state_bytes(table, setup.config.optimizer)
    seconds: dict[str, list[float]] = {}

    def begin(folder: Path) -> Saving:
        saving = begin_state(engine, table, setup.layout, 0, folder)
        random_state = runtime.save_random_state(folder, 0)
        return dataclasses.replace(saving, write=lambda: [*saving.write(), random_state()])

    def step() -> None:
        engine.step([bench.batch], rate)

    state = torch.zeros(size // 4)

    with tempfile.TemporaryDirectory() as folder:
        manifest = make_manifest(table, setup.layout, "", step=0)
        saver = Saver(
            Checkpoints(Path(folder), 2), begin, size, manifest, lambda step: step * len(bench.batch.tokens), Rank()
        )
        for number in range(_WARMUP + runs):
            found = {"step": _seconds(step), "one plain copy": _seconds(state.clone)}
            for way in in_turn(["waits", "goes on"], number):
                found |= _save(saver, 2 * number + (way == "waits"), step if way == "goes on" else None)
            for name, value in found.items() if number >= _WARMUP else ():
                seconds.setdefault(name, []).append(value)
    engine.close()
    runtime.stop_distributed()
    still = ratios(seconds, "standing still", "writing")
    return {
        **bench.describe(),
        "vocabulary": vocabulary,
        "megabytes": size / 1e6,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "still_over_writing": still,
        "plain_copy_over_writing": ratios(seconds, "one plain copy", "writing"),
        "still_over_waiting": ratios(seconds, "standing still", "waiting"),
        "beside_over_step": ratios(seconds, "step beside", "step"),
        "target_met": still["median"] <= _TARGET,
    }


def _save(saver: Saver, number: int, step: Callable[[], None] | None) -> dict[str, float]:
    """Seconds of one checkpoint; the run goes on with steps meanwhile, or waits."""
    began = time.perf_counter()
    saver.begin(number)
    copied = time.perf_counter()
    beside: list[float] = []
    while not (saver.is_written() and beside):
        beside.append(_seconds(step or _nap))
    written = time.perf_counter()
    saver.finish()
    end = time.perf_counter()
    if step is None:
        return {"waiting": end - began, "writing": written - copied}
    parts = {"copying": copied - began, "finishing": end - written}
    return {**parts, "standing still": sum(parts.values()), "step beside": statistics.mean(beside)}


def _nap() -> None:
    time.sleep(0.001)


def _seconds(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints")
    parser.add_argument("--runs", type=int, default=_RUNS, help="Rounds of a checkpoint in each way.")
    runs, load = parser.parse_args().runs, os.getloadavg()[0]
    result: dict[str, Any] = {
        "machine": machine(),
        "target": _TARGET,
        "sizes": [measure(vocabulary, runs) for vocabulary in _VOCABULARIES],
        "load": {"before": load, "after": os.getloadavg()[0]},
    }
    print(write_apart(result, "checkpoints"))


if __name__ == "__main__":
    main()
