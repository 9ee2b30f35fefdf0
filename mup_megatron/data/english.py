"""`data.corpus: english`: natural text from Debian packages, fetched where the config asks for it.

Public names: `fetch_english`, `ENGLISH`, `PACKAGES`. debian.py fetches the packages. What is left is one file of JSON
lines in the data folder.

| package | what it is | licence |
| --- | --- | --- |
| debian-handbook | a book on Debian, in prose | GPL 2+, CC BY-SA 3.0 |
| dict-gcide | a dictionary of English, from Webster's of 1913 | GPL 3+ |
| libreoffice-help-en-us | the help of LibreOffice | MPL 2.0, LGPL 3+ |
"""

from __future__ import annotations

import gzip
import hashlib
import html.parser
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.data.debian import NO_TEXT, Debian
from mup_megatron.util.disk import full_disk
from mup_megatron.util.files import write_whole

ENGLISH = "english.jsonl"
"""File, in the data folder, of the documents."""
PACKAGES = ("debian-handbook", "dict-gcide", "libreoffice-help-en-us")
_BYTES = 300_000_000
"""What packages, unpacked, and text take together."""
_ENTRIES = 4000
"""Characters of a document of the dictionary, at least."""
_WITHOUT = "corpus: stdlib, or files"
_SHARE = 4
"""One document of the dictionary in so many is taken; else it would be nine tenths of the text."""


def fetch_english(config: Config, directory: Path, say: Callable[[str], None]) -> None:
    """Writes the corpus into a data folder.

    Args:
        config: the run, for messages.
        directory: of the run's data; this process holds it.
        say: takes lines of progress.

    Raises:
        UserError: a package cannot be fetched; names it, and what works without a network.
    """
    path = directory / ENGLISH
    source = Debian(config, PACKAGES, _WITHOUT)
    with full_disk(path, "the English corpus", lambda: _BYTES):
        found: dict[str, str] = {}
        with source.unpacked(directory, say) as folders:
            for package, folder in folders:
                texts = {hashlib.sha256(text.encode()).hexdigest(): text for text in _DOCUMENTS[package](folder)}
                if not texts:
                    raise source.unfetched(package, NO_TEXT)
                found |= texts
        # In the order of their checksums, so that every part of data.split holds all three.
        lines = [json.dumps({"text": found[digest]}, ensure_ascii=False) for digest in sorted(found)]
        write_whole(path, "".join(f"{line}\n" for line in lines))
    say(f"{path}: {len(lines):,} documents, {path.stat().st_size / 1e6:.1f} MB")


# --- text of a package ---


def _handbook(folder: Path) -> Iterator[str]:
    return _pages(folder / "usr/share/doc/debian-handbook/html/en-US", ("class", ("section", "chapter", "preface")))


def _help(folder: Path) -> Iterator[str]:
    return _pages(folder / "usr/share/libreoffice/help/en-US/text", ("id", ("DisplayArea",)))


def _pages(folder: Path, root: tuple[str, tuple[str, ...]]) -> Iterator[str]:
    """The text of every page, where it has some."""
    for path in sorted(folder.rglob("*.html")):
        if path.is_symlink() or not path.is_file():
            continue
        page = _Page(*root)
        page.feed(path.read_text(encoding="utf-8", errors="replace"))
        page.close()
        text = "\n\n".join(page.paragraphs)
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


class _Page(html.parser.HTMLParser):
    """Paragraphs of the first element with an attribute of a given value, without scripts and navigation.

    Args:
        attribute: `id` or `class`.
        values: of it; one of them is among the element's.
    """

    _BLOCKS = frozenset(
        {"p", "div", "li", "td", "th", "h1", "h2", "h3", "h4", "h5", "pre", "dt", "dd", "tr", "table", "ul", "ol", "br"}
    )
    _LEFT_OUT = frozenset({"script", "style", "noscript", "nav", "head"})
    _EMPTY = frozenset({"br", "img", "meta", "link", "input", "hr", "base", "col", "area", "wbr"})

    def __init__(self, attribute: str, values: tuple[str, ...]) -> None:
        super().__init__(convert_charrefs=True)
        self._attribute, self._values = attribute, set(values)
        self._depth = self._hidden = 0
        self._words: list[str] = []
        self.paragraphs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Goes deeper; a block begins a paragraph."""
        given = set((dict(attrs).get(self._attribute) or "").split())
        if tag in self._BLOCKS:
            self._end()
        if tag in self._EMPTY or not (self._depth or given & self._values):
            return
        self._depth += 1
        self._hidden += tag in self._LEFT_OUT

    def handle_endtag(self, tag: str) -> None:
        """Comes up again; a block ends a paragraph."""
        if tag in self._BLOCKS:
            self._end()
        if self._depth and tag not in self._EMPTY:
            self._depth -= 1
            self._hidden -= tag in self._LEFT_OUT and self._hidden > 0

    def handle_data(self, data: str) -> None:
        """Text of the paragraph."""
        if self._depth and not self._hidden:
            self._words.append(data)

    def close(self) -> None:
        """Ends the last paragraph."""
        super().close()
        self._end()

    def _end(self) -> None:
        if text := " ".join("".join(self._words).split()):
            self.paragraphs.append(text)
        self._words = []
