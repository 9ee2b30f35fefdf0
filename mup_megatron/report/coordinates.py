"""The picture of a coordinate check, in the style of Tensor Programs V: a panel per step, a line per module over width.

Public name: `draw_coordinates`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.report.pictures import load_pyplot, save_figure

KINDS = {
    "embedding": ("embedding", "#4878a8"),
    "core_attention.logits": ("attention logits", "#c44e52"),
    "self_attention": ("attention", "#dd8452"),
    "mlp": ("MLP", "#55a868"),
    "final_layernorm": ("final norm", "#8172b3"),
    "output_layer": ("logits", "#222222"),
}
"""Ends of the names of modules that are drawn in color, with their labels; all others are gray."""

_ROWS = {"output": "size of the output", "change": "of its change", "gradient": "gradient of the loss\nby it"}


def draw_coordinates(result: Mapping[str, Any], path: Path) -> Path:
    """Draws sizes of outputs, of their changes since step 0, and of gradients, over width; log-log, means over seeds.

    Args:
        result: of proof.coord_check.
        path: of the picture.

    Returns:
        The same path.
    """
    pyplot = load_pyplot()
    labels = list(result["verdicts"])
    steps = range(result["steps"] + 1)
    sizes = {size["factor"]: size["size"] for size in result["sizes"]}
    rows = [(label, quantity) for label in labels for quantity in _ROWS]
    figure, grid = pyplot.subplots(
        len(rows), len(steps), figsize=(2.3 * len(steps), 2.1 * len(rows)), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (label, quantity), panels in zip(rows, grid, strict=True):
        means = _means(result, label, quantity)
        for step, panel in zip(steps, panels, strict=True):
            for module, by_factor in means.items():
                points = [(sizes[factor], by_factor[factor][step]) for factor in sizes if factor in by_factor]
                points = [(size, value) for size, value in points if value is not None and value > 0]
                name, color = _kind(module)
                strong = color != "0.75"
                panel.plot(
                    *zip(*points, strict=True) if points else ((), ()),
                    ".-",
                    color=color,
                    lw=1.3 if strong else 0.7,
                    ms=4 if strong else 2,
                    zorder=2 if strong else 1,
                    label=name,
                )
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=10)
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=7)
            if (label, quantity) == rows[0]:
                panel.set_title(f"t = {step}", fontsize=9)
            if not panel.lines or not any(len(line.get_xdata()) for line in panel.lines):
                panel.set_visible(False)
        shown = next((panel for panel in panels if panel.get_visible()), panels[0])
        shown.set_ylabel(f"{label}:\n{_ROWS[quantity]}", fontsize=8)
        _share_limits([panel for panel in panels if panel.get_visible()])
    what = "layers" if result["axis"] == "depth" else result.get("over", "hidden_size").replace("_", " ")
    for panel in grid[-1]:
        panel.set_xlabel(what, fontsize=8)
    handles = {text: handle for handle, text in zip(*grid[0][0].get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)
    return path


def _kind(module: str) -> tuple[str, str]:
    ends = (KINDS[end] for end in KINDS if module == end or module.endswith(f".{end}"))
    return next(ends, ("other modules", "0.75"))


def _means(result: Mapping[str, Any], label: str, quantity: str) -> dict[str, dict[float, list[float | None]]]:
    """Module to factor to the geometric mean over seeds, per step."""
    held: dict[str, dict[float, list[list[float | None]]]] = {}
    for cell in result["cells"]:
        if cell["line"] == label:
            for module, values in cell["coordinates"]["modules"][quantity].items():
                held.setdefault(module, {}).setdefault(cell["factor"], []).append(values)
    return {
        module: {factor: [_mean(step) for step in zip(*seeds, strict=True)] for factor, seeds in factors.items()}
        for module, factors in held.items()
    }


def _mean(values: tuple[float | None, ...]) -> float | None:
    if any(value is None or value <= 0 for value in values):
        return None
    return math.exp(sum(math.log(value) for value in values if value) / len(values))


def _share_limits(panels: list[Any]) -> None:
    """One scale for all steps of a row."""
    if panels:
        low, high = min(panel.get_ylim()[0] for panel in panels), max(panel.get_ylim()[1] for panel in panels)
        for panel in panels:
            panel.set_ylim(low, high)
