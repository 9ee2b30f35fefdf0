"""HTML pages of a package as paragraphs. Public names: `Page`, `pages`."""

from __future__ import annotations

import html.parser
from collections.abc import Callable, Iterator
from pathlib import Path


class Page(html.parser.HTMLParser):
    """Paragraphs of a page, each with its name if it has one; a subclass says where they begin and end."""

    EMPTY = frozenset({"br", "img", "meta", "link", "input", "hr", "base", "col", "area", "wbr"})
    """Elements that never end."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str | None, str]] = []
        self._name: str | None = None
        self._words: list[str] = []

    def close(self) -> None:
        """Ends the last paragraph."""
        super().close()
        self._end()

    def _end(self) -> None:
        if text := " ".join("".join(self._words).split()):
            self.found.append((self._name, text))
        self._name, self._words = None, []


def pages(folder: Path, kind: Callable[[], Page]) -> Iterator[tuple[Path, list[tuple[str | None, str]]]]:
    """Paths and paragraphs of every page under a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*.html")):
        if not path.is_symlink() and path.is_file():
            page = kind()
            page.feed(path.read_text(encoding="utf-8", errors="replace"))
            page.close()
            yield path, page.found
