"""What every benchmark shares: quiet, alternating runs, medians with spread, machine and versions, a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.version import Version

RESULTS = Path(__file__).resolve().parent / "results"
CONTENDERS = ("ours", "plain", "native")
LEAST = 6
"""Values of which the least and the most hold the median with 95 % confidence."""
_QUIET, _LOOK_SECONDS = 0.05, 3.0


def absent() -> dict[str, str]:
    """Contenders that this installation has not, and why."""
    version = importlib.metadata.version("megatron-core")
    if Version(version) >= Version("0.17"):
        return {}
    return {"native": f"megatron-core {version} has no native MuP: TransformerConfig.use_mup came with 0.17"}


def has_plain_experts() -> bool:
    """Whether plain experts train on a CPU: 0.16's router names a function of Transformer Engine that is not there."""
    return Version(importlib.metadata.version("megatron-core")) >= Version("0.17")


def contenders_of(*, native: bool = True) -> list[str]:
    """Those that this installation has."""
    return [name for name in CONTENDERS if name not in absent() and (native or name != "native")]


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def wait_for_quiet(longest: float = 600.0) -> float:
    """Waits until others leave the processors alone.

    Args:
        longest: to wait. Unit: seconds.

    Returns:
        The share of processor time that was taken in the last three seconds: below 0.05, unless it took too long.
    """
    until = time.monotonic() + longest
    while True:
        before = _processor_times()
        time.sleep(_LOOK_SECONDS)
        busy, whole = (after - earlier for after, earlier in zip(_processor_times(), before, strict=True))
        if busy < _QUIET * whole or time.monotonic() > until:
            return busy / whole
        print(f"others take {busy / whole:.0%} of the processors; waiting until it is below {_QUIET:.0%}", flush=True)


def _processor_times() -> tuple[int, int]:
    """Busy time and all time of the processors since the machine's start (proc(5), /proc/stat)."""
    times = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
    return sum(times) - times[3] - times[4], sum(times)


def alternate(bodies: dict[str, Callable[[], Any]], runs: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each body, run in turn; see `alternate_clocks`."""
    return alternate_clocks(bodies, runs, warmup)[0]


def alternate_clocks(
    bodies: dict[str, Callable[[], Any]], runs: int, warmup: int = 1
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each body, run in turn, so that a drift of the machine falls on all alike; and CPU seconds.

    The order is turned and reversed from round to round (`in_turn`): no body always follows the same other one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in bodies}
    for number in range(warmup + runs):
        for name in in_turn(list(bodies), number):
            began, cpu_began = time.perf_counter(), time.process_time()
            bodies[name]()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(time.process_time() - cpu_began)
    return seconds, cpu_seconds


def in_turn(names: list[str], number: int) -> list[str]:
    """The order of round `number`: another one goes first each time, and every other round goes backwards."""
    first = number % len(names)
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order


def ratios(seconds: dict[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Ours over theirs, pair by pair: run n of one with run n of the other. `low` and `high`: of `interval`."""
    pairs = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
    low, high = interval(pairs)
    return {**spread(pairs), "low": low, "high": high}


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence: between two of the values, whatever their distribution.

    The k-th least and the k-th most, with the largest k for which a fair coin falls fewer than k times in as many
    throws as there are values with a chance of at most 2.5 %. Of fewer than `LEAST` values it is all of them.
    """
    number, chance, k = len(values), 0.0, 0
    while (chance := chance + math.comb(number, k) / 2**number) <= 0.025:
        k += 1
    found = sorted(values)
    return found[max(0, k - 1)], found[min(number - 1, number - k)]


def over(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ours over every other contender there is."""
    return {name: ratios(values, "ours", name) for name in values if name != "ours"}


def write(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes FOLDER/cpu-3.12.json: by kind of machine and by Python, on which megatron-core's version hangs."""
    return _write(result, path_of(result, folder))


def path_of(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """FOLDER/cpu-3.12.json, or of what the result was measured on."""
    kind = "gpu" if result["machine"]["gpus"] else "cpu"
    return folder / f"{kind}-{_python(result)}.json"


def write_apart(result: dict[str, Any], name: str) -> Path:
    """Writes results/NAME/3.12.json, of a measurement that `./dev bench` does not make."""
    return _write(result, RESULTS / name / f"{_python(result)}.json")


def _python(result: dict[str, Any]) -> str:
    return ".".join(result["machine"]["python"].split(".")[:2])


def _write(result: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
