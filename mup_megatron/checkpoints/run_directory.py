"""A run's folder and who may write into it.

Public names: `own_run_directory`, `Busy`, `write_whole` (of util/files.py), `CONTROLS`, `PLAN`, `VERIFIED`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.errors import Held, UserError
from mup_megatron.util.files import write_whole as write_whole

PLAN = "plan.json"
"""File, in a run's folder, of what tuning and this run's own target cost."""

VERIFIED = "verified.json"
"""File, in a run's folder, of the data files that were compared with their checksums, as they were then."""

CONTROLS = {"standard": "standard parametrization", "fan_in": "1/sqrt(fan-in) init with one rate"}
"""Parametrizations that a target is compared with, for people: each is a folder, in a run's, of the same target."""


class Busy(Held):
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
    except FileExistsError:  # a file, or a link to what is not there
        raise UserError(f"run.dir: {directory} is no folder; expected one, or a name that is not taken") from None
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
