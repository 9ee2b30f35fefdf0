"""Which worker runs which trial, while workers come and go: one file per running trial, which its worker touches.

Public names: `Leases`, `Lost`, `Overtaken`.

The storages that Optuna can share over a file system have no heartbeat, and some file systems have no locks. So a
worker touches its file regularly. If a file has not changed for `seconds`, the leading worker takes the trial back. It
measures this with its own clock; clocks of different nodes are never compared. The file's name contains its owner, so
a worker that was only slow sees that it lost the trial, and stops it.
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
_AWAKE_SECONDS = 5.0  # a running leader looks at least this often; a longer gap means that it was stopped


class Lost(Exception):
    """The trial was taken back from this worker, which had been silent for too long."""


class Overtaken(Exception):
    """This worker's trial waits for one of a lower slot that was taken back; the worker should run that one first."""


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

    def again(self) -> Leases:
        """Those of another worker of this process, whose trials are not this one's."""
        return Leases(self._directory.parent, self._seconds)

    def _path(self, trial: str) -> Path:
        return self._directory / f"{trial}@{self._owner}"

    def _beat(self) -> None:
        while True:
            for path in tuple(self._held):
                with suppress(OSError):  # taken back; `check` says so
                    os.utime(path)
            time.sleep(self._seconds / _BEATS)

    def take(self, trial: str) -> None:
        """Makes the trial this worker's."""
        path = self._path(trial)
        path.touch()
        self._held.add(path)

    def check(self, trial: str) -> None:
        """Raises Lost where the trial was taken back."""
        if not self._path(trial).exists():
            raise Lost(trial)

    def drop(self, trial: str) -> None:
        """Gives the trial up."""
        path = self._path(trial)
        self._held.discard(path)
        path.unlink(missing_ok=True)

    def end(self) -> None:
        """Ends every lease: for a launch that begins, when those that are there are of workers gone."""
        for path in self._directory.glob("*@*"):
            path.unlink(missing_ok=True)

    def held(self) -> set[str]:
        """Trials that some worker has a lease of, alive or gone."""
        return {path.name.partition("@")[0] for path in self._directory.glob("*@*")}

    def lost(self, running: Iterable[str]) -> list[str]:
        """Of the running trials, those whose worker has been silent for too long; for the leader alone.

        Their leases end here. A worker that is alive after all sees this in `check`, and stops its trial.
        """
        now, seen, gone = time.monotonic(), {}, []
        # While this process was stopped (SIGSTOP), others may have been too: that time does not count as silence.
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
