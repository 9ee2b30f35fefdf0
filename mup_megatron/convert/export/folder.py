"""The folder of an export, written whole or not at all: tensors one by one into safetensors, checksums of every file.

Public names: `Part`, `ExportFolder`, `new_folder`, `refuse_existing`, `size_of`, `as_bytes`. What is written lies in
DIR.partial until it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mup_megatron.checkpoints.checkpoint import SUMS, hash_files
from mup_megatron.convert.export.unfinished import Unfinished, remove_others
from mup_megatron.util.disk import full_disk, short
from mup_megatron.util.errors import UserError, shown
from mup_megatron.util.files import open_new
from mup_megatron.util.progress import time_left

_SAY_SECONDS = 5.0
_PIECE = 1 << 24
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of a file, made when it is written.

    Args:
        name: in the file.
        shape: known before it is made.
        make: returns it, float32.
        dtype: in which it is written; None takes the file's.
        source: global name of the tensor that it is made of; None of zeros, and of several.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    dtype: torch.dtype | None = None
    source: str | None = None

    @property
    def numbers(self) -> int:
        """How many it holds."""
        return math.prod(self.shape)

    def size(self, dtype: torch.dtype) -> int:
        """Bytes of it in a file of this dtype."""
        return self.numbers * (self.dtype or dtype).itemsize


def size_of(text: str, option: str) -> int:
    """Bytes of a size such as `5GB` or `200MiB`.

    Args:
        text: a number and a unit.
        option: for the message.

    Raises:
        UserError: it is none, or not above 0.
    """
    found = re.fullmatch(r"([0-9]{1,15})([KMGT]I?B)?", text.strip().upper())
    size = int(found[1]) * _UNITS[found[2] or ""] if found else 0
    if size < 1:
        raise UserError(f"{option}: expected a size such as 5GB or 200MB, found {shown(text)}")
    return size


def refuse_existing(directory: Path) -> None:
    """Raises UserError where something has the name of the folder, or it has no name of its own."""
    if directory.is_symlink() or directory.exists():
        raise UserError(f"{directory} is there already; expected the name of a folder that is not there yet")
    if directory.name == "..":
        raise UserError(f"{directory}: expected the name of a folder that is not there yet")


def as_bytes(content: str | bytes | dict[str, Any]) -> bytes:
    """A file's content: text, bytes, or JSON."""
    if isinstance(content, dict):
        content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return content.encode("utf-8") if isinstance(content, str) else content


@contextmanager
def new_folder(
    directory: Path,
    needed: int,
    say: Callable[[str], None],
    *,
    what: str = "the export",
    sums: bool = True,
    identity: str | None = None,
) -> Iterator[ExportFolder]:
    """A folder that is there when all of it is written, and not before.

    What a process that was killed or interrupted had written of the same export is taken up again; what failed is
    removed.

    Args:
        directory: where it will be.
        needed: bytes that will be written, for what is said of a full disk.
        say: takes lines of progress.
        what: it is, for messages.
        sums: whether checksums of all files are written into it.
        identity: see `Unfinished`.

    Raises:
        UserError: something is there, another process writes it, or nothing can be written there.
        DiskFull: it does not fit; what was written of it is removed.
    """
    refuse_existing(directory)
    partial = directory.with_name(f"{directory.name}.partial")
    interrupted = False
    with _held(partial):
        try:
            with full_disk(partial, what, lambda: needed, lambda: remove_others(partial, set())):
                unfinished = Unfinished(partial, identity)
                if full := short(partial, what, needed - sum(size for _, size in unfinished.kept.values())):
                    raise full
                folder = ExportFolder(partial, say, unfinished)
                yield folder
                if sums:
                    folder.finish()
                unfinished.end()
            os.rename(partial, directory)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise UserError(f"{directory} came to be while {what} was written; expected another name") from None
        except KeyboardInterrupt:
            interrupted = identity is not None
            raise
        finally:
            if not interrupted:
                shutil.rmtree(partial, ignore_errors=True)  # which is not there where all went well
        _sync(directory.parent)


