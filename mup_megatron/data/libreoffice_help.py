"""`data.corpus: libreoffice-help`: German and English paragraphs of LibreOffice's help, aligned by their ids.

Public names: `HELP`, `paragraphs`. debian.py fetches the packages libreoffice-help-de and libreoffice-help-en-us
(MPL 2.0, LGPL 3+). A paragraph of a page has one id in every language. What is left is one file of JSON lines in the
data folder, each with a paragraph under `de` and under `en`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from mup_megatron.data.debian import Fetched
from mup_megatron.data.pages import Page, pages

_LANGUAGES = {"libreoffice-help-de": "de", "libreoffice-help-en-us": "en-US"}


def _read(package: str, folder: Path) -> dict[str, str]:
    return paragraphs(folder / "usr/share/libreoffice/help" / _LANGUAGES[package] / "text")


def _distinct(held: Sequence[dict[str, str]]) -> list[str]:
    """Lines of the file, each once, in the order of their checksums, so that every part of data.split is of all pages.

    A paragraph that is the same in both languages is a name or a formula, or was not translated: it is left out.
    """
    german, english = held
    lines = {
        json.dumps({"de": german[key], "en": english[key]}, ensure_ascii=False)
        for key in german.keys() & english.keys()
        if german[key] != english[key]
    }
    return sorted(lines, key=lambda line: hashlib.sha256(line.encode()).hexdigest())


def paragraphs(folder: Path) -> dict[str, str]:
    """Text of every paragraph and heading of a folder's pages, by page and id; of an id given twice the first."""
    found: dict[str, str] = {}
    for path, named in pages(folder, _Page):
        for name, text in named:
            found.setdefault(f"{path.relative_to(folder).as_posix()}#{name}", text)
    return found


class _Page(Page):
    """Texts of elements whose id begins with `par_` or `hd_`: what is inside one belongs to it, at any depth.

    A name that differs between systems stands there once for each: that of macOS is left out.
    """

    _LEFT_OUT = frozenset({"script", "style"})

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a paragraph, or goes deeper in one."""
        given = dict(attrs)
        name = given.get("id") or ""
        if name.startswith(("par_", "hd_")):
            self._end()
            self._name, self._open = name, []
        if tag in self.EMPTY:
            self._words += [" "] if tag == "br" else []
        elif self._name is not None:
            classes = (given.get("class") or "").split()
            self._open.append((tag, tag in self._LEFT_OUT or "MAC" in classes))

    def handle_endtag(self, tag: str) -> None:
        """Comes up again; the end of its element ends a paragraph."""
        if self._name is None or tag in self.EMPTY:
            return
        while self._open and self._open.pop()[0] != tag:
            pass  # an element that was left open
        if not self._open:
            self._end()

    def handle_data(self, data: str) -> None:
        """Text of the paragraph."""
        if self._name is not None and not any(hidden for _, hidden in self._open):
            self._words.append(data)


HELP = Fetched(
    file="libreoffice-help.jsonl",
    packages=tuple(_LANGUAGES),
    what="the pairs of LibreOffice's help",
    unit="pairs",
    size=120_000_000,
    without="data.pairs, with files of your own",
    read=_read,
    lines=_distinct,
)
