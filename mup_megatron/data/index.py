"""megatron-core's indexed datasets as files that somebody made: what they say is checked before it is used.

Public name: `check_indexed_dataset`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from mup_megatron.util.errors import UserError, no_such_file
from mup_megatron.util.files import read_bytes

_HEADER = b"MMIDIDX\x00\x00"
_SCANNED = 10_000_000
"""Tokens of a dataset that are looked at; every batch is looked at again (batches.py)."""


def check_indexed_dataset(prefix: str, vocab_size: int) -> tuple[int, int]:
    """Checks an existing .bin/.idx pair; returns documents and tokens.

    The format is megatron-core's (datasets/indexed_dataset.py): magic, version, dtype code, sequence and document
    counts, then lengths (int32), offsets in bytes (int64) and document boundaries (int64).

    Raises:
        UserError: a file is missing, foreign or truncated, contradicts itself or the other one, or holds tokens that
            the vocabulary does not have.
    """
    from megatron.core.datasets.indexed_dataset import DType

    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UserError(f"data.data_path: {no_such_file(path)}")
    content = read_bytes(index, None)
    start = len(_HEADER) + 8 + 1 + 8 + 8
    if not content.startswith(_HEADER):
        raise UserError(f"{index}: not a Megatron dataset index (foreign header)")
    if len(content) < start:
        raise UserError(f"{index}: truncated")
    version, code, sequences, boundaries = struct.unpack("<QBQQ", content[len(_HEADER) : start])
    if version != 1 or code not in [member.value for member in DType]:
        raise UserError(f"{index}: version {version}, dtype code {code}; expected version 1 and a known dtype")
    dtype = np.dtype(DType.dtype_from_code(code))
    if not np.issubdtype(dtype, np.integer):
        raise UserError(f"{index}: its tokens are of type {dtype}; expected whole numbers")
    if len(content) < start + sequences * 12 + boundaries * 8:
        raise UserError(f"{index}: truncated ({len(content)} bytes for {sequences} sequences)")
    lengths = np.frombuffer(content, dtype=np.int32, count=sequences, offset=start).astype(np.int64)
    offsets = np.frombuffer(content, dtype=np.int64, count=sequences, offset=start + sequences * 4)
    documents = np.frombuffer(content, dtype=np.int64, count=boundaries, offset=start + sequences * 12)
    size = data.stat().st_size
    _check_places(index, data, lengths, offsets, dtype.itemsize, size)
    if boundaries < 2 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise UserError(
            f"{index}: damaged: its {boundaries} document boundaries do not go from 0 to {sequences} sequences"
        )
    sample = np.memmap(data, dtype=dtype, mode="r", shape=(min(size // dtype.itemsize, _SCANNED),))
    low, high = int(sample.min()), int(sample.max())
    if high >= vocab_size or low < 0:
        found = high if high >= vocab_size else low
        raise UserError(f"{data}: holds token {found}, but the tokenizer has {vocab_size} entries")
    return max(boundaries - 1, 0), int(lengths.sum())


def _check_places(index: Path, data: Path, lengths: np.ndarray, offsets: np.ndarray, item: int, size: int) -> None:
    """Whether every sequence lies inside the data."""
    if len(lengths) and int(lengths.min()) < 0:
        raise UserError(f"{index}: damaged: a sequence has length {int(lengths.min())}")
    tokens = int(lengths.sum())
    if tokens == 0:
        raise UserError(f"{data}: the dataset is empty")
    if size < tokens * item:
        raise UserError(f"{data}: truncated ({size} bytes for {tokens} tokens of {item})")
    wrong = (offsets < 0) | (offsets > size) | (offsets % item != 0)
    wrong |= offsets + np.where(wrong, 0, lengths * item) > size
    if wrong.any():
        number = int(wrong.argmax())
        raise UserError(
            f"{index}: damaged: sequence {number} of {int(lengths[number])} tokens begins at byte "
            f"{int(offsets[number])} of {data.name}, which has {size}"
        )
