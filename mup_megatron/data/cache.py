"""megatron-core's index of samples, which it writes in place and takes for whole where its files exist.

Public name: `own_cache`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mup_megatron.data.whole import write
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_object
from mup_megatron.util.locks import hold

_LOCK = ".cache.lock"
_LIST = "whole.json"


@contextmanager
def own_cache(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Around what builds the index: nobody else builds in the folder meanwhile, and what is there is whole.

    A builder that was killed leaves files that are cut short; they are not in the list that is written when all are
    whole, and go before the next one looks.

    Args:
        directory: of the cache, of one state of one data set; one that can be read alone is taken as it is.
        say: takes a line while another process builds there.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = hold(directory / _LOCK, say, f"builds the index of samples in {directory}")
        lock.__enter__()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) and directory.is_dir():
            yield
            return
        raise UserError(f"data.cache_dir: cannot write to {directory}: {error.strerror}") from None
    try:
        listed = read_object(directory / _LIST)
        _remove_but(directory, listed)
        try:
            yield
        except BaseException:
            _remove_but(directory, listed)
            raise
        if (there := _files(directory)) != listed:
            write(directory / _LIST, json.dumps(there, indent=1))
    finally:
        lock.__exit__(None, None, None)


def _remove_but(directory: Path, listed: dict[str, int]) -> None:
    for name, size in _files(directory).items():
        if listed.get(name) != size:
            (directory / name).unlink(missing_ok=True)


def _files(directory: Path) -> dict[str, int]:
    """Sizes of the index's files, by name."""
    found = sorted(path for path in directory.iterdir() if path.name not in (_LOCK, _LIST) and path.is_file())
    return {path.name: path.stat().st_size for path in found}
