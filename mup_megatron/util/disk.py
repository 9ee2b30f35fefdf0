"""A full disk in one sentence: what was being written, where, and how much is missing.

Public names: `full_disk`, `reason`, `short`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mup_megatron.util.errors import DiskFull, UserError

_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What libraries say that keep the number to themselves: safetensors, SQLite, PostgreSQL.
_WORDS = ("No space left on device", "Disk quota exceeded", "disk is full", "StorageFull")
# What torch.save, numpy.save and dist_checkpointing (0.19) say of a write that failed, for whatever reason.
_FAILED_WRITE = re.compile(
    r"inline_container|PytorchStreamWriter|\d+ requested and \d+ written|Worker failure: An error is caught"
)
_BLOCK = 4096
_PROBE = 1 << 30


@contextmanager
def full_disk(
    where: Path,
    writing: str,
    needed: Callable[[], int] = lambda: _BLOCK,
    undo: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Turns whatever a full disk raises into one sentence.

    That is an OSError, what a library made of one (its cause, its words), and what torch.save and numpy.save say of a
    write that failed, where it would fail again.

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
    except Exception as error:
        if (found := reason(error, where, writing, needed, undo)) is None:
            raise
        raise found from None


def reason(
    error: BaseException,
    where: Path,
    writing: str,
    needed: Callable[[], int] = lambda: _BLOCK,
    undo: Callable[[], None] = lambda: None,
) -> DiskFull | None:
    """What to raise for what was raised; None where no full disk is behind it. As `full_disk`."""
    number, failed = _number(error)
    if number is None and not failed:
        return None
    if number is None:
        number = _probe(where, _BLOCK)  # while the disk is as it was
    undo()
    if number is None and (number := _probe(where, needed())) is None:
        return None
    return DiskFull(_sentence(where, writing, number, needed()))


def short(where: Path, writing: str, needed: int) -> DiskFull | None:
    """What to raise where something will not fit; None where it does, or where the file system does not say."""
    usage = shutil.disk_usage(_folder(where))
    if not usage.total or usage.free >= needed:
        return None
    return DiskFull(_sentence(where, writing, errno.ENOSPC, needed))


def _number(error: BaseException) -> tuple[int | None, bool]:
    """The operating system's number of a full disk, wherever it is in what was raised; whether any write failed."""
    seen: list[BaseException] = []
    left, failed = [error], False
    while left:
        one = left.pop()
        if isinstance(one, UserError):  # said already
            return None, False
        if isinstance(one, OSError) and one.errno in _NUMBERS:
            return one.errno, True
        text = str(one)
        if any(words in text for words in _WORDS):
            return errno.ENOSPC, True
        failed = failed or _FAILED_WRITE.search(text) is not None
        seen.append(one)
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):  # of CheckpointException: (exception, stack) by rank
            left += [failure[0] for failure in failures.values()]
        left += [other for other in (one.__cause__, one.__context__) if other is not None and other not in seen]
    return None, failed


def _probe(where: Path, needed: int) -> int | None:
    """The number that a file of so many bytes meets there; None if there is room for it."""
    try:
        with tempfile.TemporaryFile(dir=_folder(where)) as file:
            os.posix_fallocate(file.fileno(), 0, min(max(needed, _BLOCK), _PROBE))
    except OSError as error:
        return error.errno if error.errno in _NUMBERS else None
    return None


def _sentence(where: Path, writing: str, number: int, needed: int) -> str:
    text = f"{where}: {os.strerror(number).lower()} while writing {writing}"
    if number == errno.ENOSPC:
        text += f" ({_room(where, needed)})"
    return f"{text}; what was written before is whole, the same command goes on when there is room"


def _room(where: Path, needed: int) -> str:
    """What is needed and what there is, once nothing more could be written and what is of no use was removed."""
    stat = os.statvfs(_folder(where))
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        return f"{_size(needed)} needed, {_size(free)} free, {_size(needed - free)} missing"
    # All of that was not enough: what is needed was estimated, or there are too many files.
    inodes = f" and {stat.f_favail} inodes" if stat.f_files else ""
    return f"more is needed than the {_size(free)}{inodes} that are free"


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _folder(where: Path) -> Path:
    return next(path for path in (where.absolute(), *where.absolute().parents) if path.is_dir())
