"""The picture of a coordinate check's ranges: sizes of values beside the formats that would hold them.

Public name: `draw_ranges`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.proof.coordinates import RANGES
from mup_megatron.proof.ranges import RangeRow, percent, range_rows
from mup_megatron.proof.sums import FORMATS
from mup_megatron.report.pictures import load_pyplot, save_figure

_BANDS = {"e4m3": (2.0**-9, 448.0, "#55a868"), "e5m2": (2.0**-16, 57344.0, "#4878a8")}
"""From the smallest to the largest number of a format; bfloat16's lie beyond the picture."""
_LITTLE = 1e-3
"""Share below which a cell has no room for its digits."""
_COLORS = dict(zip(RANGES, ("#222222", "#4878a8", "#c44e52", "#dd8452"), strict=True))


def draw_ranges(result: Mapping[str, Any], path: Path) -> Path:
    """Draws root mean squares and largest values per tensor, one panel per parametrization, and what formats lose.

    Args:
        result: of proof.coord_check, with ranges.
        path: of the picture.

    Returns:
        The same path.
    """
    rows = range_rows(result)
    names = list(dict.fromkeys((row.quantity, row.name) for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    pyplot = load_pyplot()
    figure, grid = pyplot.subplots(
        1,
        2 * len(labels),
        figsize=(3 + 4.6 * len(labels), 1.6 + 0.16 * len(names)),
        width_ratios=[3, 2] * len(labels),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for number, label in enumerate(labels):
        held = [row for row in rows if row.label == label]
        _draw_sizes(grid[0][2 * number], held, names, label)
        _draw_shares(pyplot, grid[0][2 * number + 1], held, names)
    sizes = list(grid[0][::2])
    limits = [panel.get_xlim() for panel in sizes]
    for panel in sizes:
        panel.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    first = grid[0][0]
    first.set_yticks(
        range(len(names)), [f"{name}  {quantity.replace('_', ' ')}" for quantity, name in names], fontsize=6
    )
    first.set_ylim(len(names) - 0.5, -0.5)
    handles, texts = first.get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)
    return path


def _draw_sizes(panel: Any, rows: Sequence[RangeRow], names: Sequence[tuple[str, str]], label: str) -> None:
    """A line per tensor, from its smallest root mean square to its largest value."""
    for name, (low, high, color) in _BANDS.items():
        panel.axvspan(low, high, color=color, alpha=0.12, lw=0, label=f"what {name} holds")
    panel.axvline(1.0, color="0.5", lw=0.7)
    labelled = set()
    for row in rows:
        if not (row.rms[1] > 0 and math.isfinite(row.largest)):
            continue
        at, color = names.index((row.quantity, row.name)), _COLORS[row.quantity]
        low = row.rms[0] or row.rms[1]
        panel.plot([low, row.largest], [at, at], color=color, lw=0.8)
        panel.plot([low, row.rms[1]], [at, at], color=color, lw=3, solid_capstyle="butt")
        text = None if row.quantity in labelled else f"{row.quantity.replace('_', ' ')}: root mean square, to largest"
        panel.plot([row.largest], [at], "|", color=color, ms=5, label=text)
        labelled.add(row.quantity)
    panel.set_xscale("log", base=2)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_title(label, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_shares(pyplot: Any, panel: Any, rows: Sequence[RangeRow], names: Sequence[tuple[str, str]]) -> None:
    """A column per format and way of losing a number, darker where more are lost."""
    columns = [f"{kind} {name}" for kind in ("overflow", "underflow") for name in FORMATS]
    shares = [[math.nan] * len(columns) for _ in names]
    for row in rows:
        shares[names.index((row.quantity, row.name))] = [row.shares[column] for column in columns]
    panel.imshow(shares, aspect="auto", cmap="Reds", vmin=0.0, vmax=1.0, interpolation="nearest")
    for at, held in enumerate(shares):
        for column, share in enumerate(held):
            if share > 0:
                panel.text(
                    column,
                    at,
                    percent(share) if share >= _LITTLE else "< 0.1 %",
                    ha="center",
                    va="center",
                    fontsize=4.5,
                    color="white" if share > 0.7 else "black",
                )
    panel.set_xticks(range(len(columns)), columns, rotation=90, fontsize=6)
    panel.tick_params(axis="y", left=False)
