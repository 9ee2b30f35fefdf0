"""A full disk in one sentence: what was being written, where, and how much is missing.

Public names: `full_disk`, `short`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mup_megatron.errors import DiskFull, UserError

_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What libraries say that keep the number to themselves: safetensors, SQLite, PostgreSQL.
_WORDS = ("No space left on device", "Disk quota exceeded", "disk is full", "StorageFull")
# torch.save does not say why it failed; where fewer bytes than this are free, the disk is full.
_LITTLE = 1 << 20
_BLOCK = 4096


@contextmanager
def full_disk(
    where: Path,
    writing: str,
    needed: Callable[[], int] = lambda: _BLOCK,
    undo: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Turns whatever a full disk raises into one sentence.

    That is an OSError, what a library made of one (its cause, its words), torch's CheckpointException, which is no
    Exception and holds what went wrong on each rank, and torch.save's RuntimeError where next to nothing is free.

    Args:
        where: file or folder that is written.
        writing: what is written, as a noun.
        needed: bytes that it takes in all, or takes still; asked where the disk is full.
        undo: removes what is of no use cut short, before what is free is counted.

    Raises:
        DiskFull: nothing more could be written.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        number = _number(error)
        if number is None and isinstance(error, RuntimeError) and _free(where) < _LITTLE:
            number = errno.ENOSPC
        if number is None:
            raise
        undo()
        raise DiskFull(_sentence(where, writing, number, needed())) from None


def short(where: Path, writing: str, needed: int) -> DiskFull | None:
    """What to raise where something will not fit; None where it does, or where the file system does not say."""
    usage = shutil.disk_usage(_existing(where))
    if not usage.total or usage.free >= needed:
        return None
    return DiskFull(_sentence(where, writing, errno.ENOSPC, needed))


def _number(error: BaseException) -> int | None:
    """The operating system's number of a full disk, wherever it is in what was raised."""
    seen: list[BaseException] = []
    left = [error]
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.append(one)
        if isinstance(one, OSError) and one.errno in _NUMBERS:
            return one.errno
        if not isinstance(one, UserError) and any(words in str(one) for words in _WORDS):
            return errno.ENOSPC
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):  # of CheckpointException: (exception, stack) by rank
            left += [failure[0] for failure in failures.values()]
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
    return None


def _sentence(where: Path, writing: str, number: int, needed: int) -> str:
    text = f"{where}: {os.strerror(number).lower()} while writing {writing}"
    if number == errno.ENOSPC:
        free = _free(where)
        text += f" ({_size(needed)} needed, {_size(free)} free"
        text += f", {_size(needed - free)} missing)" if needed > free else ")"
    return f"{text}; what was written before is whole, the same command goes on when there is room"


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _existing(where: Path) -> Path:
    where = where.absolute()
    return next(path for path in (where, *where.parents) if path.exists())


def _free(where: Path) -> int:
    return shutil.disk_usage(_existing(where)).free
