"""`python -m tests.audit.planted [FOLDER ...]`: runs tests of the audit, and writes which door named which fault.

A pytest plugin that goes with them. A test of planted faults passes where each is named by tensor and quantity on every
rank. Of the other tests it counts runs that the audit called right. Writes docs/reports/audit.md; of a FOLDER of tests
alone, the columns of the other doors stay.
"""

from __future__ import annotations

import datetime
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

DOORS = {
    "tests/audit/": "this project's engines",
    "tests/megatron_training/": "`mup-megatron run`",
    "tests/bridge/": "Megatron-Bridge",
    "tests/deepspeed/": "`deepspeed.initialize`",
    "tests/mup/": "`mup_megatron.mup.audit`",
}
_TESTS = {
    "tests/audit/": ["tests/audit"],
    "tests/megatron_training/": ["tests/megatron_training/test_megatron_audit.py"],
    "tests/bridge/": ["tests/bridge/test_planted.py"],
    "tests/deepspeed/": ["tests/deepspeed/test_deepspeed_audit.py"],
    "tests/mup/": ["tests/mup/test_auditing.py"],
}
"""All of these, slow ones too."""
_HEALTHY = {"tests/megatron_training/": ["tests/megatron_training"], "tests/bridge/": ["tests/bridge/test_bridge.py"]}
"""The quick ones of these."""
_PAGE = Path("docs/reports/audit.md")
_RIGHT = re.compile(r"audit: (\d+) tensors, \1 right")
_PLANTED, _RUNS = "planted", "right runs"
_MADE, _RIGHT_RUNS = "**made**", "**right runs**"


def _texts(value: Any) -> Iterator[str]:
    """Every string in what a rank gave back."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


class Recorder:
    """Which faults were named, and how many runs were right, by door.

    `rows`: fault to door to in how many layouts it was named, and of how many. `right`: runs by door. `made`: when.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[int]]] = {}
        self.right: dict[str, int] = defaultdict(int)
        self.made: dict[str, str] = {}
        self._seen = 0
        self._counts = False

    def pytest_sessionstart(self) -> None:
        """From now on, audits that tests see are counted."""
        from mup_megatron.mup.auditing import ModelAudit
        from tests.helpers.distributed import Ranks

        if self._counts:
            return
        self._counts = True
        run, end_step = Ranks.run, ModelAudit.end_step

        def counted(*args: Any, **kwargs: Any) -> Any:
            results = run(*args, **kwargs)
            self._seen += any(_RIGHT.search(text) for text in _texts(results))
            return results

        def counted_step(audit: Any, *args: Any) -> None:
            end_step(audit, *args)
            self._seen += not audit.audit.wrong

        for owner, name, function in ((Ranks, "run", counted), (ModelAudit, "end_step", counted_step)):
            setattr(owner, name, function)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Iterator[None]:
        """Says of a test what was planted, or how many runs were right."""
        self._seen = 0
        yield
        params = item.callspec.params if hasattr(item, "callspec") else {}
        faults = _faults(item.name, params)
        if not faults:
            item.user_properties.append((_RUNS, self._seen))
        else:
            item.user_properties.append((_PLANTED, faults))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what a test said."""
        if report.when != "call":
            return
        door = next(name for folder, name in DOORS.items() if report.nodeid.startswith(folder))
        for key, value in report.user_properties:
            if key == _RUNS:
                self.right[door] += int(str(value)) * report.passed
            elif key == _PLANTED and isinstance(value, list):
                for fault in value:
                    count = self.rows.setdefault(fault, {}).setdefault(door, [0, 0])
                    count[0] += report.passed
                    count[1] += 1


def _faults(test: str, params: dict[str, Any]) -> list[str]:
    from tests.helpers import plain_faults
    from tests.helpers.megatron_faults import ONE_RATE

    if "resets_rates" in test:
        return [ONE_RATE]
    if "planted" not in test:
        return []
    if "stage" in params:
        return list(plain_faults.FAULTS)
    return [params["fault"]] if "fault" in params else list(params["faults"])


def rows_of(text: str) -> dict[str, list[str]]:
    """Cells of the page's table by their row's name."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in cells}


def keep(found: Recorder, text: str, doors: Sequence[str]) -> None:
    """Puts in what a page says of some doors."""
    rows = rows_of(text)
    for number, door in enumerate(DOORS.values()):
        if door not in doors:
            continue
        found.right[door], found.made[door] = int(rows[_RIGHT_RUNS][number]), rows[_MADE][number]
        for fault, cells in rows.items():
            if told := re.fullmatch(r"(\d+) of (\d+)", cells[number]):
                found.rows.setdefault(fault, {})[door] = [int(told[1]), int(told[2])]


def page(found: Recorder) -> str:
    """docs/reports/audit.md."""
    doors = list(DOORS.values())
    totals = []
    for door in doors:
        here = [row[door] for row in found.rows.values() if door in row]
        totals.append(f"{sum(named == of for named, of in here)} of {len(here)} faults")
    lines = [
        "# Planted faults, and who named them",
        "",
        "Made by `python -m tests.audit.planted`. A fault is named where the audit says its tensor, or its module, and",
        "the quantity, on every rank. `3 of 3` are layouts of the engine (parallelism, ZeRO stages, optimizers). Right",
        "runs are of other tests, without a fault: the audit found nothing wrong in them.",
        "",
        "| | " + " | ".join(doors) + " |",
        "| --- |" + " --- |" * len(doors),
        f"| {_MADE} | " + " | ".join(found.made[door] for door in doors) + " |",
        "| **named** | " + " | ".join(totals) + " |",
        f"| {_RIGHT_RUNS} | " + " | ".join(str(found.right[door]) for door in doors) + " |",
    ]
    for fault, row in found.rows.items():
        cells = ["{} of {}".format(*row[door]) if door in row else "" for door in doors]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """The command."""
    asked, found, alone = sys.argv[1:] or list(DOORS), Recorder(), ("-q", "-p", "no:xdist")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "deepspeed"))
    today = datetime.datetime.now(tz=datetime.UTC).date()
    for folder in asked:
        pytest.main([*_TESTS[folder], "--all", *alone], plugins=[found])
        if folder in _HEALTHY:
            others = [f"--deselect={each}" for each in _TESTS[folder]]
            pytest.main([*_HEALTHY[folder], *others, *alone], plugins=[found])
        found.made[DOORS[folder]] = f"{today}, Python {platform.python_version()}, {versions}"
    if others := [name for folder, name in DOORS.items() if folder not in asked]:
        keep(found, _PAGE.read_text(encoding="utf-8"), others)
    _PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
