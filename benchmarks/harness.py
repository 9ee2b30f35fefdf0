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

from packaging.version import Version

RESULTS = Path(__file__).resolve().parent / "results"
CONTENDERS = ("ours", "plain", "native")
_PACKAGES = ("torch", "megatron-core", "deepspeed")


def absent() -> dict[str, str]:
    """Contenders that this installation has not, and why."""
    version = importlib.metadata.version("megatron-core")
    if Version(version) >= Version("0.17"):
        return {}
    return {"native": f"megatron-core {version} has no native MuP: TransformerConfig.use_mup came with 0.17"}


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
    """Seconds of each body, run in turn, so that a drift of the machine falls on all alike.

    The order is turned and reversed from round to round (`in_turn`): no body always follows the same other one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(warmup + runs):
        for name in in_turn(list(bodies), number):
            began = time.perf_counter()
            bodies[name]()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def in_turn(names: list[str], number: int) -> list[str]:
    """The order of round `number`: another one goes first each time, and every other round goes backwards."""
    first = number % len(names)
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order


def ratios(seconds: dict[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Ours over theirs, pair by pair: run n of one with run n of the other."""
    return spread([a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)])


def over(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ours over every other contender there is."""
    return {name: ratios(values, "ours", name) for name in values if name != "ours"}


def write(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes FOLDER/cpu-3.12.json: by kind of machine and by Python, on which megatron-core's version hangs."""
    kind = "gpu" if result["machine"]["gpus"] else "cpu"
    path = folder / f"{kind}-{'.'.join(result['machine']['python'].split('.')[:2])}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
