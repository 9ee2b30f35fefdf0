"""Aligned text as pairs: two files line by line, or one of JSON lines.

Public names: `read_pairs`, `Pair`, `pair_files`.
What is wrong in a file is one sentence that names the line; a pair with an empty side is given as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mup_megatron.config.study import Pairs
from mup_megatron.util.encoding import not_utf8
from mup_megatron.util.errors import UserError, no_such_file, shown
from mup_megatron.util.files import open_regular


class Pair(NamedTuple):
    """A text and its translation.

    Args:
        line: of the file, or of both, from 1.
        source: what the encoder reads, without the line's end.
        target: what the decoder writes.
    """

    line: int
    source: str
    target: str


def pair_files(pairs: Pairs, key: str = "data.pairs") -> list[Path]:
    """The files, which are there.

    Args:
        pairs: what names them.
        key: what the message names.

    Raises:
        UserError: one is missing.
    """
    named = {"jsonl": pairs.jsonl} if pairs.jsonl is not None else {"source": pairs.source, "target": pairs.target}
    files = []
    for name, path in named.items():
        if path is None or not Path(path).is_file():
            raise UserError(f"{key}.{name}: {no_such_file(path or 'none')}")
        files.append(Path(path))
    return files


def read_pairs(pairs: Pairs, key: str = "data.pairs") -> Iterator[Pair]:
    """Pairs in the order of the lines; empty lines of a JSON file are none.

    Args:
        pairs: what names the files.
        key: what messages name.

    Raises:
        UserError: a file is missing, is no UTF-8 text, has more lines than the other, or a line that is no pair.
    """
    files = pair_files(pairs, key)
    return _json_pairs(files[0], pairs, key) if pairs.jsonl is not None else _text_pairs(*files)


def _text_pairs(source: Path, target: Path) -> Iterator[Pair]:
    for number, (one, other) in enumerate(zip_longest(_lines(source), _lines(target)), start=1):
        if one is None or other is None:
            counts = [sum(1 for _ in _lines(path)) for path in (source, target)]
            raise UserError(
                f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}; expected as many in both, each line "
                "of one beside its translation in the other"
            )
        yield Pair(number, one, other)


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as lines:
            for number, line in enumerate(lines, start=1):
                yield _decoded(line, path, number).rstrip("\r\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _json_pairs(path: Path, pairs: Pairs, key: str) -> Iterator[Pair]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number without end
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{path}, line {number}: expected a JSON object with a text and its translation")
        keys = {"source_key": pairs.source_key, "target_key": pairs.target_key}
        place = f"{path}, line {number}"
        yield Pair(number, *(_text(found.get(name), place, name, f"{key}.{of}") for of, name in keys.items()))


def _text(value: object, place: str, name: str, key: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: expected text under {shown(name)} ({key}), found {shown(value)}")
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise UserError(f"{place}: {shown(name)} ({key}) holds half a character (\\ud800)")
    return value
