"""The ranges of values that a coordinate check measured, as a table: layers, experts, seeds and steps together.

Public names: `RangeRow`, `range_rows`, `range_lines`. Of the largest size alone; the others are in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mup_megatron.proof.coordinates import RANGES
from mup_megatron.proof.sums import COLUMNS, FORMATS

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_KINDS = ("overflow", "underflow")


@dataclass(frozen=True, kw_only=True)
class RangeRow:
    """The range of tensors that differ by layer or expert alone.

    Args:
        label: of the parametrization.
        quantity: of `coordinates.RANGES`.
        name: global name, with * for numbers.
        largest: absolute value.
        rms: the smallest and the largest root of a mean square.
        shares: by column of `sums.COLUMNS`: the largest share of numbers that are lost.
    """

    label: str
    quantity: str
    name: str
    largest: float
    rms: tuple[float, float]
    shares: Mapping[str, float]


def range_rows(result: Mapping[str, Any]) -> list[RangeRow]:
    """What was measured at the largest size, in the order of the model.

    Args:
        result: of `coord_check`, with ranges.
    """
    size = result["sizes"][-1]["factor"]
    found: dict[tuple[str, str, str], list[Sequence[float | None]]] = {}
    for label in result["verdicts"]:
        for quantity in RANGES:
            for cell in result["cells"]:
                if (cell["line"], cell["factor"]) != (label, size):
                    continue
                for name, steps in cell["coordinates"]["ranges"].get(quantity, {}).items():
                    found.setdefault((label, quantity, _NUMBER.sub("*", name)), []).extend(steps)
    return [_row(*key, columns) for key, columns in found.items()]


def _row(label: str, quantity: str, name: str, columns: Sequence[Sequence[float | None]]) -> RangeRow:
    """One row of many ranges; what was no finite number is infinite."""
    by_column = {
        column: [float("inf") if each is None else each for each in held]
        for column, held in zip(COLUMNS, zip(*columns, strict=True), strict=True)
    }
    rms = by_column.pop("rms")
    return RangeRow(
        label=label,
        quantity=quantity,
        name=name,
        largest=max(by_column.pop("largest")),
        rms=(min(rms), max(rms)),
        shares={column: max(held) for column, held in by_column.items()},
    )


def range_lines(result: Mapping[str, Any]) -> list[str]:
    """The table for people.

    Args:
        result: of `coord_check`, with ranges.
    """
    size, what = result["sizes"][-1]["size"], "layers" if result["axis"] == "depth" else result["over"]
    said = [
        f"ranges at {what.replace('_', ' ')} {size}, before the first step and after the last, over layers and seeds; "
        "overflow and underflow: share of numbers other than 0 beyond the format's largest, and rounded to 0"
    ]
    rows = [("of", "tensor", "", "largest", "rms", *(f"{kind} {name}" for kind in _KINDS for name in FORMATS))]
    for row in range_rows(result):
        shares = (percent(row.shares[f"{kind} {name}"]) for kind in _KINDS for name in FORMATS)
        low, high = (f"{value:.1e}" for value in row.rms)
        rms = low if low == high else f"{low} to {high}"
        quantity = row.quantity.replace("_", " ")
        rows.append((row.label, row.name, quantity, f"{row.largest:.1e}", rms, *shares))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return said + [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def percent(share: float) -> str:
    """A share as a percentage of three digits; a dash for none."""
    return f"{100 * share:.3g} %" if share else "-"
