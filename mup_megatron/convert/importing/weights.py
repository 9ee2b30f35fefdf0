"""What a source gives: a step, and tensors that are read when they are written; and whether its files are whole.

Public names: `Weights`, `finite`, `check_sums`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from mup_megatron.checkpoints.checkpoint import SUMS, mismatch, read_sums
from mup_megatron.engines.saved_weights import Tensor
from mup_megatron.util.errors import UserError

Weights = tuple[int, dict[str, Tensor]]
"""A step, and tensors by key."""


def finite(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor itself. Raises UserError where it holds what is no number: training would go on from NaN."""
    if lost := tensor.numel() - int(tensor.isfinite().sum()):
        raise UserError(f"{where}: {lost} of {tensor.numel()} numbers are NaN or infinite; expected finite weights")
    return tensor


def check_sums(folder: Path, read: Iterable[str]) -> None:
    """Whether files are as the SHA256SUMS beside them says, as `export` writes it. Without one nothing is said.

    Args:
        folder: that holds it.
        read: files that are read, by their paths in the folder; each has a checksum.

    Raises:
        UserError: one is not as it says, or not listed; names the file.
    """
    if not (folder / SUMS).exists():
        return
    sums = read_sums(folder)
    if sums is None:
        raise UserError(f"{folder / SUMS}: damaged; expected lines of sha256sum")
    if unlisted := sorted(set(read) - set(sums)):
        raise UserError(f"{folder}: {unlisted[0]} is not in {SUMS}; expected a checksum of every file that is read")
    if problem := mismatch(folder, sums):
        raise UserError(f"{folder}: {problem}; expected the files that {SUMS} was written for")
