"""The picture of a stability check: loss over a hyperparameter, a curve per size, a panel per parametrization.

Public name: `draw_stability`. After Tensor Programs V, figures 1 to 4.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.report.pictures import load_pyplot, save_figure

_AXES = {
    "width": "hidden size",
    "depth": "layers",
    "experts": "experts",
    "batch": "sequences per step",
    "sequence": "tokens per sequence",
    "tokens": "tokens",
}

_PANELS_ABREAST = 5  # as many as the 5 × 5 plane of the µTransfer blog post has


def draw_stability(result: Mapping[str, Any], path: Path) -> Path:
    """Draws means over seeds, their range as a band, and each curve's minimum as a star, hollow where it lies beyond.

    Args:
        result: of proof.stability. `measured` names the loss where it is not the evaluation's in nats per token, `axis`
            what the sizes are where they are no hidden sizes. A line of another result may stand among its own with
            that one's `values` and `seeds`.
        path: of the picture.

    Returns:
        The same path.
    """
    pyplot = load_pyplot()
    lines = result["lines"]
    across = min(len(lines), _PANELS_ABREAST)
    places = list(range(len(lines)))
    if len(lines) > across:  # the judged one above the others, so that points of a plane stand in its rows
        places = [0, *range(across, across + len(lines) - 1)]
    down = places[-1] // across + 1
    figure, grid = pyplot.subplots(
        down, across, figsize=(4.3 * across, 3.7 * down), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for unused in set(range(grid.size)) - set(places):
        grid.flat[unused].set_axis_off()
    panels = [grid.flat[place] for place in places]
    low, high = _limits(result)
    colors = pyplot.get_cmap("viridis")
    for panel, (name, line) in zip(panels, lines.items(), strict=True):
        values = line.get("values", result["values"])
        numeric = not isinstance(values[0], str)
        points = values if numeric else range(len(values))
        for number, row in enumerate(line["rows"]):
            color = colors(0.9 * (1 - number / max(1, len(line["rows"]) - 1)))
            shown = [(x, losses) for x, losses in zip(points, row["losses"], strict=True) if None not in losses]
            if shown:
                x, losses = zip(*shown, strict=True)
                means = [sum(each) / len(each) for each in losses]
                panel.fill_between(x, [min(e) for e in losses], [max(e) for e in losses], color=color, alpha=0.2, lw=0)
                panel.plot(x, means, ".-", color=color, lw=1.4, label=f"{row['size']}")
            gone = [x for x, losses in zip(points, row["losses"], strict=True) if None in losses]
            if gone:
                panel.plot(gone, [high] * len(gone), "x", color=color, ms=5, clip_on=False)
            least = row["minimum"]
            where = (least["value"] or least["tried"]) if numeric else values.index(least["tried"])
            # Hollow where the best value is the first or the last that was tried: the minimum lies beyond.
            filled = {"mfc": "white", "mec": color, "mew": 1.2} if least["edge"] else {"mec": "white", "mew": 0.6}
            panel.plot([where], [least["loss"]], "*", color=color, ms=11, zorder=3, **filled)
        if numeric:
            panel.set_xscale("log", base=2)
        else:
            panel.set_xticks(list(points), values, rotation=20, fontsize=8)
        panel.set_title("\n".join(textwrap.fill(part, 52) for part in title(result, name)), loc="left", fontsize=9)
        panel.set_xlabel(result["over"])
        panel.set_ylim(low, high)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for first in grid[:, 0]:
        first.set_ylabel(result.get("measured", "evaluation loss (nats per token)"))
    axis = result.get("axis", _AXES[result["across"]])
    panels[-1].legend(title=axis, frameon=False, fontsize=8, title_fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)
    return path


def title(result: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Two lines over a parametrization's panel: whether it passes, and by what it is judged."""
    line, start = result["lines"][name], result.get("from", result["sizes"][0]["size"])
    row = next(row for row in line["rows"] if row["size"] == start)
    cost, drift = row["cost"], row["drift"]
    verdict = "does not pass" if line["reasons"] else "undecided" if line.get("open") else "passes"
    costs = "diverges" if cost is None else f"costs {100 * cost:.2f} %"
    moves = "" if drift is None else f", moves {drift['octaves']:+.2f} octaves"
    if row["minimum"]["edge"] or line["rows"][-1]["minimum"]["edge"]:
        moves = ", may lie beyond what was tried"
    number = line.get("seeds", result["seeds"])
    seeds = f"{number} seed{'s' if number > 1 else ''}"
    return f"{name}: {verdict} ({seeds})", f"{start}'s best {costs} at {line['rows'][-1]['size']}{moves}"


def _limits(result: Mapping[str, Any]) -> tuple[float, float]:
    """All minima, and as much above them again as lies between them; at least a tenth of the loss."""
    best = [row["minimum"]["loss"] for line in result["lines"].values() for row in line["rows"]]
    low, high = min(best), max(best)
    room = max(high - low, 0.1 * low)
    return low - 0.05 * room, high + room
