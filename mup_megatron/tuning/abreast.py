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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.tuning.process import gpus
from mup_megatron.util.files import read_text

_GAIN = 1.2
"""Twice as many trials stay where all of them together do this many times the steps of before; a smaller growth of
their number has to bring as much for each."""
_WINDOW_SECONDS = 20.0
_WINDOW_STEPS = 10
"""Of each trial; so long is a number of trials measured."""
_ROOM = 0.9
"""Of the device's memory, what trials may take in all."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
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
    """What this process has taken at most: of its GPU's memory or of the machine's, whichever share is larger."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    share = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _memory_bytes()
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        share = max(share, (torch.cuda.max_memory_reserved() + _CONTEXT_BYTES) / total)
    return share


def _memory_bytes() -> int:
    """Of the machine, or of the container that this process is in (cgroup 2)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(read_text(_CGROUP_LIMIT)))
    return total


class Abreast:
    """The number of trials at a time. Fixed, or doubled as long as that pays; threads may share it.

    Args:
        most: never more.
        measured: whether the number is found by measurement, from 1 on; else it is `most`.
        say: takes a line of progress.
        sharing: workers that share the memory, each of which runs as many.
        clock: seconds.
    """

    def __init__(
        self,
        most: int,
        *,
        measured: bool,
        say: Callable[[str], None],
        sharing: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._say, self._clock, self._room = most, say, clock, _ROOM / sharing
        self._measured, self._settled = measured, not measured or most == 1
        self._count = 1 if measured else most
        self._lock = threading.Lock()
        # By trial that runs: when it was heard last, and what it has trained since all of them do.
        self._heard: dict[int, float] = {}
        self._trained: dict[int, _Trained] = {}
        self._share = 0.0
        self._before: tuple[int, float] | None = None

    def stepped(self, worker: int, steps: int, share: float) -> None:
        """A trial came on.

        Args:
            worker: whose trial, from 0.
            steps: since the last time; 0 where a trial is heard first, and the time before it was none of training.
            share: of the device's memory that its process has taken.
        """
        with self._lock:
            now = self._clock()
            if steps and worker in self._trained:
                self._trained[worker].add(steps, now - self._heard[worker])
            self._heard[worker] = now
            self._share = max(self._share, share)

    def count(self) -> int:
        """Trials that may run now; looks at what was measured."""
        with self._lock:
            if not self._settled:
                self._look()
            return self._count

    def died(self, beside: int) -> None:
        """A trial's process died, perhaps because memory was short: half as many run, where their number is ours.

        Args:
            beside: trials that ran at a time when it started. Several that die together halve the number once.
        """
        with self._lock:
            if self._measured and self._count > 1 and beside <= self._count:
                self._count, self._settled = self._count // 2, True
                self._say(f"{self._count} {_trials(self._count)} at a time from here on, in case memory was short")

    def _look(self) -> None:
        if not self._trained:
            # A process that starts takes cores from the others: what counts begins when all of them have trained.
            if len(self._heard) >= self._count:
                self._trained = {worker: _Trained() for worker in self._heard}
            return
        if all(each.seconds >= _WINDOW_SECONDS and each.steps >= _WINDOW_STEPS for each in self._trained.values()):
            self._decide(sum(each.steps / each.seconds for each in self._trained.values()))

    def _decide(self, speed: float) -> None:
        count, before = self._count, self._before
        if before is not None and speed < before[1] * (1 + (_GAIN - 1) * (count / before[0] - 1)):
            self._count, self._settled = before[0], True
            self._say(
                f"{self._count} {_trials(self._count)} at a time on this device: {before[1]:.1f} steps a second; with "
                f"{count} they are {speed:.1f}"
            )
            return
        self._before = (count, speed)
        fit = int(self._room / self._share) if self._share else self._most
        self._count = min(2 * count, self._most, max(count, fit))
        self._heard, self._trained, self._settled = {}, {}, self._count == count
        why = " (more do not fit)" if self._settled and count < self._most else ""
        follows = "" if self._settled else f"; now {self._count} are tried"
        self._say(f"{count} {_trials(count)} at a time on this device: {speed:.1f} steps a second{follows}{why}")


@dataclass
class _Trained:
    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps += steps
        self.seconds += seconds


def _trials(count: int) -> str:
    return "trial" if count == 1 else "trials"
