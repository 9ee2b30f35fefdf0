"""Who runs which trial, where workers come and go: a file per running trial, which its worker touches.

Public names: `Leases`, `Lost`, `Overtaken`.

Storages that Optuna can share over a file system have no heartbeat, and a file lock says nothing on a file system
without locks. So a worker touches its file, and the worker that leads takes a trial back whose file has not changed for
`seconds` by the leader's own clock: clocks of different nodes are never compared. The file's name holds its owner, so
that a worker that was only slow notices, and lets go.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_BEATS = 6
_AWAKE_SECONDS = 5.0  # the longest that the leader, awake, does not look


class Lost(Exception):
    """The trial was taken back from this worker, which had been silent for too long."""


class Overtaken(Exception):
    """A trial waits for one of a lower slot that was taken back, which this worker should rather run."""


class Leases:
    """The leases of a study's trials, as one worker sees them.

    Args:
        directory: of the study; shared by all workers.
        seconds: of silence after which a trial counts as lost.
    """

    def __init__(self, directory: Path, seconds: float) -> None:
        self._directory, self._seconds = directory / "leases", seconds
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._held: set[Path] = set()
        self._seen: dict[str, tuple[int | None, float]] = {}
        self._looked = time.monotonic()
        self._directory.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()

    def _path(self, trial: str) -> Path:
        return self._directory / f"{trial}@{self._owner}"

    def _beat(self) -> None:
        while True:
            for path in tuple(self._held):
                with suppress(OSError):  # taken back; `check` says so
                    os.utime(path)
            time.sleep(self._seconds / _BEATS)

    def take(self, trial: str) -> None:
        """From now on this worker's."""
        path = self._path(trial)
        path.touch()
        self._held.add(path)

    def check(self, trial: str) -> None:
        """Raises Lost where the trial was taken back."""
        if not self._path(trial).exists():
            raise Lost(trial)

    def drop(self, trial: str) -> None:
        """No longer this worker's."""
        path = self._path(trial)
        self._held.discard(path)
        path.unlink(missing_ok=True)

    def lost(self, running: Iterable[str]) -> list[str]:
        """Of the running trials, those whose worker has been silent for too long; for the leader alone.

        Their leases end here, so that a worker that lives after all lets go.
        """
        now, seen, gone = time.monotonic(), {}, []
        # What this process slept through (SIGSTOP) is nobody's silence: maybe all did.
        slept, self._looked = max(0.0, now - self._looked - _AWAKE_SECONDS), now
        for trial in running:
            beat = self._last_beat(trial)
            known, since = self._seen.get(trial, (beat, now))
            seen[trial] = (beat, now if known != beat else min(now, since + slept))
            if now - seen[trial][1] > self._seconds:
                del seen[trial]
                for path in self._directory.glob(f"{trial}@*"):
                    path.unlink(missing_ok=True)
                gone.append(trial)
        self._seen = seen
        return gone

    def _last_beat(self, trial: str) -> int | None:
        beats = []
        for path in self._directory.glob(f"{trial}@*"):
            with suppress(FileNotFoundError):
                beats.append(path.stat().st_mtime_ns)
        return max(beats, default=None)
