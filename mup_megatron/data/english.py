"""`data.corpus: english`: natural text from Debian packages, fetched where the config asks for it.

Public names: `ENGLISH`, `PACKAGES`. debian.py fetches the packages. What is left is one file of JSON lines in the data
folder.

| package | what it is | licence |
| --- | --- | --- |
| debian-handbook | a book on Debian, in prose | GPL 2+, CC BY-SA 3.0 |
| dict-gcide | a dictionary of English, from Webster's of 1913 | GPL 3+ |
| libreoffice-help-en-us | the help of LibreOffice | MPL 2.0, LGPL 3+ |
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from mup_megatron.data.debian import Fetched
from mup_megatron.data.pages import Page, pages

PACKAGES = ("debian-handbook", "dict-gcide", "libreoffice-help-en-us")
_ENTRIES = 4000
"""Characters of a document of the dictionary, at least."""
_SHARE = 4
"""One document of the dictionary in so many is taken; else it would be nine tenths of the text."""


def _read(package: str, folder: Path) -> dict[str, str]:
    """Texts of a package by their checksums."""
    return {hashlib.sha256(text.encode()).hexdigest(): text for text in _DOCUMENTS[package](folder)}


def _lines(held: Sequence[dict[str, str]]) -> list[str]:
    """Every text once, in the order of their checksums, so that every part of data.split holds all three packages."""
    found = {digest: text for texts in held for digest, text in texts.items()}
    return [json.dumps({"text": found[digest]}, ensure_ascii=False) for digest in sorted(found)]


# --- text of a package ---


def _handbook(folder: Path) -> Iterator[str]:
    return _pages(folder / "usr/share/doc/debian-handbook/html/en-US", ("class", ("section", "chapter", "preface")))


def _help(folder: Path) -> Iterator[str]:
    return _pages(folder / "usr/share/libreoffice/help/en-US/text", ("id", ("DisplayArea",)))


def _pages(folder: Path, root: tuple[str, tuple[str, ...]]) -> Iterator[str]:
    """The text of every page, where it has some."""
    for _, paragraphs in pages(folder, partial(_Page, *root)):
        text = "\n\n".join(paragraph for _, paragraph in paragraphs)
        if len(text) > 200:  # fewer are titles
            yield text


def _dictionary(folder: Path) -> Iterator[str]:
    return itertools.islice(_runs_of_entries(folder), 0, None, _SHARE)


def _runs_of_entries(folder: Path) -> Iterator[str]:
    """Some entries each, in their order: dictzip is gzip, and an empty line ends a paragraph of an entry."""
    path = folder / "usr/share/dictd/gcide.dict.dz"
    if path.is_symlink() or not path.is_file():
        return
    with gzip.open(path) as file:
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    document: list[str] = []
    size = 0
    for line in _entries(lines):
        if size > _ENTRIES and line and not line[0].isspace() and not document[-1]:  # a headword
            yield "\n".join(document).strip()
            document, size = [], 0
        document.append(line)
        size += len(line) + 1
    if document:
        yield "\n".join(document).strip()


_SOURCE = re.compile(r"\s+\[[^\[\]]*(1913 Webster|WordNet|Century|PJC|\+ ?\w+)[^\[\]]*\]\s*")


def _entries(lines: list[str]) -> Iterator[str]:
    """Lines of the dictionary without its preface, and without those that say where an entry is from."""
    about = True
    for line in lines:
        if line and not line[0].isspace():
            about = line.startswith("00-database")
        if not about and not _SOURCE.fullmatch(line):
            yield line.rstrip()


_DOCUMENTS: dict[str, Callable[[Path], Iterator[str]]] = {
    "debian-handbook": _handbook,
    "dict-gcide": _dictionary,
    "libreoffice-help-en-us": _help,
}


class _Page(Page):
    """Paragraphs of the first element with an attribute of a given value, without scripts and navigation.

    Args:
        attribute: `id` or `class`.
        values: of it; one of them is among the element's.
    """

    _BLOCKS = frozenset(
        {"p", "div", "li", "td", "th", "h1", "h2", "h3", "h4", "h5", "pre", "dt", "dd", "tr", "table", "ul", "ol", "br"}
    )
    _LEFT_OUT = frozenset({"script", "style", "noscript", "nav", "head"})

    def __init__(self, attribute: str, values: tuple[str, ...]) -> None:
        super().__init__()
        self._attribute, self._values = attribute, set(values)
        self._depth = self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Goes deeper; a block begins a paragraph."""
        given = set((dict(attrs).get(self._attribute) or "").split())
        if tag in self._BLOCKS:
            self._end()
        if tag in self.EMPTY or not (self._depth or given & self._values):
            return
        self._depth += 1
        self._hidden += tag in self._LEFT_OUT

    def handle_endtag(self, tag: str) -> None:
        """Comes up again; a block ends a paragraph."""
        if tag in self._BLOCKS:
            self._end()
        if self._depth and tag not in self.EMPTY:
            self._depth -= 1
            self._hidden -= tag in self._LEFT_OUT and self._hidden > 0

    def handle_data(self, data: str) -> None:
        """Text of the paragraph."""
        if self._depth and not self._hidden:
            self._words.append(data)


ENGLISH = Fetched(
    file="english.jsonl",
    packages=PACKAGES,
    what="the English corpus",
    unit="documents",
    size=300_000_000,
    without="corpus: stdlib, or files",
    read=_read,
    lines=_lines,
)
