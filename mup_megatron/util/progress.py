"""Progress for people: a bar on a terminal, plain lines elsewhere.

Public names: `Progress`, `time_left`, `about`, `short_count`, `short_bytes`.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any


def short_count(number: float) -> str:
    """A count with three digits: 3.72 M, 175 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def short_bytes(number: float) -> str:
    """Bytes with three digits: 3.72 MB, 175 GB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e6:.3g} MB"


def time_left(done: float, seconds: float, remaining: float) -> str:
    """`, about 12 min left`, from how long a part took; empty where nothing is known, or nothing is left.

    Args:
        done: steps, trials or FLOPs that are behind us.
        seconds: that they took.
        remaining: of the same unit.
    """
    if done <= 0 or remaining <= 0:
        return ""
    return f", {about(seconds / done * remaining)} left"


def about(seconds: float) -> str:
    """A time in two digits: `about 12 min`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"about {math.ceil(seconds)} s"


class Progress:
    """Says what goes on; silent on every rank but the first."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None  # step and time, of the first step in this process

    def say(self, line: str) -> None:
        """One line."""
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(f"{line}\n", end="", flush=True)  # in one piece: several trials' threads say lines

    def step(self, done: int, total: int, loss: float, tokens_per_second: float, interval: int) -> None:
        """One optimizer step done; the speed is the mean over the last ones."""
        if not self._speaks:
            return
        line = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        now = time.monotonic()
        self._first = self._first or (done, now)
        if sys.stdout.isatty():
            self._show_bar(done, total, line)
        elif done % interval == 0 or done in (1, total):
            left = time_left(done - self._first[0], now - self._first[1], total - done)
            print(f"step {done}/{total}  {line}  {now - self._began:.0f} s{left}", flush=True)

    def _show_bar(self, done: int, total: int, line: str) -> None:
        if self._bar is None:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("step {task.completed}/{task.total}"),
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
            )
            self._bar.start()
            self._task = self._bar.add_task(line, total=total)
        self._bar.update(self._task, completed=done, description=line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
