"""Samples are read from open files, as many bytes as they have. Public name: `read_exactly`.

megatron-core maps the files into memory. A sample in random order then costs a page fault, for which the kernel reads
as far ahead as the disk's `read_ahead_kb` says: up to megabytes for a few hundred bytes, once for every sample. Its
reader without a map opens the file anew for every sample, which asks a shared file system for its metadata each time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from mup_megatron.util.errors import UserError
from mup_megatron.util.files import open_regular


def read_exactly(dataset: Any) -> None:
    """Lets a dataset of megatron-core read its local files this way.

    Args:
        dataset: a MegatronDataset, or a blend of some; None, where a part is not needed, is left alone.
    """
    for each in getattr(dataset, "datasets", [dataset]):
        stored = getattr(each, "dataset", None)
        path = Path(f"{getattr(stored, 'path_prefix', '')}.bin")
        if stored is not None and not isinstance(stored.bin_reader, _OpenFile) and path.is_file():
            stored.bin_reader = _OpenFile(path)


class _OpenFile:
    """What IndexedDataset calls a bin_reader.

    Args:
        path: of the file of tokens.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(path)  # as long as the dataset lives

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """So many numbers from a byte of the file on, [count].

        Raises:
            UserError: the file ends before, as it may when somebody replaces it during a run.
        """
        found = np.empty(count, dtype=dtype)
        left = found.view(np.uint8).data
        while left:
            read = os.preadv(self._file.fileno(), [left], offset)
            if not read:
                raise UserError(
                    f"{self._path}: ends at byte {offset}, before a sample does; was it replaced meanwhile?"
                )
            left, offset = left[read:], offset + read
        return found