@contextmanager
def _held(partial: Path) -> Iterator[None]:
    """A folder that no other process writes into, until this one ends."""
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            partial.mkdir()
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        reason = "a part of its path is no folder" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
        raise UserError(f"cannot write to {partial}: {reason}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{partial}: another process is writing this export") from None
            # A file system without locks of folders: two exports of one name are then not told apart.
        yield
    finally:
        os.close(handle)


class ExportFolder:
    """Writes files, remembers their checksums, and says how far it is. Made by `new_folder`.

    Args:
        path: of the folder.
        say: takes lines of progress.
        unfinished: what is in it.
    """

    def __init__(self, path: Path, say: Callable[[str], None], unfinished: Unfinished) -> None:
        self.path, self._unfinished = path, unfinished
        self.files: dict[str, str] = {}
        self._say = say
        self._began = self._said = time.monotonic()
        self._written = self._total = 0
        if unfinished.kept:
            size = sum(size for _, size in unfinished.kept.values())
            say(f"{len(unfinished.kept)} files ({size / 1e9:.1f} GB) of the unfinished export are taken as they are")

    def write(self, name: str, content: str | bytes | dict[str, Any]) -> None:
        """A file of text, of bytes, or of JSON."""
        self._write(name, [as_bytes(content)])

    def write_tensors(self, parts: Sequence[Part], dtype: torch.dtype, max_shard_size: int) -> None:
        """Tensors as Hugging Face stores them: model.safetensors, or shards of it and their index.

        Args:
            parts: in order.
            dtype: float32 or bfloat16, to which each number is rounded.
            max_shard_size: bytes of tensors in a file; a tensor that is larger has a file of its own.
        """
        shards: list[list[Part]] = [[]]
        sizes = [0]
        for part in parts:
            size = part.size(dtype)
            if shards[-1] and sizes[-1] + size > max_shard_size:
                shards.append([])
                sizes.append(0)
            shards[-1].append(part)
            sizes[-1] += size
        self._total += sum(sizes)
        if len(shards) == 1:
            self._write("model.safetensors", _safetensors(shards[0], dtype))
            return
        places: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._write(name, _safetensors(shard, dtype))
            places |= {part.name: name for part in shard}
        self.write("model.safetensors.index.json", {"metadata": {"total_size": sum(sizes)}, "weight_map": places})

    def add(self, name: str) -> None:
        """A folder in it that somebody else has written."""
        self.files |= {f"{name}/{file}": digest for file, digest in hash_files(self.path / name).items()}

    def finish(self) -> None:
        """Checksums of all files, which `sha256sum -c` reads."""
        sums = "".join(f"{digest}  {name}\n" for name, digest in sorted(self.files.items()))
        self.write(SUMS, sums)
        _sync(self.path)

    def _write(self, name: str, content: Iterable[bytes | memoryview]) -> None:
        if name in self._unfinished.kept:
            self.files[name], size = self._unfinished.kept[name]
            self._total -= size
            return
        digest = hashlib.sha256()
        with open(open_new(self.path / name), "wb") as file:
            for piece in content:
                file.write(piece)
                digest.update(piece)
                self._progress(len(piece))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        self.files[name] = digest.hexdigest()
        if name != SUMS:
            self._unfinished.done(name, self.files[name], size)

    def _progress(self, written: int) -> None:
        self._written += written
        now = time.monotonic()
        if now - self._said > _SAY_SECONDS and self._total:
            self._said = now
            left = time_left(self._written, now - self._began, self._total - self._written)
            self._say(f"{self._written / 1e9:.1f} of {self._total / 1e9:.1f} GB written{left}")


def _safetensors(parts: Sequence[Part], dtype: torch.dtype) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece: its library wants all tensors of a file in memory.

    The format is eight bytes with the length of a JSON header, the header, then the numbers, little-endian
    (https://huggingface.co/docs/safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for part in parts:
        end = start + part.size(dtype)
        kind = _DTYPES[part.dtype or dtype]
        header[part.name] = {"dtype": kind, "shape": list(part.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for part in parts:
        tensor = part.make()
        if tuple(tensor.shape) != part.shape:
            raise ValueError(f"{part.name}: {tuple(tensor.shape)} was made, {part.shape} was said")
        for piece in tensor.contiguous().view(-1).split(_PIECE):
            yield piece.to(part.dtype or dtype).view(torch.uint8).numpy().data


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable, where its file system lets that be asked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
