"""Standard output and error outlast a disk that is full and a reader that is gone: neither ends a run.

Public names: `outlast`, `failure`, `silence`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from contextlib import suppress

_lasting: list[_Lasting] = []


def silence(screens: Iterable[int]) -> None:
    """Lets what is still said to these file descriptors go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for screen in screens:
        os.dup2(nowhere, screen)
    os.close(nowhere)


class _Lasting(io.FileIO):
    """A file descriptor that goes silent where it cannot be written to."""

    failed: OSError | None = None

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BlockingIOError:
            raise
        except OSError as error:
            self.failed = self.failed or error
            silence([self.fileno()])
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlast() -> None:
    """From now on standard output and error take what is printed, whatever becomes of where it goes."""
    for name, screen in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if isinstance(before, io.TextIOWrapper) and before.fileno() == screen:
            before.flush()
            _lasting.append(_Lasting(screen, "w", closefd=False))
            unbuffered = isinstance(before.buffer, io.RawIOBase)  # PYTHONUNBUFFERED, python -u
            text = io.TextIOWrapper(
                _lasting[-1] if unbuffered else io.BufferedWriter(_lasting[-1]),
                encoding=before.encoding,
                errors="backslashreplace",  # names of files may hold bytes that are no text
                line_buffering=before.line_buffering,
                write_through=unbuffered,
            )
            setattr(sys, name, text)


def failure() -> OSError | None:
    """Why standard output is not whole; None where it is. Behind `outlast`."""
    with suppress(ValueError):  # a script closed it
        sys.stdout.flush()
    return next((each.failed for each in _lasting if each.fileno() == 1), None)
