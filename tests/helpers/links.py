"""Links from the docs to lines of code. `python -m tests.helpers.links` sets their line numbers anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\[`(\w+)`\]\(([\w./-]+\.py)#L(\d+)\)")


def line_of(symbol: str, path: Path) -> int | None:
    """The line that defines a function or class."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if re.match(rf"\s*(def|class) {symbol}\b", line):
            return number
    return None


def links(page: Path) -> Iterator[tuple[str, Path, int]]:
    """(symbol, file, line) of every link to code."""
    for symbol, target, number in LINK.findall(page.read_text()):
        yield symbol, (page.parent / target).resolve(), int(number)


def fix(page: Path) -> None:
    """Rewrites the line numbers of a page."""

    def renumber(match: re.Match[str]) -> str:
        symbol, target, _ = match.groups()
        line = line_of(symbol, (page.parent / target).resolve())
        if line is None:
            raise SystemExit(f"{page.name}: {target} does not define {symbol}")
        return f"[`{symbol}`]({target}#L{line})"

    page.write_text(LINK.sub(renumber, page.read_text()))


if __name__ == "__main__":
    for page in PAGES:
        fix(page)
