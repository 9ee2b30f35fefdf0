"""docs/reports/parity.md, which `./dev parity` writes: each layout against one process, by date and versions.

A row is written as soon as its cell has passed, and takes the place of the cell's earlier row. Rows of cells that are
not run stay, under the date and the versions that they were measured with. A cell that fails loses its row. So a run
that is stopped has lost nothing, and goes on with `--since DATE`, which leaves out the cells with a row of that date or
a later one.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.util.files import write_whole
from tests.helpers.comparison import deviation
from tests.helpers.reports import machine, versions

_INTRODUCTION = """\
# Layouts against one process

Made by `./dev parity`. Each row is a model trained for 20 steps in fp32 on real text, a fresh batch each step, under a
layout, against the same model in one process. Initial values are equal to the last bit in every row; rates, epsilons
and decays are equal. The numbers are the largest relative deviations of the 20 losses and of the 20 gradient norms
before clipping; the bound is 2e-5. Growths: `mixed` (hidden x3/2, FFN x5/2, heads x2, query groups x4) and `head_size`
(hidden x2, FFN x3, head size x3/2).

A row stands under the day and the versions that it was measured with. `./dev parity -k NAME` measures some cells anew
and leaves the other rows as they are. `./dev parity --since DATE` leaves out cells with a row of that date or a later
one: with today's date a run that was stopped goes on, with an early date the cells run that have no row.
"""
_HEAD = "| architecture | growth | layout | loss | gradient norm |\n| --- | --- | --- | --- | --- |\n"
Cell = tuple[str, str, str]
"""Architecture, growth, layout."""


@dataclass
class Measured:
    """What a cell puts in: the largest relative deviations of losses and of gradient norms."""

    loss: float | None = None
    norm: float | None = None

    def add(self, results: list[dict[str, Any]], whole: dict[str, Any]) -> None:
        """From every rank's curves and one process's."""
        self.loss, self.norm = (
            max(deviation(result[name], whole[name]) for result in results) for name in ("losses", "grad_norms")
        )


@dataclass
class Page:
    """The page's rows.

    Args:
        path: of the page; None where nothing is written.
        since: leaves out cells with a row of this date (as 2026-11-23) or a later one; None runs all.
        sections: by heading, which begins with the date, the deviations of each cell as text.
    """

    path: Path | None = None
    since: str | None = None
    sections: dict[str, dict[Cell, tuple[str, str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, since: str | None = None) -> Page:
        """The page as it is; empty where there is none. Raises ValueError for a date that is none."""
        since = since and datetime.date.fromisoformat(since).isoformat()
        return cls(path, since, sections(path.read_text()) if path.exists() else {})

    @contextlib.contextmanager
    def cell(self, architecture: str, growth: str, layout: str) -> Iterator[Measured]:
        """A cell's comparison; puts in what it measured if it passes."""
        cell = (architecture, growth, layout)
        dates = [heading[:10] for heading, rows in self.sections.items() if cell in rows]
        if self.since is not None and any(date >= self.since for date in dates):
            pytest.skip(f"has a row of {max(dates)}")
        measured = Measured()
        try:
            yield measured
        except Exception:  # stopping a run is none
            self._put(cell, None)
            raise
        assert measured.loss is not None, "the cell measured nothing"
        self._put(cell, (f"{measured.loss:.1e}", f"{measured.norm:.1e}"))

    def _put(self, cell: Cell, row: tuple[str, str] | None) -> None:
        for rows in self.sections.values():
            rows.pop(cell, None)
        if row is not None:
            self.sections.setdefault(f"{datetime.date.today()}: {versions()}; {machine()}", {})[cell] = row
        if self.path is not None:
            write_whole(self.path, self.text())

    def text(self) -> str:
        """The page, what was measured last first."""
        parts = [_INTRODUCTION]
        for heading, rows in sorted(self.sections.items(), reverse=True):
            lines = "".join(f"| {' | '.join((*cell, *row))} |\n" for cell, row in rows.items())
            parts += [f"\n## {heading}\n\n{_HEAD}{lines}"] if rows else []
        return "".join(parts)


def sections(text: str) -> dict[str, dict[Cell, tuple[str, str]]]:
    """A page's rows, by heading."""
    found: dict[str, dict[Cell, tuple[str, str]]] = {}
    for part in text.split("\n## ")[1:]:
        heading, _, table = part.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
        found[heading] = {(row[0], row[1], row[2]): (row[3], row[4]) for row in rows}
    return found
