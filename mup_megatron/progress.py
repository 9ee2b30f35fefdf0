"""Progress for people: a bar where a terminal is there, plain lines where not. Public name: `Progress`."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Says what goes on; silent on every rank but the first."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._bar: Any = None
        self._task: Any = None
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        """One line."""
        if not self._speaks:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def step(self, done: int, total: int, loss: float, tokens_per_second: float, interval: int) -> None:
        """One optimizer step done."""
        if not self._speaks:
            return
        line = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        if sys.stdout.isatty():
            self._show_bar(done, total, line)
        elif done % interval == 0 or done in (1, total):
            print(f"step {done}/{total}  {line}  {time.monotonic() - self._began:.0f} s", flush=True)

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
