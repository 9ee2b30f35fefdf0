"""What `mup-megatron run` adds to a script's steps: `python -m benchmarks.script`, about 20 minutes.

The same script and options with `mup-megatron run` (audit and readings at their defaults) and without it, each run a
process of its own, in turn. A run's step is the median of those it logged; a ratio is taken run by run. Writes
results/script/3.12.json. megatron-core's wheel has megatron.training from 0.19 on.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, in_turn, over, ratios, spread, wait_for_quiet, write_apart
from mup_megatron.util.provenance import provenance

_SIZES = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 8, "kv_channels": 32}
_BASE = "hidden_size: 64\nnum_attention_heads: 2\n"
_LENGTHS = {"seq_length": 128, "max_position_embeddings": 128, "micro_batch_size": 8, "global_batch_size": 8}
_LONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# A run that is stopped early: readings come as often as in a long one.
_PLANNED, _WARMUP = 10_000, 5


def measure(rounds: int, steps: int = 40) -> dict[str, Any]:
    """Seconds of a step and of a whole process, of three runs a round: ours, plain, and plain again, the noise."""
    seconds: dict[str, list[float]] = {}
    whole: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in in_turn(["ours", "plain", "plain_again"], number):
            step, process = _run(name == "ours", steps)
            seconds.setdefault(name, []).append(step)
            whole.setdefault(name, []).append(process)
            print(f"round {number + 1} of {rounds}: {name}, {step:.4f} s a step, {process:.1f} s in all", flush=True)
    again = {"step": ratios(seconds, "plain_again", "plain"), "process": ratios(whole, "plain_again", "plain")}
    for each in (seconds, whole):
        del each["plain_again"]
    return {
        **_SIZES,
        **_LENGTHS,
        "vocabulary": 4096,
        "steps": steps,
        "seconds_per_step": {name: spread(values) for name, values in seconds.items()},
        "seconds_per_process": {name: spread(values) for name, values in whole.items()},
        "ours_over": {"step": over(seconds)["plain"], "process": over(whole)["plain"]},
        "plain_again_over_plain": again,
    }


def _run(ours: bool, steps: int) -> tuple[float, float]:
    """The median of the steps that a run logs behind its first ones, and the process from start to end. Unit: seconds.

    Raises:
        RuntimeError: it failed, or logged another number of steps.
    """
    from tests.helpers.megatron_runs import SCRIPT, words  # not in the run itself: it imports much

    with tempfile.TemporaryDirectory() as folder:
        options = words(
            Path(folder),
            base=_BASE,
            **_SIZES,
            **_LENGTHS,
            vocab_size=4096,
            lr=1e-3,
            train_iters=_PLANNED,
            exit_interval=steps,
            **({} if ours else {"mup_base": None}),
        )
        start = ["-m", "mup_megatron", "run"] if ours else ["-m", "benchmarks.script", "--plainly"]
        began = time.perf_counter()
        ended = subprocess.run(  # noqa: S603
            [sys.executable, *start, str(SCRIPT), *options],
            cwd=RESULTS.parents[1],
            env={**os.environ, **_LONE, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        process = time.perf_counter() - began
    logged = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", ended.stdout)
    if ended.returncode or len(logged) != steps:
        raise RuntimeError(
            f"status {ended.returncode}, {len(logged)} steps:\n{ended.stdout[-500:]}\n{ended.stderr[-500:]}"
        )
    return statistics.median(float(each) / 1000 for each in logged[_WARMUP:]), process


def _run_plainly(script: str, *options: str) -> None:
    """As upstream alone runs it, with what it needs to run without a GPU."""
    from mup_megatron.megatron_training.options import prepare

    prepare()
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """The command."""
    if sys.argv[1:2] == ["--plainly"]:
        _run_plainly(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.script")
    parser.add_argument("--rounds", type=int, default=20, help="Of three processes each (default 20).")
    rounds = parser.parse_args().rounds
    result: dict[str, Any] = {"machine": provenance(None), "busy": wait_for_quiet(1200.0), **measure(rounds)}
    print(write_apart(result, "script"))


if __name__ == "__main__":
    main()
