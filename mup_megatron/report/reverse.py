"""The picture of a reverse transfer: loss curves of the large model, the small one, and the small one reversed.

Public name: `draw_reverse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.report.pictures import load_pyplot, save_figure


def draw_reverse(result: Mapping[str, Any], path: Path) -> Path:
    """Draws a panel per model, a curve per learning rate and seed.

    Args:
        result: of proof.reverse.
        path: of the picture.

    Returns:
        The same path.
    """
    pyplot = load_pyplot()
    models = list(dict.fromkeys(curve["model"] for curve in result["curves"]))
    rates = sorted({curve["lr"] for curve in result["curves"]})
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(3.6 * len(models), 3.3), sharey=True, squeeze=False, layout="constrained"
    )
    colors = pyplot.get_cmap("plasma")
    for panel, model in zip(panels[0], models, strict=True):
        for curve in result["curves"]:
            if curve["model"] != model:
                continue
            color = colors(0.85 * rates.index(curve["lr"]) / max(1, len(rates) - 1))
            losses = [loss for loss in curve["losses"] if loss is not None]
            panel.plot(range(1, len(losses) + 1), losses, color=color, lw=0.9, label=f"{curve['lr']:.3g}")
            if curve["state"] == "diverged" and losses:
                panel.plot([len(losses)], [losses[-1]], "x", color=color, ms=7)
        panel.set_title(model, loc="left", fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    starts = [curve["losses"][0] for curve in result["curves"] if curve["losses"] and curve["losses"][0] is not None]
    lowest = min(loss for curve in result["curves"] for loss in curve["losses"] if loss is not None)
    panels[0][0].set_ylim(lowest - 0.2, max(starts) + 0.5 * (max(starts) - lowest))
    panels[0][0].set_ylabel("training loss (nats per token)")
    handles = {text: handle for handle, text in zip(*panels[0][0].get_legend_handles_labels(), strict=True)}
    panels[0][0].legend(handles.values(), handles, title="lr", frameon=False, fontsize=8, title_fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)
    return path
