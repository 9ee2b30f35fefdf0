"""What every benchmark shares: alternating runs, medians with spread, machine and versions, a JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "megatron-core", "deepspeed")


def machine() -> dict[str, Any]:
    """Where and with what a result was measured."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": str(datetime.date.today()),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def alternate(bodies: dict[str, Callable[[], Any]], runs: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each body, run in turn, so that a drift of the machine falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(warmup + runs):
        for name, body in bodies.items():
            began = time.perf_counter()
            body()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(seconds: dict[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Ours over theirs, pair by pair."""
    return spread([a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)])


def write(name: str, result: dict[str, Any]) -> Path:
    """Writes benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n", encoding="utf-8")
    return path
