"""The summary of a test run names what damage was drawn, and what was skipped since when."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace

from tests.helpers import reports


def test_mutants_in_the_summary() -> None:
    passed = [
        SimpleNamespace(nodeid="tests/a.py::test_x", duration=1.0, user_properties=[("mutants", 1500), ("seed", 3)]),
        SimpleNamespace(nodeid="tests/a.py::test_y", duration=1.0, user_properties=[]),
        SimpleNamespace(nodeid="tests/b.py::test_z", duration=1.0, user_properties=[("mutants", 20), ("seed", "own")]),
    ]
    failed = [SimpleNamespace(nodeid="tests/b.py::test_w", duration=1.0, user_properties=[])]
    text = reports.summary({"passed": passed, "failed": failed}, "./dev test --slow", 60, {}, "3.12")
    assert "Made by `./dev test --slow` on " in text
    assert ": 3 passed, 1 failed in 1.0 minutes.\n" in text
    assert "\nFailed: `tests/b.py::test_w`.\n" in text
    assert "Damaged files and configs: 1,520." in text
    assert "| a.py::test_x | 1500 | 3 |\n| b.py::test_z | 20 | own |" in text


def report(name: str, *, skipped: str = "", marked: bool = True) -> SimpleNamespace:
    said = ("tests/a.py", 1, f"Skipped: {skipped}") if skipped else None
    keywords = {"skipif": 1} if marked else {}
    return SimpleNamespace(nodeid=f"tests/a.py::{name}", longrepr=said, keywords=keywords, when="call")


def test_what_is_skipped_and_when_it_last_ran() -> None:
    """Two tests need a GPU, one of which ran elsewhere; one that is slow is not skipped for good."""
    today = str(datetime.date.today())
    known = {"tests/a.py::test_x": {"skipped": {"3.12": "no GPU"}, "ran": {"3.12-te": "2026-01-02"}}}
    skipped = [
        report("test_x", skipped="no GPU"),
        report("test_y", skipped="no GPU"),
        report("test_s", skipped="slow; "),
    ]
    passed = [report("test_z"), report("test_plain", marked=False)]
    found = reports.remember(known, {"skipped": skipped, "passed": passed}, "3.12")
    assert found == {
        "tests/a.py::test_x": {"skipped": {"3.12": "no GPU"}, "ran": {"3.12-te": "2026-01-02"}},
        "tests/a.py::test_y": {"skipped": {"3.12": "no GPU"}, "ran": {}},
        "tests/a.py::test_z": {"skipped": {}, "ran": {"3.12": today}},
    }
    assert reports.skips(found, "3.12")[-1] == "| no GPU | 2 | 2026-01-02 (3.12-te) | 1 |"
    assert reports.skips(found, "3.11") == []
    again = reports.remember(found, {"passed": [report("test_y", marked=False)]}, "3.12-te", ["tests/a.py::test_x"])
    assert again["tests/a.py::test_y"]["ran"] == again["tests/a.py::test_x"]["ran"] == {"3.12-te": today}
    assert reports.skips(again, "3.12")[-1] == f"| no GPU | 2 | {today} (3.12-te) |  |"
    nothing = {"tests/a.py::test_release[NOTSET]": {"skipped": {"3.12": "not installed"}, "ran": {}}}
    found = reports.remember(nothing, {"passed": [report("test_release[0.6.2]")]}, "3.12-te")
    assert found["tests/a.py::test_release[NOTSET]"]["ran"] == {"3.12-te": today}
    assert len(found) == 1


def test_what_never_ran_is_not_counted_as_checked(repository: Path) -> None:
    """No file with a test that no environment ever ran is named among the claims that are checked."""
    known = json.loads((repository / "docs" / "reports" / "skipped-tests.json").read_text())
    for name in known:
        file, test = name.split("[")[0].split("::")
        assert f"def {test}(" in (repository / file).read_text(), (
            f"{name} is in docs/reports/skipped-tests.json; remove it there"
        )
    never = {name.split("::")[0] for name, entry in known.items() if not entry["ran"]}
    page = (repository / "docs" / "verification.md").read_text()
    assert not [name for name in sorted(never) if name in page]
