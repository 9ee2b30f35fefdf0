from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import Background


@pytest.fixture
def start() -> Iterator[Callable[..., Background]]:
    """Starts commands in the background; none outlives the test, not even one that was stopped."""
    started: list[Background] = []

    def begin(*arguments: str | Path) -> Background:
        started.append(Background(*arguments))
        return started[-1]

    yield begin
    for background in started:
        for process in background.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        background.kill()
