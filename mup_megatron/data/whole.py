"""Files that are there whole or not at all, whoever writes and whenever it is killed; and whether they are still those.

Public names: `File`, `partial_name`, `is_partial`, `put_in_place`, `write`, `remove_partials`, `problem`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mup_megatron.util.files import open_regular, read_object, sha256_of

_DAY_SECONDS = 86400.0

# What this process has verified, by path: it may run many trials on the same files.
_known: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class File:
    """What a file holds.

    Args:
        bytes: its size.
        sha256: of its content, in hexadecimal.
    """

    bytes: int
    sha256: str


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname())


def partial_name(name: str) -> str:
    """A name for a file in the making that no other process gives to one, on whatever node."""
    return f"{name}.{_host()}.{uuid.uuid4().hex}.partial"


def is_partial(name: str) -> bool:
    """Whether `partial_name` gave a name."""
    return re.search(r"\.[0-9a-f]{32}\.partial$", name) is not None


def remove_partials(directory: Path) -> None:
    """Removes what processes that are gone left behind; this process holds the folder.

    On a file system whose locks end at the node another node may be writing all the same: its files are left for a day.
    """
    for path in directory.glob("*.partial"):
        with suppress(OSError):
            ours = is_partial(path.name)
            if ours and (f".{_host()}." in path.name or time.time() - path.stat().st_mtime > _DAY_SECONDS):
                path.unlink()


def put_in_place(directory: Path, partials: Mapping[str, Path]) -> dict[str, File]:
    """Gives finished files their names, once they are on the disk; what they hold."""
    files = {}
    for name, path in partials.items():
        with open_regular(path) as file:
            os.fsync(file.fileno())
        files[name] = File(bytes=path.stat().st_size, sha256=sha256_of(path))
    for name, path in partials.items():
        os.replace(path, directory / name)
    return files


def problem(directory: Path, files: Mapping[str, File], verified: Path | None = None) -> str | None:
    """What is wrong with files; None if nothing is.

    Args:
        directory: theirs.
        files: what they should hold, by name.
        verified: a file that remembers which were read and found right, by size and time of change; only sizes are
            compared where it is not given.
    """
    stamps = {}
    for name, file in files.items():
        try:
            stat = (directory / name).stat()
        except OSError:
            return f"{name} is missing"
        if stat.st_size != file.bytes:
            return f"{name} has {stat.st_size} bytes instead of {file.bytes}"
        stamps[name] = {**asdict(file), "inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns}
    if verified is None:
        return None
    remembered = {**read_object(verified), **_known}
    new = {}
    for name, stamp in stamps.items():
        path = str((directory / name).resolve())
        if remembered.get(path) == stamp:
            continue
        if sha256_of(directory / name) != files[name].sha256:
            return f"{name} does not match its checksum"
        new[path] = stamp
    if new:
        _known.update(new)
        verified.parent.mkdir(parents=True, exist_ok=True)
        write(verified, json.dumps({**read_object(verified), **new}, indent=1))
    return None


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(partial_name(path.name))
    try:
        partial.write_text(text, encoding="utf-8")
        put_in_place(path.parent, {path.name: partial})
    finally:
        partial.unlink(missing_ok=True)
