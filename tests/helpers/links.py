"""The pages of the checkout, and their links to what code defines: [`symbol`](file.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "evidence").glob("*.md")),
    *sorted((ROOT / "docs" / "reports").glob("*.md")),
)


def links(page: Path) -> Iterator[tuple[str, Path]]:
    """(symbol, file) of every link to code."""
    for symbol, target in re.findall(r"\[`(\w+)`\]\(([\w./-]+\.py)\)", page.read_text()):
        yield symbol, (page.parent / target).resolve()


def defines(path: Path, symbol: str) -> bool:
    """Whether a file defines a function, a class or a name of this kind."""
    return re.search(rf"^\s*(?:(?:def|class) {symbol}\b|{symbol}\b.*=)", path.read_text(), re.MULTILINE) is not None


def anchors(text: str) -> set[str]:
    """What a link may name behind # on a page: its headings, as GitHub and the offline site write them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
