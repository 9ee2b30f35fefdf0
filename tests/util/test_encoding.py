"""Files that are not UTF-8: the byte that is named is the first wrong one, the command that is named converts them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mup_megatron.util.encoding import encoding_problem

PIECE = 1 << 20  # bytes that are read at once
EURO = "€".encode()  # e2 82 ac


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"caf\xe9\n", "line 1: not UTF-8 text: byte 3 is 0xe9; if this is Latin-1, convert it: "),
        (b"a\nb\n\xff", "line 3: not UTF-8 text: byte 4 is 0xff"),
        (b"ab" + EURO[:2], "line 1: not UTF-8 text: byte 2 is 0xe2"),  # the file ends within a character
        (b"\n" * (PIECE + 5) + b"\xe9", f"line {PIECE + 6}: not UTF-8 text: byte {PIECE + 5} is 0xe9"),
        (b"a" * (PIECE - 2) + EURO[:2] + b"\n", f"line 1: not UTF-8 text: byte {PIECE - 2} is 0xe2"),
        (b"a" * (PIECE - 1) + EURO + b"\n\n\xe9", f"line 3: not UTF-8 text: byte {PIECE + 4} is 0xe9"),
    ],
)
def test_the_first_wrong_byte(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "my.txt"
    path.write_bytes(content)
    assert str(encoding_problem(path)).startswith(f"{path}, {said}")


@pytest.mark.parametrize("content", [b"", b"plain\n", b"a\0bcd\n", b"a" * (PIECE - 1) + EURO * PIECE])
def test_utf8(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "my.txt"
    path.write_bytes(content)
    assert encoding_problem(path) is None


@pytest.mark.parametrize(
    ("mark", "encoding", "named"),
    [
        (b"", "latin1", "if this is Latin-1"),
        (b"", "utf-16-le", "byte 1 is 0x00; if this is UTF-16LE without a mark,"),
        (b"", "utf-16-be", "byte 0 is 0x00; if this is UTF-16BE without a mark,"),
        (b"\xff\xfe", "utf-16-le", "byte 0 is the mark of UTF-16,"),
        (b"\xfe\xff", "utf-16-be", "byte 0 is the mark of UTF-16,"),
        (b"\xff\xfe\0\0", "utf-32-le", "byte 0 is the mark of UTF-32,"),
        (b"\0\0\xfe\xff", "utf-32-be", "byte 0 is the mark of UTF-32,"),
    ],
)
def test_the_command_converts(tmp_path: Path, mark: bytes, encoding: str, named: str) -> None:
    """As the sentence has it, in a shell; the name of the file has what a shell would take apart."""
    path, text = tmp_path / "it's mine.txt", "Ein Café, fünf Gäste.\n" * 3
    path.write_bytes(mark + text.encode(encoding))
    problem = encoding_problem(path)
    assert problem is not None
    assert named in problem
    subprocess.run(["bash", "-c", problem.split("convert it: ")[1]], check=True)
    made = tmp_path / "it's mine.utf8.txt"
    assert encoding_problem(made) is None
    assert made.read_text(encoding="utf-8") == text
