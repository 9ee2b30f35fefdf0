"""`python -m tests.audit.planted`: runs the tests of the audit, and writes which door named which planted fault.

A pytest plugin that goes with them. A test of planted faults passes where each is named by tensor and quantity on every
rank. Of the other tests it counts runs that the audit called right. Writes docs/reports/audit.md.
"""

from __future__ import annotations

import datetime
import platform
import re
from collections import defaultdict
from collections.abc import Iterator
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
_TESTS = (
    "tests/audit",
    "tests/megatron_training/test_megatron_audit.py",
    "tests/bridge/test_planted.py",
    "tests/deepspeed/test_deepspeed_audit.py",
    "tests/mup/test_auditing.py",
)
"""All of them, slow ones too."""
_HEALTHY = ("tests/megatron_training", "tests/bridge/test_bridge.py")
"""The quick ones of these."""
_RIGHT = re.compile(r"audit: (\d+) tensors, \1 right")
_PLANTED, _RUNS = "planted", "right runs"


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

    `rows`: fault to door to layouts in which it was named, and to those in which it was not. `right`: runs by door.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, tuple[list[str], list[str]]]] = defaultdict(
            lambda: defaultdict(lambda: ([], []))
        )
        self.right: dict[str, int] = defaultdict(int)
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
            layout = next((str(params[key]) for key in ("split", "layout", "stage") if key in params), "")
            item.user_properties.append((_PLANTED, [(fault, layout) for fault in faults]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what a test said."""
        if report.when != "call":
            return
        door = next(name for folder, name in DOORS.items() if report.nodeid.startswith(folder))
        for key, value in report.user_properties:
            if key == _RUNS:
                self.right[door] += int(str(value)) * report.passed
            elif key == _PLANTED and isinstance(value, list):
                for fault, layout in value:
                    self.rows[fault][door][not report.passed].append(layout)


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


def page(found: Recorder) -> str:
    """docs/reports/audit.md."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "megatron-core", "deepspeed"))
    doors = list(DOORS.values())
    lines = [
        "# Planted faults, and who named them",
        "",
        f"Made by `python -m tests.audit.planted` on {datetime.datetime.now(tz=datetime.UTC).date()} "
        f"(Python {platform.python_version()}, {versions}).",
        "",
        "A fault is named where the audit says its tensor, or its module, and the quantity, on every rank. `3 of 3`",
        "are layouts of the engine (parallelism, ZeRO stages, optimizers). Right runs are of other tests, without a",
        "fault: the audit found nothing wrong in them.",
        "",
        "| | " + " | ".join(doors) + " |",
        "| --- |" + " --- |" * len(doors),
    ]
    totals = []
    for door in doors:
        here = [row[door] for row in found.rows.values() if door in row]
        totals.append(f"{sum(not missed for _, missed in here)} of {len(here)} faults")
    lines += [
        "| **named** | " + " | ".join(totals) + " |",
        "| **right runs** | " + " | ".join(str(found.right[door]) for door in doors) + " |",
    ]
    for fault, row in found.rows.items():
        cells = [f"{len(row[door][0])} of {sum(map(len, row[door]))}" if door in row else "" for door in doors]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """The command."""
    found = Recorder()
    alone = ("-q", "-p", "no:xdist")
    pytest.main([*_TESTS, "--all", *alone], plugins=[found])
    pytest.main([*_HEALTHY, "--deselect=tests/megatron_training/test_megatron_audit.py", *alone], plugins=[found])
    Path("docs/reports/audit.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
