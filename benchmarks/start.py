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

from benchmarks.harness import CONTENDERS, absent, in_turn, over, spread

_REPOSITORY = Path(__file__).resolve().parents[1]
_EXPLAINED = "configs/gpt3/175b.yaml"


def in_child(*words: str) -> Any:
    """What `python -m benchmarks.child` measures.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks.child", str(out), *words]
        ended = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)  # noqa: S603
        if ended.returncode:
            raise RuntimeError(f"{' '.join(words)} failed:\n" + "\n".join(ended.stderr.splitlines()[-20:]))
        return json.loads(out.read_text(encoding="utf-8"))


def first_steps(vocabulary: int, rounds: int) -> dict[str, Any]:
    """Start-up and peak memory of each contender, each a process of its own, in turn; ours over each, pair by pair."""
    names = [name for name in CONTENDERS if name not in absent()]
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
    """Seconds and peak memory of `mup-megatron explain` on the shipped 175B config, as a process of its own."""
    command = [sys.executable, "-m", "mup_megatron", "explain", _EXPLAINED, "--json"]
    seconds, mebibytes = [], []
    for _ in range(runs):
        began = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603
            command, cwd=_REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds.append(time.perf_counter() - began)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with exit status {process.returncode}")
        mebibytes.append(usage.ru_maxrss / 1024)  # begins with this process's own peak, which is far below
    return {"config": _EXPLAINED, "seconds": spread(seconds), "peak_mebibytes": spread(mebibytes)}
