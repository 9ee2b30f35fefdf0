"""Faults put into a copy of the tree are noticed: a few here, others after each commit; all in `./dev mutants`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutant import Mutant, all_mutants, mutant, mutated, place
from tests.mutants.mutate import ROW, verdict
from tests.test_imports import FLOORS

MUTANTS = all_mutants()
SAMPLED = 3
QUICK = 3.0
"""Seconds of tests that a mutant of the quick sample may take, by docs/reports/mutants.md."""


def rows(repository: Path) -> dict[str, tuple[str, float]]:
    """Symbol and seconds of each mutant of the page."""
    page = (repository / "docs" / "reports" / "mutants.md").read_text()
    return {found[1]: (found[2], float(found[3])) for found in ROW.finditer(page)}


def sample(repository: Path, takes: Callable[[float], bool], count: int) -> list[str]:
    """Names from all over the list, other ones after each commit, until each has had its turn."""
    names = [name for name, (_, seconds) in rows(repository).items() if takes(seconds)]
    command = ["git", "rev-list", "--count", "HEAD"]
    commits = int(subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout)
    return [names[(commits + number * len(names) // count) % len(names)] for number in range(count)]


def check_caught(repository: Path, tmp_path: Path, *words: str) -> None:
    path = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.mutants.mutate", "--json", str(path), *words]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    outcomes = json.loads(path.read_text())
    assert outcomes, result.stderr
    assert not [one["name"] for one in outcomes if one["here"] and not one["caught"]], result.stdout
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_quick_sample_is_caught(tmp_path: Path, repository: Path) -> None:
    """Their tests are quick ones, which this suite runs on the unbroken tree."""
    names = sample(repository, lambda seconds: seconds <= QUICK, SAMPLED)
    check_caught(repository, tmp_path, "--trust", *names)


@pytest.mark.slow
def test_a_sample_is_caught(tmp_path: Path, repository: Path) -> None:
    check_caught(repository, tmp_path, *sample(repository, lambda seconds: seconds > QUICK, 1))


def test_every_room_has_some() -> None:
    rooms = set().union(*FLOORS) - {"__main__", "run"}
    assert {each.symbol.partition(".")[0] for each in MUTANTS} == rooms
    assert len({each.name for each in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("fault", MUTANTS, ids=lambda fault: fault.name)
def test_each_fits_the_code(repository: Path, fault: Mutant) -> None:
    """Its symbol is there once, and holds its place once; what it makes of the file is Python, and its tests exist."""
    path, name = place(repository, fault.symbol)
    text = path.read_text()
    assert ast.dump(ast.parse(mutated(text, name, fault))) != ast.dump(ast.parse(text))
    for test in fault.tests:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (repository / file).read_text()


def test_the_page_is_of_these_mutants(repository: Path) -> None:
    """docs/reports/mutants.md, which `./dev mutants` writes: every mutant was run, and none survived."""
    page = (repository / "docs" / "reports" / "mutants.md").read_text()
    assert [(name, symbol) for name, (symbol, _) in rows(repository).items()] == [(m.name, m.symbol) for m in MUTANTS]
    assert f": {len(MUTANTS)} of {len(MUTANTS)} caught.\n" in page
    assert "**survives**" not in page


def test_documents_count_the_mutants(repository: Path) -> None:
    for name, said in (("verification.md", "- {} small faults were put"), ("README.md", ": {} small faults put into")):
        assert said.format(len(MUTANTS)) in (repository / "docs" / name).read_text(), name


def test_a_test_that_crashes_has_caught_nothing() -> None:
    def failing(kind: str, test: str = "tests/test_x.py::test_y", when: str = "call") -> dict[str, Any]:
        return {"failures": [{"test": test, "kind": kind, "text": "why", "when": when}], "passed": 0}

    assert verdict(failing("AssertionError"), set())["caught"]
    assert not verdict(failing("AttributeError"), set())["caught"]
    assert not verdict(failing("AssertionError", when="setup"), set())["caught"]
    assert not verdict(failing("AssertionError"), {"tests/test_x.py::test_y"})["caught"]
    assert verdict({"failures": [], "passed": 3}, set())["text"] == "3 tests passed"


CODE = """
LIMIT = 3

class Box:
    def half(self, x):
        if x > 1:  # a comment
            raise ValueError("x / 2")
        return (x
                / 2)

def half(x):
    return x / 2
"""


@pytest.mark.parametrize(
    ("symbol", "old", "new", "said"),
    [
        ("Box.half", "x / 2", "x / 3", "return x / 3\n\ndef half"),
        ("Box.half", "if x > 1: raise ValueError('x / 2')", "pass", "def half(self, x):\n        pass\n"),
        ("half", "x", "x + 1", "return (x + 1) / 2"),
        ("LIMIT", "3", "4", "LIMIT = 4"),
        ("half", "", "lambda f: print", "@lambda f: print\ndef half"),
    ],
)
def test_a_fault_is_put_into_its_symbol(symbol: str, old: str, new: str, said: str) -> None:
    """However the place is written, and whatever else the file holds."""
    assert said in mutated(CODE, symbol, mutant("name", "what", symbol, old, new))


@pytest.mark.parametrize("old", ["x / 3", "x"])
def test_a_place_that_is_gone_or_twofold_is_an_error(old: str) -> None:
    with pytest.raises(ValueError, match=rf"Box\.half holds '{old}' [02] times; expected once"):
        mutated(CODE, "Box.half", mutant("name", "what", "Box.half", old, "1"))


def test_a_symbol_that_moved_is_found(tmp_path: Path) -> None:
    for folder, text in (("rules", CODE), ("util", "def other(): ...\n\ndef half(x): ...\n")):
        (tmp_path / "mup_megatron" / folder).mkdir(parents=True)
        (tmp_path / "mup_megatron" / folder / "new.py").write_text(text)
    rules = tmp_path / "mup_megatron" / "rules" / "new.py"
    assert place(tmp_path, "rules.new.half") == (rules, "half")
    assert place(tmp_path, "rules.old.Box.half") == (rules, "Box.half")
    for symbol, times in (("rules.old.half", 2), ("rules.old.gone", 0)):
        with pytest.raises(ValueError, match=rf"{symbol}: defined {times} times"):
            place(tmp_path, symbol)
