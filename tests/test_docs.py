"""Pages say where things are, and things are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.links import PAGES, ROOT, line_of, links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_code_hit_their_line(page: Path) -> None:
    wrong = [
        f"{symbol} is at line {line_of(symbol, path)} of {path.name}, not {number}"
        for symbol, path, number in links(page)
        if line_of(symbol, path) != number
    ]
    assert not wrong, "run python -m tests.helpers.links"


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
