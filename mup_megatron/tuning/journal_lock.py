"""The lock of a study's journal. Public name: `JournalLock`.

Optuna's own lock removes one that is old without asking whose it is. Of two that wait for a killed process, the second
removes the lock that the first has just taken. Then two write at once, and the first ends with "did not possess lock".
Here the lock names its holder; and who replaces a holder makes a link of that holder's name first, which one can.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from optuna.storages.journal import JournalFileSymlinkLock

_GRACE_SECONDS = 30.0
_AWAKE_SECONDS = 5.0  # one that waits looks at least this often; a longer gap means that it was stopped


class JournalLock(JournalFileSymlinkLock):
    """A symbolic link beside the journal, to the name of its holder: atomic on file systems that have no locks.

    Args:
        journal: the file.
        grace: seconds in which neither the lock nor the journal changes, after which the holder counts as gone.
    """

    def __init__(self, journal: Path, grace: float = _GRACE_SECONDS) -> None:
        super().__init__(str(journal))
        self.journal, self._grace = journal, grace
        self._link = Path(f"{journal}.lock")
        self._name = ""

    def acquire(self) -> bool:
        """Waits for the lock, whose holder may be gone."""
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        seen, silent, looked, pause = None, 0.0, time.monotonic(), 0.001
        try:
            while not self._make(self._link):
                now, state = time.monotonic(), (holders := self._holders(), self._changed())
                # While this process was stopped (SIGSTOP), the holder may have been too: that time is not silence.
                silent = silent + min(now - looked, _AWAKE_SECONDS) if state == seen else 0.0
                seen, looked = state, now
                if silent > self._grace and self._replace(holders):
                    break
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Lets go; of one that was silent for so long that it was replaced, the lock is another's."""
        if _target(self._link) == self._name:
            self._link.unlink(missing_ok=True)

    def _make(self, link: Path) -> bool:
        try:
            os.symlink(self._name, link)
        except FileExistsError:
            return False
        return True

    def _holders(self) -> list[str]:
        """Who holds the lock, who replaces that one, who replaces that one in turn, and so on."""
        found, link = [], self._link
        while name := _target(link):
            found.append(name)
            link = self._heir(name)
        return found

    def _heir(self, name: str) -> Path:
        """Link to who replaces a holder."""
        return Path(f"{self._link}.{Path(name).name}")

    def _changed(self) -> int:
        handle = os.open(self.journal, os.O_RDONLY)  # opened, because NFS then asks its server
        try:
            return os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)

    def _replace(self, gone: list[str]) -> bool:
        """Takes the lock of holders that are gone; False where another process was faster."""
        if not gone or not self._make(heir := self._heir(gone[-1])):
            return False
        if self._holders() != [*gone, self._name]:  # replaced, or released after all
            heir.unlink(missing_ok=True)
            return False
        with suppress(FileNotFoundError):  # this process was stopped here, and replaced itself
            heir.replace(self._link)
        for name in gone[:-1]:
            self._heir(name).unlink(missing_ok=True)
        return _target(self._link) == self._name


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return None
