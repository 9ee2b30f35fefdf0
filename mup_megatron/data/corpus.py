"""Where documents come from. Public names: `documents`, `source_files`."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.errors import UserError, shown

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "ensurepip"}


def source_files(config: Config) -> list[Path]:
    """Files that the config's documents come from, in a fixed order.

    Raises:
        UserError: a file is missing, or there is none.
    """
    if config.data.corpus == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)]
        return sorted(files)
    files = [Path(name) for name in config.data.files]
    for path in files:
        if not path.is_file():
            raise config.error("data.files", f"no such file: {path}")
    return files


def documents(config: Config) -> Iterator[str]:
    """Documents of the corpus: a .py or text file is one, a line of a .jsonl file is one.

    Raises:
        UserError: a file cannot be read as UTF-8, or a JSONL line has no text.
    """
    for path in source_files(config):
        if path.suffix in (".jsonl", ".json"):
            yield from _json_lines(path, config)
            continue
        errors = "replace" if config.data.corpus else "strict"
        try:
            text = path.read_text(encoding="utf-8", errors=errors)
        except UnicodeDecodeError:
            raise config.error("data.files", f"{path} is not UTF-8 text") from None
        if text.strip():
            yield text


def _json_lines(path: Path, config: Config) -> Iterator[str]:
    key = config.data.json_key
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8"))[key]
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {number}: not UTF-8 text") from None
            except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: no JSON, or a number without end
                raise UserError(
                    f"{path}, line {number}: expected a JSON object with text under {shown(key)} (data.json_key)"
                ) from None
            if not isinstance(text, str):
                raise UserError(f"{path}, line {number}: {shown(key)} (data.json_key) is not text")
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise UserError(f"{path}, line {number}: {shown(key)} (data.json_key) holds half a character (\\ud800)")
            if text.strip():
                yield text
