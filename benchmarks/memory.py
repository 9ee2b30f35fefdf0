"""Peak memory, two ways: the resident set, which is what a machine runs out of, and tensors alone, which is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_CLEAR_PEAK = "5"  # proc(5), clear_refs: makes VmHWM the current resident size


def clear_resident_peak() -> float:
    """Starts the peak of the resident set anew; MiB resident now."""
    Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="utf-8")
    return resident_peak()


def resident_peak() -> float:
    """Largest resident set since, in MiB. Not getrusage's ru_maxrss: that begins with the starting process's peak."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status says no VmHWM; peak memory is measured on Linux")


def tensor_peak(body: Callable[[], object]) -> float:
    """Most bytes of tensors that `body` has at once of those it makes, in MiB; on a GPU, of those on the GPU."""
    import torch

    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        body()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        body()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():  # in the order of time; frees are negative
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 2**20
