"""docs/reports/parity.md is written row by row, and keeps what was not measured anew (tests/helpers/parity.py)."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tests.helpers.comparison import Difference
from tests.helpers.parity import Page, sections

EARLIER = "2026-11-21: Python 3.12.1, torch 2.13.0"
PAGE = f"""# Layouts

## {EARLIER}

| architecture | growth | layout | loss | gradient norm |
| --- | --- | --- | --- | --- |
| gpt3 | mixed | TP 2, ZeRO 0 | 1.2e-07 | 5.0e-07 |
| llama | mixed | PP 2, DP 2, Megatron, plain optimizer | 0.0e+00 | 2.0e-07 |
"""
GPT3, LLAMA = ("gpt3", "mixed", "TP 2, ZeRO 0"), ("llama", "mixed", "PP 2, DP 2, Megatron, plain optimizer")
CURVES = {"losses": [4.0, 2.0], "grad_norms": [1.0, 1.0]}
# Of two ranks; the largest deviations are 1/4 and 1/2.
RESULTS = [{"losses": [4.0, 2.5], "grad_norms": [1.0, 0.5]}, {"losses": [4.0, 2.0], "grad_norms": [1.0, 1.25]}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "parity.md"
    found.write_text(PAGE)
    return found


def test_a_row_takes_the_place_of_its_cells_alone(path: Path) -> None:
    with Page.read(path).cell(*GPT3) as cell:
        cell.add(RESULTS, CURVES)
    text = path.read_text()
    found = sections(text)
    today, earlier = found  # what was measured last stands first
    assert today.startswith(f"{datetime.date.today()}: Python ")
    assert found == {today: {GPT3: ("2.5e-01", "5.0e-01")}, EARLIER: {LLAMA: ("0.0e+00", "2.0e-07")}}
    assert earlier == EARLIER
    with Page.read(path).cell(*LLAMA) as cell:
        cell.add(RESULTS, CURVES)
    assert list(sections(path.read_text())) == [today]  # no heading over an empty table
    assert list(sections(path.read_text())[today]) == [GPT3, LLAMA]


def test_a_cell_that_fails_has_no_row(path: Path) -> None:
    """What the row said is not so any more. A run that is stopped loses none."""
    with pytest.raises(KeyboardInterrupt):
        ended_by(KeyboardInterrupt(), Page.read(path))
    assert path.read_text() == PAGE
    with pytest.raises(Difference):
        ended_by(Difference("losses[1] on rank 0"), Page.read(path))
    assert sections(path.read_text()) == {EARLIER: {LLAMA: ("0.0e+00", "2.0e-07")}}


def ended_by(error: BaseException, page: Page) -> None:
    with page.cell(*GPT3) as cell:
        cell.add(RESULTS, CURVES)
        raise error


def test_it_goes_on(path: Path) -> None:
    """Cells with a row of the date or later are left out; those without one run."""
    for since, wanted in (("2026-11-21", False), ("20261121", False), ("2026-11-22", True), (None, True)):
        page = Page.read(path, since)
        try:
            with page.cell(*GPT3) as cell:
                cell.add(RESULTS, CURVES)
        except pytest.skip.Exception as skipped:
            assert not wanted
            assert "has a row of 2026-11-21" in str(skipped)
        else:
            assert wanted
            path.write_text(PAGE)
    with Page.read(path, "2026-11-21").cell("gpt3", "mixed", "TP 4, ZeRO 0") as cell:
        cell.add(RESULTS, CURVES)
    with pytest.raises(ValueError, match="yesterday"):
        Page.read(path, "yesterday")


def test_the_page_is_read_whole(repository: Path) -> None:
    """Every row of docs/reports/parity.md, as it is written."""
    path = repository / "docs" / "reports" / "parity.md"
    page = Page.read(path)
    assert page.text() == path.read_text()
    rows = [cell for rows in page.sections.values() for cell in rows]
    assert len(rows) == len(set(rows)) > 150
