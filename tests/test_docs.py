"""Pages say where things are, and things are there."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import pytest

from tests.helpers.links import PAGES, ROOT, anchors, defines, links
from tests.helpers.sentences import sentences

NAME = operator.attrgetter("name")


@pytest.mark.parametrize("page", PAGES, ids=NAME)
def test_links_to_code_name_what_is_defined_there(page: Path) -> None:
    wrong = [f"{path.name} does not define {symbol}" for symbol, path in links(page) if not defines(path, symbol)]
    assert not wrong
    assert not re.findall(r"\.py#L\d+", page.read_text()), "a line number ages; name the symbol"


def test_a_symbol_that_moved_is_seen() -> None:
    formulas, table = (ROOT / "mup_megatron" / "rules" / f"{name}.py" for name in ("formulas", "table"))
    assert defines(formulas, "learning_rate")
    assert not defines(table, "learning_rate")


@pytest.mark.parametrize("page", PAGES, ids=NAME)
def test_links_to_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", ROOT / "patches" / "README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_to_headings_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
        goal = page.parent / target if target else page
        assert anchor in anchors(goal.read_text()), f"{target}#{anchor}"


def test_a_heading_becomes_an_anchor() -> None:
    text = "# 7. What must hold, and is tested\n\n    # a comment\n\n```text\n## an output\n```\n## `explain`: two\n"
    assert anchors(text) == {"7-what-must-hold-and-is-tested", "explain-two"}


@pytest.mark.parametrize("page", PAGES, ids=NAME)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the repository's root, as `tests/rules/test_rules.py` and `mup_megatron/rules`."""
    rooms = "tests|mup_megatron|patches|launch|configs|benchmarks"
    named = set(re.findall(rf"(?<![\w/.])(?:{rooms})/(?:[\w./-]*[\w/])(?![\w*-])", page.read_text()))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_named_tests_exist(repository: Path) -> None:
    source = "".join(path.read_text() for path in (repository / "tests").rglob("*.py"))
    names = re.findall(r"`((?:test|no)_\w+)`", (repository / "docs" / "rules-checked.md").read_text())
    assert len(names) > 20
    assert not [name for name in names if f"def {name}(" not in source]


WRITTEN = [
    page for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "patches" / "README.md") if "reports" not in page.parts
]


@pytest.mark.parametrize("page", WRITTEN, ids=NAME)
def test_prose_is_wrapped(page: Path) -> None:
    """Lines of at most 120 characters, but for tables, for code, and for a link that is longer by itself."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    ", "!["))]
    assert not [line for line in long if len(re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", line)) > 60]


FIRST_READ = {"README", "tutorial", "faq", "usage", "glossary", "megatron"}
FIRST_READ |= {"megatron-details", "parametrization", "rules-checked", "not-built"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in FIRST_READ], ids=lambda page: page.name)
def test_no_sentence_is_long(page: Path) -> None:
    """At most 40 words, so that a reader with English as a second language need not begin again."""
    assert not [sentence for sentence in sentences(page.read_text()) if len(sentence.split()) > 40]


def test_a_long_sentence_is_seen() -> None:
    """Of 41 words, over two lines and around a link; an item ends a sentence, and what is no prose does not count."""
    long = f"- One. Two {'word ' * 19}\n[two words](page.md#a-b) {'word ' * 18}`a b c`."
    other = f"| {'cell ' * 50}|\n\n    {'code ' * 50}\n\n```text\n{'out ' * 50}\n```\n# {'head ' * 50}\n"
    assert [len(sentence.split()) for sentence in sentences(other + long)] == [2, 41]
    assert [len(sentence.split()) for sentence in sentences(f"- {'word ' * 30}\n" * 2)] == [31, 31]
