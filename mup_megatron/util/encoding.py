"""Text that is not in UTF-8: where in a file it begins, and what converts it.

Public names: `encoding_problem`, `not_utf8`.
"""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

from mup_megatron.util.errors import UserError
from mup_megatron.util.files import open_regular

_PIECE_BYTES, _HEAD_BYTES = 1 << 20, 1000

# What files of these begin with. That of UTF-32 begins with that of UTF-16, and stands before it.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def encoding_problem(path: Path) -> str | None:
    """The first byte of a file that is no UTF-8, and what converts the file; None where all of it is UTF-8.

    It reads the file in pieces, whatever its size.

    Raises:
        OSError: it cannot be read.
        UserError: it is no regular file.
    """
    decoder, place, line, begin = codecs.getincrementaldecoder("utf-8")(), 0, 1, b""
    with open_regular(path) as file:
        while True:
            piece = file.read(_PIECE_BYTES)
            if not place and (name := _unmarked(piece[:_HEAD_BYTES])):
                place = piece.index(0)
                return _told(path, 1, f"byte {place} is 0x00; if this is {name.upper()} without a mark", name)
            begin = begin or piece[:4]
            held = len(decoder.getstate()[0])  # of a character that the piece before began
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                line += piece[: max(0, error.start - held)].count(b"\n")
                return _problem(path, line, place - held + error.start, error.object[error.start], begin)
            if not piece:
                return None
            place, line = place + len(piece), line + piece.count(b"\n")


def _unmarked(head: bytes) -> str | None:
    """The name of UTF-16 without a mark, whose letters of a Latin text are valid UTF-8 too, each with a zero beside."""
    if not head or head.count(0) * 4 < len(head) or head.startswith(tuple(_MARKS)):
        return None
    return "utf-16le" if head[1::2].count(0) > head[::2].count(0) else "utf-16be"


def _problem(path: Path, line: int, place: int, byte: int, begin: bytes) -> str:
    named = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)
    name = "latin1" if named is None else named.lower()
    what = f"byte {place} is 0x{byte:02x}; if this is Latin-1" if named is None else f"byte 0 is the mark of {named}"
    return _told(path, line, what, name)


def _told(path: Path, line: int, what: str, name: str) -> str:
    files = (shlex.quote(str(each)) for each in (path, path.with_name(f"{path.stem}.utf8{path.suffix}")))
    return f"{path}, line {line}: not UTF-8 text: {what}, convert it: iconv -f {name} -t utf-8 {' > '.join(files)}"


def not_utf8(path: Path) -> UserError:
    """The error to raise where a file turned out to be no UTF-8 text. Raises as `encoding_problem`."""
    return UserError(encoding_problem(path) or f"{path}: not UTF-8 text")
