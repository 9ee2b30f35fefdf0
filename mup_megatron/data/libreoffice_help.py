"""`data.corpus: libreoffice-help`: German and English paragraphs of LibreOffice's help, aligned by their ids.

Public names: `fetch_libreoffice_help`, `HELP_PAIRS`, `HELP_PACKAGES`. debian.py fetches the packages
libreoffice-help-de and libreoffice-help-en-us (MPL 2.0, LGPL 3+). A paragraph of a page has one id in every language.
What is left is one file of JSON lines in the data folder, each with a paragraph under `de` and under `en`.
"""

from __future__ import annotations

import hashlib
import html.parser
import json
from collections.abc import Callable
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.data.debian import NO_TEXT, Debian
from mup_megatron.util.disk import full_disk
from mup_megatron.util.files import write_whole

HELP_PAIRS = "libreoffice-help.jsonl"
"""File, in the data folder, of the pairs."""
HELP_PACKAGES = {"libreoffice-help-de": "de", "libreoffice-help-en-us": "en-US"}
_WITHOUT = "data.pairs, with files of your own"
_BYTES = 120_000_000
"""What packages, unpacked, and text take together."""


def fetch_libreoffice_help(config: Config, directory: Path, say: Callable[[str], None]) -> None:
    """Writes the pairs into a data folder.

    Args:
        config: the run, for messages.
        directory: of the run's data; this process holds it.
        say: takes lines of progress.

    Raises:
        UserError: a package cannot be fetched; names it, and what works without a network.
    """
    path = directory / HELP_PAIRS
    source = Debian(config, list(HELP_PACKAGES), _WITHOUT)
    with full_disk(path, "the pairs of LibreOffice's help", lambda: _BYTES):
        sides = []
        with source.unpacked(directory, say) as folders:
            for package, folder in folders:
                sides.append(paragraphs(folder / "usr/share/libreoffice/help" / HELP_PACKAGES[package] / "text"))
                if not sides[-1]:
                    raise source.unfetched(package, NO_TEXT)
        lines = _distinct(*sides)
        if not lines:
            raise source.unfetched(" and ".join(HELP_PACKAGES), "these versions of them share no paragraph")
        write_whole(path, "".join(f"{line}\n" for line in lines))
    say(f"{path}: {len(lines):,} pairs, {path.stat().st_size / 1e6:.1f} MB")


def _distinct(german: dict[str, str], english: dict[str, str]) -> list[str]:
    """Lines of the file, each once, in the order of their checksums, so that every part of data.split is of all pages.

    A paragraph that is the same in both languages is a name or a formula, or was not translated: it is left out.
    """
    lines = {
        json.dumps({"de": german[key], "en": english[key]}, ensure_ascii=False)
        for key in german.keys() & english.keys()
        if german[key] != english[key]
    }
    return sorted(lines, key=lambda line: hashlib.sha256(line.encode()).hexdigest())


def paragraphs(folder: Path) -> dict[str, str]:
    """Text of every paragraph and heading of a folder's pages, by page and id; of an id given twice the first."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.html")):
        if path.is_symlink() or not path.is_file():
            continue
        page = _Page()
        page.feed(path.read_text(encoding="utf-8", errors="replace"))
        page.close()
        for name, text in page.found:
            found.setdefault(f"{path.relative_to(folder).as_posix()}#{name}", text)
    return found


class _Page(html.parser.HTMLParser):
    """Texts of elements whose id begins with `par_` or `hd_`: what is inside one belongs to it, at any depth.

    A name that differs between systems stands there once for each: that of macOS is left out.
    """

    _EMPTY = frozenset({"br", "img", "meta", "link", "input", "hr", "base", "col", "area", "wbr"})
    _LEFT_OUT = frozenset({"script", "style"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str]] = []
        self._open: list[tuple[str, bool]] = []
        self._name: str | None = None
        self._words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a paragraph, or goes deeper in one."""
        given = dict(attrs)
        name = given.get("id") or ""
        if name.startswith(("par_", "hd_")):
            self._end()
            self._name, self._open = name, []
        if tag in self._EMPTY:
            self._words += [" "] if tag == "br" else []
        elif self._name is not None:
            classes = (given.get("class") or "").split()
            self._open.append((tag, tag in self._LEFT_OUT or "MAC" in classes))

    def handle_endtag(self, tag: str) -> None:
        """Comes up again; the end of its element ends a paragraph."""
        if self._name is None or tag in self._EMPTY:
            return
        while self._open and self._open.pop()[0] != tag:
            pass  # an element that was left open
        if not self._open:
            self._end()

    def handle_data(self, data: str) -> None:
        """Text of the paragraph."""
        if self._name is not None and not any(hidden for _, hidden in self._open):
            self._words.append(data)

    def close(self) -> None:
        """Ends the last paragraph."""
        super().close()
        self._end()

    def _end(self) -> None:
        if self._name is not None and (text := " ".join("".join(self._words).split())):
            self.found.append((self._name, text))
        self._name, self._words = None, []
