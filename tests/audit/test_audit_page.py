"""docs/reports/audit.md, which `python -m tests.audit.planted` writes: what was planted through every door."""

from __future__ import annotations

import re
from pathlib import Path

from tests.audit.planted import DOORS, rows_of


def test_every_door_named_every_fault(repository: Path) -> None:
    """Forty or more through each, and thirty runs or more that it called right."""
    rows = rows_of((repository / "docs/reports/audit.md").read_text())
    assert rows[""] == list(DOORS.values())
    for named, right in zip(rows["**named**"], rows["**right runs**"], strict=True):
        found = re.fullmatch(r"(\d+) of (\d+) faults", named)
        assert found is not None
        assert found[1] == found[2]
        assert int(found[1]) >= 40
        assert int(right) >= 30
    layouts = [re.fullmatch(r"(\d+) of (\d+)", cell) for row in list(rows.values())[5:] for cell in row if cell]
    assert layouts
    assert all(each is not None and each[1] == each[2] for each in layouts)
