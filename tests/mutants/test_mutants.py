"""Faults put into a copy of the tree (mutants.py) are noticed: one here, all of them in `./dev mutants`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.listed import MUTANTS
from tests.mutants.megatron_mutants import NATIVE
from tests.mutants.mutant import Mutant
from tests.mutants.mutate import broken, verdict

SAMPLE = ("rule: init without g",)


def mutate(tmp_path: Path, repository: Path, *names: str) -> tuple[int, list[dict[str, Any]], str]:
    path = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.mutants.mutate", "--json", str(path), *names]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    return result.returncode, json.loads(path.read_text()), result.stdout


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 80
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fits_the_code(repository: Path, mutant: Mutant) -> None:
    """Its place is there once, what it makes of the file is Python, and its tests exist."""
    text = (repository / mutant.file).read_text()
    assert text.count(mutant.old) == 1, mutant.old
    assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != ast.dump(ast.parse(text))
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}" in (repository / file).read_text()


def test_the_page_is_of_these_mutants(repository: Path) -> None:
    """docs/reports/mutants.md, which `./dev mutants` writes: every mutant of the list was run, and none survived."""
    page = (repository / "docs" / "reports" / "mutants.md").read_text()
    assert re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE) == [mutant.name for mutant in MUTANTS]
    counts = [len(MUTANTS) - len(NATIVE), len(NATIVE)]
    assert re.findall(r": (\d+ of \d+) caught\.\n", page) == [f"{count} of {count}" for count in counts]
    assert "survives" not in page


@pytest.mark.slow
def test_a_sample_is_caught(tmp_path: Path, repository: Path) -> None:
    status, outcomes, printed = mutate(tmp_path, repository, *SAMPLE)
    assert [outcome["name"] for outcome in outcomes if outcome["caught"]] == [*SAMPLE], printed
    assert status == 0


def test_a_test_that_crashes_has_caught_nothing() -> None:
    def failing(kind: str, test: str = "tests/test_x.py::test_y", when: str = "call") -> dict[str, Any]:
        return {"failures": [{"test": test, "kind": kind, "text": "why", "when": when}], "passed": 0}

    assert verdict(failing("AssertionError"), set())["caught"]
    assert not verdict(failing("AttributeError"), set())["caught"]
    assert not verdict(failing("AssertionError", when="setup"), set())["caught"]
    assert not verdict(failing("AssertionError"), {"tests/test_x.py::test_y"})["caught"]
    assert verdict({"failures": [], "passed": 3}, set())["text"] == "3 tests passed"


def test_a_place_that_moved_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "a = 2"):
        with (
            pytest.raises(ValueError, match=rf"x\.py reads '{old}' [02] times"),
            broken(tmp_path, "x.py", old, "a = 3"),
        ):
            pass
    assert (tmp_path / "x.py").read_text() == "a = 1\na = 1\n"


def test_documents_count_the_mutants(repository: Path) -> None:
    """What two pages say of their number is the sum of what docs/reports/mutants.md says."""
    page = (repository / "docs" / "reports" / "mutants.md").read_text()
    caught = [(int(one), int(all_)) for one, all_ in re.findall(r"(\d+) of (\d+) caught\.", page)]
    assert all(one == all_ for one, all_ in caught)
    total = sum(one for one, _ in caught)
    assert total == len(re.findall(r"^\| `[^`]+: ", page, re.MULTILINE))
    for name, said in (("verification.md", "- {} small faults were put"), ("README.md", ": {} small faults put into")):
        assert said.format(total) in (repository / "docs" / name).read_text(), name
