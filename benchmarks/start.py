"""What a run costs before and at its first step, measured in fresh processes. This side of it imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import contenders_of, in_turn, over, spread
from mup_megatron.config import load_config
from mup_megatron.parallel.layout import smallest_world

_REPOSITORY = Path(__file__).resolve().parents[1]
_EXPLAINED = ("configs/gpt3/175b.yaml", "configs/deepseek/v3-671b.yaml", "configs/llama/1t.yaml")


def in_child(*words: str, ranks: int = 0) -> Any:
    """What `python -m benchmarks.child` measures.

    Args:
        words: for it.
        ranks: processes that a launcher starts, with one thread each; 0: one process, with all processors.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        command = [sys.executable, *launched, "-m", "benchmarks.child", str(out), *words]
        environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if ranks else {})}
        ended = subprocess.run(  # noqa: S603
            command, cwd=_REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n" + "\n".join(ended.stderr.splitlines()[-20:]))
        return json.loads(out.read_text(encoding="utf-8"))


def first_steps(vocabulary: int, rounds: int) -> dict[str, Any]:
    """Start-up and peak memory of each contender, each a process of its own, in turn; ours over each, pair by pair."""
    names = contenders_of()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in in_turn(names, number):
            words = ["first-step", name, str(vocabulary), str(time.monotonic())]
            measured[name].append(in_child(*words, *(["tensors"] if number == 0 else [])))
    totals = {name: [one["seconds"]["total"] for one in ones] for name, ones in measured.items()}
    peaks = {
        kind: {
            name: [one["mebibytes"][kind] for one in ones if kind in one["mebibytes"]]
            for name, ones in measured.items()
        }
        for kind in ("tensors", "resident")
    }
    return {
        "vocabulary": vocabulary,
        "seconds": {
            name: {phase: spread([one["seconds"][phase] for one in ones]) for phase in ones[0]["seconds"]}
            for name, ones in measured.items()
        },
        "seconds_ours_over": over(totals),
        "peak_mebibytes": {
            kind: {name: spread(values) for name, values in peak.items()} for kind, peak in peaks.items()
        },
        "peak_ours_over": {kind: over(peak) for kind, peak in peaks.items()},
    }


def explain(runs: int) -> dict[str, Any]:
    """Seconds and peak memory of `mup-megatron explain` on the largest shipped configs, each run a process of its own.

    Run by run the rank is the first, the last and one of the middle; CPU seconds tell on a machine that is shared.
    """
    configs = {name: load_config(_REPOSITORY / name) for name in _EXPLAINED}
    return {name: _explain(name, smallest_world(config), runs) for name, config in configs.items()}


def imports(runs: int) -> dict[str, Any]:
    """Seconds of a process that imports what builds a model, torch and megatron-core's GPTModel, and nothing else."""
    return _timed([[sys.executable, "-c", "import torch, megatron.core.models.gpt.gpt_model"]] * runs)


def _explain(config: str, world_size: int, runs: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "mup_megatron", "explain", config, "--json", "--world-size", str(world_size)]
    ranks = [(0, world_size - 1, world_size // 2 + 1)[number % 3] for number in range(runs)]
    return {"processes": world_size, **_timed([[*command, "--rank", str(rank)] for rank in ranks])}


def _timed(commands: list[list[str]]) -> dict[str, Any]:
    """Seconds, CPU seconds and peak memory of commands, one after the other."""
    seconds, cpu_seconds, mebibytes = [], [], []
    for command in commands:
        began = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603
            command, cwd=_REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(usage.ru_utime + usage.ru_stime)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with exit status {process.returncode}")
        mebibytes.append(usage.ru_maxrss / 1024)  # begins with this process's own peak, which is far below
    return {
        "seconds": spread(seconds),
        "cpu_seconds": spread(cpu_seconds),
        "peak_mebibytes": spread(mebibytes),
    }
