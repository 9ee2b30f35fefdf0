"""One process at a time, over all nodes that see a folder. Public name: `hold`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_SECONDS = 0.2
_SAY_SECONDS = 60.0


@contextmanager
def hold(path: Path, say: Callable[[str], None], doing: str) -> Iterator[None]:
    """Waits until no other process holds the file, and holds it; the operating system lets go when the process ends.

    Args:
        path: of the lock's file, which stays; it names its last holder.
        say: takes a line where there is somebody to wait for, and every minute.
        doing: what the holder does, for that line, e.g. ``prepares runs/demo/data``.

    Raises:
        OSError: the file cannot be opened for writing, or its file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait(handle, path, say, doing)
        with suppress(OSError):  # a full disk; nobody reads it but people
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(handle)


def _wait(handle: int, path: Path, say: Callable[[str], None], doing: str) -> None:
    said = None
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OSError(error.errno, f"no locks ({error.strerror})", str(path)) from None
        if said is None or time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            say(f"waiting for {_holder(handle)}, which {doing}")
        time.sleep(_POLL_SECONDS)


def _holder(handle: int) -> str:
    try:
        found = json.loads(os.pread(handle, 1000, 0))
        return f"process {int(found['process'])} on {found['host']}"
    except (ValueError, KeyError, TypeError):  # it holds the file, and has not written yet
        return "another process"
