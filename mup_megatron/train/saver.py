"""Writes the checkpoints of a run, on a disk that may be full. Public name: `Saver`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException

from mup_megatron.checkpoints.checkpoint import Checkpoints, hash_files
from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.disk import full_disk, reason, short
from mup_megatron.util.errors import DiskFull


class Saver:
    """Checkpoints of one run, each whole or not there. Collective.

    Args:
        checkpoints: the run's.
        write: writes this rank's part of weights, optimizer and random states into a folder.
        size: of one checkpoint, about. Unit: bytes.
        manifest: of the run, at any step.
        samples: sequences that a step trains on.
        rank: this process.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        write: Callable[[Path], None],
        size: int,
        manifest: CheckpointManifest,
        samples: int,
        rank: Rank,
    ) -> None:
        self._checkpoints, self._write, self._size, self._rank = checkpoints, write, size, rank
        self._manifest, self._samples = manifest, samples

    def save(self, step: int) -> Path:
        """Writes the checkpoint of a step. Raises DiskFull where it does not fit; those before it stay."""
        checkpoints, rank = self._checkpoints, self._rank
        partial, what = checkpoints.partial(step), f"the checkpoint of step {step}"

        def undo() -> None:
            if rank.is_first:
                shutil.rmtree(partial, ignore_errors=True)

        with full_disk(partial, what, lambda: self._size, undo):
            try:
                if rank.is_first:
                    checkpoints.begin(step)
                # Asked before anything is written, so that all ranks stop here together.
                missing = [short(partial, what, self._size) if rank.is_first else None]
                torch.distributed.broadcast_object_list(missing)
                if missing[0] is not None:
                    undo()
                    raise missing[0]
                return self._write_whole(step, partial, what, undo)
            except RuntimeError:
                if rank.is_first or partial.exists() or partial.with_suffix("").exists():
                    raise
                # A quota, or somebody else's files: the first rank saw it while it wrote, and is gone.
                raise DiskFull(f"{partial}: removed by the first rank, which says why") from None

    def _write_whole(self, step: int, partial: Path, what: str, undo: Callable[[], None]) -> Path:
        rank = self._rank
        try:
            self._write(partial)
        except CheckpointException as error:  # torch's, and no Exception; every rank raises it, the first knows why
            found = [reason(error, partial, what, lambda: self._size, undo) if rank.is_first else None]
            torch.distributed.broadcast_object_list(found)
            if found[0] is None:
                raise
            raise found[0] from None
        torch.distributed.barrier()
        sums: list[dict[str, str]] = [{}] * rank.world_size
        torch.distributed.all_gather_object(sums, hash_files(partial, (rank.rank, rank.world_size)))
        path = partial.with_suffix("")
        if rank.is_first:
            manifest = self._manifest.replaced(step=step, samples=step * self._samples)
            path = self._checkpoints.commit(manifest, {name: value for part in sums for name, value in part.items()})
        torch.distributed.barrier()
        return path
