"""Every test is in one slice, and a slice that passed has a row that says when."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from tests.helpers.slices import WHOLE, Slice, commit, with_row

PAGE = "# The last run of the slow tests\n\nMade by hand.\n"


def test_every_test_is_in_one() -> None:
    names = [f"tests/a.py::test_x[{number}]" for number in range(900)]
    slices = [Slice.read(f"{number}/9") for number in range(1, 10)]
    found = [[name for name in names if part.holds(name)] for part in slices]
    assert sorted(name for part in found for name in part) == sorted(names)
    # 100 each, give or take four times the root of 100 * 8/9.
    assert all(abs(len(part) - 100) < 38 for part in found)


@pytest.mark.parametrize("file", WHOLE)
def test_tests_that_need_one_another_stay_together(file: str) -> None:
    assert (Path(__file__).parents[1] / file).is_file()
    names = [f"{file}::test_x[{number}]" for number in range(20)]
    held = [sum(part.holds(name) for name in names) for part in (Slice(number, 9) for number in range(1, 10))]
    assert sorted(held) == [0] * 8 + [20]


@pytest.mark.parametrize("text", ["0/9", "10/9", "9", "1/0", "-1/9", "a/b", "1/9/2"])
def test_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--slice: '{text}'; expected K/N")):
        Slice.read(text)


def test_a_row_takes_the_place_of_its_earlier_one() -> None:
    earlier = with_row(PAGE, Slice(2, 9), 5, 60.0)
    earlier = with_row(earlier.replace(str(datetime.date.today()), "2026-01-02"), Slice(1, 9), 70, 720.0)
    text = with_row(earlier, Slice(1, 9), 71, 600.0)
    today = datetime.date.today()
    assert text.startswith(PAGE + "\n## Slices\n")
    assert text.count("## Slices") == 1
    assert [line for line in text.splitlines() if re.match(r"\| \d/9 ", line)] == [
        f"| 1/9 | {today} | {commit()} | 71 | 10 |",
        f"| 2/9 | 2026-01-02 | {commit()} | 5 | 1 |",
    ]
    assert "have not passed alone: 3, 4, 5, 6, 7, 8, 9.\n" in text


def test_rows_of_other_slices_go() -> None:
    text = with_row(with_row(PAGE, Slice(2, 9), 5, 60.0), Slice(2, 2), 5, 60.0)
    assert "2/9" not in text
    assert "| 2/2 | " in text
