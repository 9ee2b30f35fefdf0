"""Pages say where things are, and things are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.links import PAGES, ROOT, defines, links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_code_name_what_is_defined_there(page: Path) -> None:
    wrong = [f"{path.name} does not define {symbol}" for symbol, path in links(page) if not defines(path, symbol)]
    assert not wrong
    assert not re.findall(r"\.py#L\d+", page.read_text()), "a line number ages; name the symbol"


def test_a_symbol_that_moved_is_seen() -> None:
    formulas, table = (ROOT / "mup_megatron" / "rules" / f"{name}.py" for name in ("formulas", "table"))
    assert defines(formulas, "learning_rate")
    assert not defines(table, "learning_rate")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the repository's root, as `tests/rules/test_rules.py` and `mup_megatron/rules/formulas.py`."""
    named = set(re.findall(r"(?<![\w/.])(?:tests|mup_megatron|patches|launch|configs)/[\w./-]+\.\w+", page.read_text()))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_named_tests_exist(repository: Path) -> None:
    source = "".join(path.read_text() for path in (repository / "tests").rglob("*.py"))
    text = (repository / "docs" / "parametrization.md").read_text()
    for name in re.findall(r"`((?:test|no)_\w+)`", text):
        assert f"def {name}(" in source, name


WRITTEN = [
    page for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "patches" / "README.md") if "reports" not in page.parts
]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    """Lines of at most 120 characters, but for tables, for code, and for a link that is longer by itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "    ", "!["))]
    assert not [line for line in long if len(re.sub(r"\[[^]]*\]\([^)]*\)|`[^`]*`", "", line)) > 60]
