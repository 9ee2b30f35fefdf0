"""Whether a run of megatron.training may go on from a checkpoint.

Public names: `read_saved`, `check_saved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mup_megatron.checkpoints.manifest import MANIFEST, CheckpointManifest, check_resume
from mup_megatron.megatron_training.family import MULTIPLE
from mup_megatron.megatron_training.models import KEY_PREFIX
from mup_megatron.util.errors import UserError


def read_saved(path: Path) -> CheckpointManifest:
    """What a checkpoint says that it was made with.

    Args:
        path: the folder of its weights.

    Raises:
        UserError: it was not written in µP, or by an earlier version.
    """
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path}: has no {MANIFEST}, so it was not written in µP; expected a checkpoint that "
            "mup-megatron run (or a patched tree) wrote"
        )
    found = CheckpointManifest.read(path)
    if found.key_prefix != KEY_PREFIX:
        raise UserError(
            f"{path}: names tensors without {KEY_PREFIX!r}, as earlier versions of mup-megatron run did; "
            "expected a checkpoint of this version"
        )
    return found


def check_saved(
    path: Path, found: CheckpointManifest, here: CheckpointManifest, allowed: Sequence[str], tensor_parallel: int
) -> None:
    """Whether a checkpoint was written by a run like this one.

    Args:
        path: the folder of its weights.
        found: what it says (`read_saved`).
        here: what this run would say, with its `vocabulary`.
        allowed: what may differ, by dotted key (`--mup-allow-change`).
        tensor_parallel: ranks that split the embedding here.

    Raises:
        UserError: it is of another run; says what differs.
    """
    rows = found.vocabulary
    if rows is not None and rows != here.vocabulary:
        expected = f"a tensor-parallel size that divides {rows}"
        if rows % tensor_parallel == 0:
            expected = f"--make-vocab-size-divisible-by {rows // tensor_parallel}, which gives {rows} rows here"
        raise UserError(
            f"{path}: its embedding has {rows} rows for the vocabulary, this run's {here.vocabulary} "
            "(Megatron pads to a multiple of --make-vocab-size-divisible-by times the tensor-parallel size); "
            f"expected {expected}"
        )
    if rows is not None:
        allowed = (*allowed, f"model.{MULTIPLE}")
    advice = "change the options back, choose another --save and --load, or name a deliberate change with"
    check_resume(found, here, path, allowed, advice=f"{advice} --mup-allow-change KEY")
