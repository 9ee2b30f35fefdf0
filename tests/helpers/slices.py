"""Slices of the slow tests (`./dev test --slow --slice K/N`), and the table of when each one last passed.

All slow tests take more than an hour, so nobody runs them at every change, and what nobody runs breaks unseen. A slice
is about one Nth of them. The table stands at the end of docs/reports/test-summary-*.md. A slice that fails leaves its
row.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import zlib
from pathlib import Path
from typing import NamedTuple

_HEADING = "\n## Slices\n\n"
_HEAD = "| slice | last passed | commit | tests | minutes |\n| --- | --- | --- | --- | --- |\n"
# The tests of these files need one another: what the earlier ones found is judged by a later one.
WHOLE = ("tests/megatron_training/test_megatron_sweep.py",)


class Slice(NamedTuple):
    """One of `parts` slices, numbered from 1."""

    number: int
    parts: int

    @classmethod
    def read(cls, text: str) -> Slice:
        """From "2/9". Raises ValueError where it is no slice."""
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
        if not found or int(found[1]) > int(found[2]):
            raise ValueError(f"--slice: {text!r}; expected K/N with K from 1 to N, as 2/9")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def holds(self, name: str) -> bool:
        """Whether a test of this name is in it: the same on every machine, and every test is in one slice."""
        file = name.partition("::")[0]
        return zlib.crc32((file if file in WHOLE else name).encode()) % self.parts == self.number - 1


def with_row(page: str, part: Slice, passed: int, seconds: float) -> str:
    """The page with this slice's row in the place of its earlier one; rows of another N are dropped."""
    text, _, table = page.partition(_HEADING)
    rows = dict(re.findall(rf"^\| (\d+)/{part.parts} (\|.*)$", table, re.MULTILINE))
    rows[str(part.number)] = f"| {datetime.date.today()} | {commit()} | {passed} | {seconds / 60:.0f} |"
    lines = [f"| {number}/{part.parts} {rows[number]}\n" for number in sorted(rows, key=int)]
    introduction = (
        f"`./dev test --slow --slice K/{part.parts}` runs one slice of the slow tests. A slice that failed keeps the "
        f"row of its last pass. Slices without a row have not passed alone: {_missing(rows, part.parts)}.\n\n"
    )
    return text.rstrip("\n") + "\n" + _HEADING + introduction + _HEAD + "".join(lines)


def _missing(rows: dict[str, str], count: int) -> str:
    return ", ".join(str(number) for number in range(1, count + 1) if str(number) not in rows) or "none"


def commit() -> str:
    """The checkout's commit, and which files differ from it but for the pages that runs of tests write."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("diff", "HEAD", "--name-only", "--", ":(top)", ":(top,exclude)docs/reports").split()
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        f" with changes in {', '.join(changed)}" if changed else ""
    )
