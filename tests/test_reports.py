"""The summary of a test run names what damage was drawn."""

from __future__ import annotations

from types import SimpleNamespace

from tests import reports


def test_mutants_in_the_summary() -> None:
    passed = [
        SimpleNamespace(nodeid="tests/a.py::test_x", duration=1.0, user_properties=[("mutants", 1500), ("seed", 3)]),
        SimpleNamespace(nodeid="tests/a.py::test_y", duration=1.0, user_properties=[]),
        SimpleNamespace(nodeid="tests/b.py::test_z", duration=1.0, user_properties=[("mutants", 20), ("seed", "own")]),
    ]
    failed = [SimpleNamespace(nodeid="tests/b.py::test_w", duration=1.0, user_properties=[])]
    text = reports.summary({"passed": passed, "failed": failed}, "./dev test --slow", 60)
    assert "Made by `./dev test --slow` on " in text
    assert ": 3 passed, 1 failed in 1.0 minutes.\n" in text
    assert "\nFailed: `tests/b.py::test_w`.\n" in text
    assert "Damaged files and configs: 1,520." in text
    assert "| a.py::test_x | 1500 | 3 |\n| b.py::test_z | 20 | own |" in text
