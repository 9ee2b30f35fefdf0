"""A run's folder and who may write into it.

Public names: `own_run_directory`, `Busy`, `write_whole` (of files.py), `full_disk`, `CONTROLS`, `PLAN`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mup_megatron.errors import DiskFull, UserError
from mup_megatron.files import write_whole as write_whole
from mup_megatron.runtime import Rank

# torch.save does not say why it failed; where fewer bytes than this are free, the disk is full.
_LITTLE = 1 << 20

PLAN = "plan.json"
"""File, in a run's folder, of what tuning and this run's own target cost."""

CONTROLS = {"standard": "standard parametrization", "fan_in": "1/sqrt(fan-in) init with one rate"}
"""Parametrizations that a target is compared with, for people: each is a folder, in a run's, of the same target."""


class Busy(UserError):
    """Another run holds the folder."""


@contextmanager
def own_run_directory(directory: Path, rank: Rank, lock: str = ".lock") -> Iterator[None]:
    """Makes the run's folder and holds it, so that no second run writes into it. Rank 0 holds it for all.

    Args:
        directory: of the run.
        rank: this process.
        lock: name of the file that is held; a pipeline holds one of its own around its training's.

    Raises:
        Busy: another run holds it.
        UserError: it cannot be written to.
    """
    if not rank.is_first:
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {directory}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(
                f"run.dir: another run is writing to {directory}; wait for it, or choose another run.dir"
            ) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """Turns what a full disk raises into one sentence: OSError from Python, RuntimeError from torch.save.

    Raises:
        DiskFull: nothing more could be written into `directory`.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(directory, os.strerror(number).lower()) from None
        if isinstance(error, RuntimeError) and directory.exists() and shutil.disk_usage(directory).free < _LITTLE:
            raise DiskFull(directory, os.strerror(errno.ENOSPC).lower()) from None
        raise
