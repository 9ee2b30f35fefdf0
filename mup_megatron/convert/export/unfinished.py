"""What a killed export leaves behind, and what the same command takes from it: the files that it had finished.

Public names: `Unfinished`, `remove_others`, `LIST`. Beside the files lies a list of them. Its first line says which
export it is; every other line is added when a file is on disk, with its size and its checksum. A list of another
export, a line that was cut off and a file that is not as its line says count as nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mup_megatron.util.files import json_object, read_text, sha256_of

LIST = "unfinished.jsonl"
"""Name of the list, which a whole export does not have."""


class Unfinished:
    """The finished files of a folder that is being written.

    Args:
        folder: which this process alone writes into. What is of no use in it is removed.
        identity: of the export: equal where every file would have the same bytes. None keeps nothing, and no list.
    """

    def __init__(self, folder: Path, identity: str | None) -> None:
        self._path, self._identity = folder / LIST, identity
        self.kept = self._verified(folder) if identity else {}
        remove_others(folder, {*self.kept, LIST} if self.kept else set())
        if not self.kept:
            self._add({"export": identity})

    def _verified(self, folder: Path) -> dict[str, tuple[str, int]]:
        """Checksum and size of the files that are as the list says, by name."""
        lines = [] if self._path.is_symlink() else _lines(self._path)
        if not lines or lines[0].get("export") != self._identity:
            return {}
        found = {}
        for line in lines[1:]:
            name, digest, size = line.get("name"), line.get("sha256"), line.get("size")
            if not isinstance(name, str) or Path(name).name != name or not isinstance(size, int):
                continue
            if _is(folder / name, size, digest):
                found[name] = (str(digest), size)
        return found

    def done(self, name: str, digest: str, size: int) -> None:
        """Notes a file that is on disk."""
        self._add({"name": name, "sha256": digest, "size": size})

    def _add(self, line: dict[str, Any]) -> None:
        if self._identity is None:
            return
        with self._path.open("ab") as file:
            file.write(b"\n" + json.dumps(line).encode())  # a line that was cut off ends here
            file.flush()
            os.fsync(file.fileno())

    def end(self) -> None:
        """Removes the list: every file is written."""
        self._path.unlink(missing_ok=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = read_text(path, errors="replace")
    except OSError:
        return []
    return [line for line in map(json_object, text.splitlines()) if line]


def _is(path: Path, size: int, digest: Any) -> bool:
    whole = not path.is_symlink() and path.is_file() and path.stat().st_size == size
    return whole and sha256_of(path) == digest


def remove_others(folder: Path, kept: set[str]) -> None:
    """Empties a folder but for the names that are kept."""
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
