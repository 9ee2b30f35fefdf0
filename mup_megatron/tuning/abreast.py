"""How many trials run at the same time on one device (`tuning.trials_per_device`).

Public names: `Abreast`, `most_abreast`, `memory_share`. A small proxy leaves most of a GPU idle: its steps are bound by
the time that kernels take to start. `auto` finds the number by measuring the study's own trials.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable

from mup_megatron.config import Config
from mup_megatron.tuning.process import gpus

_GAIN = 1.2
"""Twice as many trials stay where all of them together do this many times the steps of before."""
_WINDOW_SECONDS = 20.0
_WINDOW_STEPS = 10
"""Of each trial; so long is a number of trials measured."""
_ROOM = 0.9
"""Of the device's memory, what trials may take in all."""
_CONTEXT_BYTES = 700 << 20  # CUDA's context and the workspace of cuBLAS, which torch does not count


def most_abreast(config: Config, local_ranks: int) -> int:
    """The largest number of trials that one worker may run at a time.

    Args:
        config: of the study. `auto` stands for 16 on a GPU, and elsewhere for the cores of one worker.
        local_ranks: workers of this machine that the same launcher started.
    """
    asked = config.tuning.trials_per_device
    if asked != "auto":
        return asked
    return 16 if gpus() else max(1, (os.cpu_count() or 1) // max(1, local_ranks))


def memory_share() -> float:
    """What this process has taken at most, over the memory of its GPU, or of the machine where it has none."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return (torch.cuda.max_memory_reserved() + _CONTEXT_BYTES) / total
    unit = 1 if sys.platform == "darwin" else 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / total


class Abreast:
    """The number of trials at a time. Fixed, or doubled as long as that pays; threads may share it.

    Args:
        most: never more.
        measured: whether the number is found by measurement, from 1 on; else it is `most`.
        say: takes a line of progress.
        clock: seconds.
    """

    def __init__(
        self, most: int, *, measured: bool, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._say, self._clock = most, say, clock
        self._settled = not measured or most == 1
        self._count = 1 if measured else most
        self._lock = threading.Lock()
        self._steps: dict[int, int] = {}
        self._share, self._before = 0.0, 0.0
        self._began: tuple[float, int] | None = None

    def stepped(self, worker: int, steps: int, share: float) -> None:
        """A trial came on.

        Args:
            worker: whose trial, from 0.
            steps: since the last time.
            share: of the device's memory that its process has taken.
        """
        with self._lock:
            self._steps[worker] = self._steps.get(worker, 0) + steps
            self._share = max(self._share, share)

    def count(self) -> int:
        """Trials that may run now; looks at what was measured."""
        with self._lock:
            if not self._settled:
                self._look()
            return self._count

    def _look(self) -> None:
        now, steps = self._clock(), sum(self._steps.values())
        if self._began is None:
            # A process that starts takes cores from the others: the clock begins when all of them train.
            self._began = (now, steps) if len(self._steps) >= self._count else None
            return
        seconds, done = now - self._began[0], steps - self._began[1]
        if seconds < _WINDOW_SECONDS or done < _WINDOW_STEPS * self._count:
            return
        self._decide(done / seconds)

    def _decide(self, speed: float) -> None:
        count, before = self._count, self._before
        if count > 1 and speed < _GAIN * before:
            self._count, self._settled = count // 2, True
            self._say(
                f"{self._count} {_trials(self._count)} at a time on this device: {before:.1f} steps a second; with "
                f"{count} they are {speed:.1f}"
            )
            return
        self._before = speed
        self._count = min(2 * count, self._most, max(count, int(_ROOM / self._share) if self._share else self._most))
        self._steps, self._began, self._settled = {}, None, self._count == count
        why = " (more do not fit)" if self._settled and count < self._most else ""
        follows = "" if self._settled else f"; now {self._count} are tried"
        self._say(f"{count} {_trials(count)} at a time on this device: {speed:.1f} steps a second{follows}{why}")


def _trials(count: int) -> str:
    return "trial" if count == 1 else "trials"
