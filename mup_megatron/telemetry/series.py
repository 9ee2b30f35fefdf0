"""telemetry.jsonl, a run's file of readings: columns named once, then a line of numbers for each reading.

Public names: `SeriesFile`, `Series`, `read_series`, `series_name`. A line `{"step": 1, "series": [[name, quantity],
...]}` names the columns of the lines behind it, until another one names others; `{"step": 100, "values": [...]}` is a
reading. A value is null where it was not measured, and a string (nan, inf) where it is no finite number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mup_megatron.util.disk import full_disk
from mup_megatron.util.files import cut_lines, json_lines

_DIGITS = 6
Name = tuple[str, str]
"""Of a series: the module or tensor, and the quantity."""


_EXPERT = re.compile(r"(local_experts)\.\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")


def series_name(tensor: str) -> str:
    """The name that a tensor's series have: all experts of a layer are one."""
    return _EXPERT.sub(lambda match: f"{match[1]}.*" if match[1] else "*", tensor)


SCHEDULE: Name = ("run", "schedule")
"""The series of the step's learning rate over the one at the schedule's peak."""
CLIPPED: Name = ("run", "clipped")
"""The series of the share of steps that were clipped."""


class SeriesFile:
    """Writes a run's readings; what an interrupted run wrote after its last checkpoint is cut off.

    Args:
        path: of the file.
        start: updates done; readings of later steps are cut off.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        kept = cut_lines(path, start)
        named = [line["series"] for line in kept if "series" in line]
        self._columns: list[Name] = [(name, quantity) for name, quantity in named[-1]] if named else []

    def write(self, step: int, found: Mapping[Name, float]) -> None:
        """Adds a reading: one line, and one before it where it has series that no reading had.

        Raises:
            UserError: the disk is full.
        """
        lines = []
        if not found.keys() <= set(self._columns):
            self._columns = list(dict.fromkeys([*self._columns, *found]))
            lines.append(json.dumps({"step": step, "series": self._columns}))
        values = [_number(found.get(column)) for column in self._columns]
        lines.append(json.dumps({"step": step, "values": values}))
        with full_disk(self._path, "the run's telemetry"), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)


@dataclass
class Series:
    """A run's readings.

    Args:
        steps: of the readings, updates done.
        values: by name and quantity, one for each step; NaN where it was not measured or is no number.
    """

    steps: list[int] = field(default_factory=list)
    values: dict[Name, list[float]] = field(default_factory=dict)


def read_series(path: Path) -> Series:
    """What telemetry.jsonl has; nothing where there is none. A line that is damaged ends it."""
    series, columns = Series(), list[Name]()
    for line in json_lines(path):
        try:
            if "series" in line:
                columns = [(str(name), str(quantity)) for name, quantity in line["series"]]
                told = {}
            else:
                numbers = [math.nan if value is None else float(value) for value in line["values"]]
                told = dict(zip(columns, numbers, strict=False))
        except (LookupError, TypeError, ValueError, OverflowError):
            break
        if "series" in line:
            for column in columns:
                series.values.setdefault(column, [math.nan] * len(series.steps))
            continue
        series.steps.append(line["step"])
        for column, values in series.values.items():
            values.append(told.get(column, math.nan))
    return series
