"""The pages of the offline site, as mkdocs takes them: `./dev docs` calls this, then `mkdocs build --strict`.

    python docs/site.py build/docs-source

The pages of the checkout keep their places, so that their links hold. A file of code that a page links to becomes a
page of its own with a number at each line, and a link to a symbol leads to the line that defines it. A folder becomes a
page that lists its files, and every module of mup_megatron gets a page under api/ that mkdocstrings fills from its
docstrings.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
_SYMBOL = re.compile(r"(\[`(\w+)`\]\()([\w./-]+\.py)\)")
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(?:#([^)\s]*))?\)")
_AS_IT_IS = {".png", ".html", ".json", ".jsonl"}


def pages() -> list[Path]:
    """Every page of the checkout that a reader may come to, from its root."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("patches/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
    return sorted(page.relative_to(ROOT) for page in found)


def modules() -> list[str]:
    """Every module of the library but those of the command line, which `--help` and docs/usage.md describe."""
    names = []
    for path in sorted([*ROOT.glob("mup_megatron/**/*.py"), *ROOT.glob("patches/*.py")]):
        relative = path.relative_to(ROOT)
        parts = ("mup_megatron", *relative.parts) if relative.parts[0] == "patches" else relative.parts
        name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        if "__main__" not in name and not name.startswith("mup_megatron.cli"):
            names.append(name)
    return names


def stage(target: Path) -> None:
    """Writes all pages into an empty folder.

    Args:
        target: the folder; what is there is removed.

    Raises:
        FileNotFoundError: a page links to what is not there.
    """
    shutil.rmtree(target, ignore_errors=True)
    linked: set[Path] = set()
    for page in pages():
        text = _SYMBOL.sub(partial(_at_its_line, page=page), (ROOT / page).read_text(encoding="utf-8"))
        _write(target / page, _LINK.sub(partial(_relinked, page=page, linked=linked), text))
    done: set[Path] = set()
    while linked - done:
        path = min(linked - done)
        done.add(path)
        if (ROOT / path).is_dir():
            inside = sorted(each for each in (ROOT / path).iterdir() if not each.name.startswith((".", "__")))
            linked |= {each.relative_to(ROOT) for each in inside}
            lines = [f"- [{each.name}]({_page_of(each.relative_to(ROOT)).relative_to(path)})" for each in inside]
            _write(target / _page_of(path), f"# {path}/\n\n" + "\n".join(lines) + "\n")
        elif path.suffix in _AS_IT_IS:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target / path)
        elif path.suffix != ".md":
            _write(target / _page_of(path), f"# {path}\n\n{_code(path)}\n")
    names = modules()
    for name in names:
        _write(target / "api" / f"{name}.md", f"# {name}\n\n::: {name.replace('mup_megatron.patches', 'patches')}\n")
    index = "\n".join(f"- [{name}]({name}.md)" for name in names)
    _write(target / "api" / "index.md", f"# Modules\n\nMade from the docstrings.\n\n{index}\n")


def _at_its_line(match: re.Match[str], *, page: Path) -> str:
    """A link to what a file of code defines, with the line that defines it."""
    opening, symbol, goal = match.groups()
    text = (ROOT / page.parent / goal).read_text(encoding="utf-8")
    found = re.search(rf"^\s*(?:(?:def|class) {symbol}\b|{symbol}\b.*=)", text, re.MULTILINE)
    if found is None:
        raise FileNotFoundError(f"{page}: {goal} does not define {symbol}")
    return f"{opening}{goal}#L{text.count(chr(10), 0, found.end()) + 1})"


def _relinked(match: re.Match[str], *, page: Path, linked: set[Path]) -> str:
    """A link as the site needs it; what it leads to joins `linked`."""
    opening, goal, anchor = match.groups()
    path = Path(os.path.normpath(page.parent / goal))
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{page}: no such file: {goal}")
    linked.add(path)
    line = re.fullmatch(r"L(\d+)", anchor or "")
    anchor = f"L-{line[1]}" if line else anchor
    to = os.path.relpath(_page_of(path), page.parent)
    return f"{opening}{to}#{anchor})" if anchor else f"{opening}{to})"


def _page_of(path: Path) -> Path:
    """Where a file or folder of the checkout is in the site."""
    if (ROOT / path).is_dir():
        own = path / "README.md"
        return own if (ROOT / own).is_file() else path / "index.md"
    return path if path.suffix in {".md", *_AS_IT_IS} else path.with_name(path.name + ".md")


def _code(path: Path) -> str:
    """A file as HTML with an anchor L-N at each line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = get_lexer_for_filename("x.txt")
    made: str = highlight(text, lexer, HtmlFormatter(lineanchors="L", linenos="inline", anchorlinenos=True))
    return made


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
