"""Writes the checkpoints of a run, on a disk that may be full. Public name: `Saver`."""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException

from mup_megatron.checkpoints.checkpoint import Checkpoints, hash_files
from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.parallel.ranks import Rank
from mup_megatron.util.disk import full_disk, reason, short
from mup_megatron.util.errors import DiskFull
from mup_megatron.util.files import sha256_of

if TYPE_CHECKING:
    from mup_megatron.engines.state import Saving


class _Pending(NamedTuple):
    """A checkpoint that is being written: its step, and what a thread makes of this rank's part, checksums by name."""

    step: int
    saving: Saving
    sums: Future[dict[str, str]]


class Saver:
    """Checkpoints of one run, each whole or not there.

    One is begun and finished by all ranks together. In between a thread of each rank writes and hashes the rank's own
    files, from copies; it takes part in no collective.

    Args:
        checkpoints: the run's.
        begin: copies this rank's part of weights, optimizer and random states, to be written into a folder.
        size: of one checkpoint, about. Unit: bytes.
        manifest: of the run, at any step.
        samples: sequences that so many updates have trained on.
        rank: this process.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        begin: Callable[[Path], Saving],
        size: int,
        manifest: CheckpointManifest,
        samples: Callable[[int], int],
        rank: Rank,
    ) -> None:
        self._checkpoints, self._begin, self._size, self._rank = checkpoints, begin, size, rank
        self._manifest, self._samples = manifest, samples
        self._pending: _Pending | None = None

    def is_written(self) -> bool:
        """Whether `finish` has something to do, and need not wait for this rank's part."""
        return self._pending is not None and self._pending.sums.done()

    def begin(self, step: int) -> None:
        """Copies what the checkpoint of a step holds, and starts to write it. Collective, behind `finish`.

        Raises:
            DiskFull: it does not fit; those before it stay.
        """
        with self._whole_or_gone(step) as partial:
            if self._rank.is_first:
                self._checkpoints.begin(step)
            # Asked before anything is written, so that all ranks stop here together.
            missing = [short(partial, _name(step), self._size) if self._rank.is_first else None]
            torch.distributed.broadcast_object_list(missing)
            if missing[0] is not None:
                self._remove(partial)
                raise missing[0]
            saving = self._begin(partial)
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending = _Pending(step, saving, thread.submit(_write, saving))
        thread.shutdown(wait=False)

    def finish(self) -> tuple[int, Path] | None:
        """Waits for every rank's part of the checkpoint that was begun, and makes it whole. Collective.

        Returns:
            Its step, and where it is; None where there is none.

        Raises:
            DiskFull: it did not fit; those before it stay.
            CheckpointException: torch's, of whatever else went wrong on some rank.
        """
        if self._pending is None:
            return None
        (step, saving, written), self._pending = self._pending, None
        error = written.exception()
        with self._whole_or_gone(step) as partial:
            saving.finish()
            own = written.result() if error is None else (error, traceback.extract_tb(error.__traceback__))
            parts = [own] * self._rank.world_size
            torch.distributed.all_gather_object(parts, own)
            failures = {rank: part for rank, part in enumerate(parts) if isinstance(part, tuple)}
            if failures:
                raise CheckpointException("write", failures)
            if self._rank.is_first:
                sums = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
                manifest = self._manifest.replaced(step=step, samples=self._samples(step))
                self._checkpoints.commit(manifest, hash_files(partial, sums))
            torch.distributed.barrier()
        return step, partial.with_suffix("")

    @contextmanager
    def _whole_or_gone(self, step: int) -> Iterator[Path]:
        """The folder that is written into; where the disk is full, every rank says so, and nothing of it is left."""
        partial, what = self._checkpoints.partial(step), _name(step)

        def undo() -> None:
            self._remove(partial)

        with full_disk(partial, what, lambda: self._size, undo):
            try:
                yield partial
            except CheckpointException as error:  # no Exception; every rank raises it, the first knows why
                found = [reason(error, partial, what, lambda: self._size, undo) if self._rank.is_first else None]
                torch.distributed.broadcast_object_list(found)
                if found[0] is None:
                    raise
                raise found[0] from None
            except RuntimeError:
                if self._rank.is_first or partial.exists() or partial.with_suffix("").exists():
                    raise
                # A quota, or somebody else's files: the first rank saw it while it wrote, and is gone.
                raise DiskFull(f"{partial}: removed by the first rank, which says why") from None

    def _remove(self, partial: Path) -> None:
        if self._rank.is_first:
            shutil.rmtree(partial, ignore_errors=True)


def _name(step: int) -> str:
    return f"the checkpoint of step {step}"


def _write(saving: Saving) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in saving.write() if path.is_file()}
