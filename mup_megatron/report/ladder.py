"""The picture of a ladder: best rate or decay, and lowest loss, over tokens: a line per batch and model, laws dashed.

A triangle is the lowest or highest value that was tried, where that was the best. A ladder may have found no law.

Public names: `draw_ladder`, `LABELS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.tuning.loss_law import read_loss_law

_SERIES = ("batch", "width", "layers")
_ENDS = {"low": "v", "high": "^"}
LABELS = {"rate": "learning rate", "decay": "weight decay", "one_minus_beta2": "1 - β2"}
"""What a ladder varies, in a reader's words, by its name in ladder.json (`rungs.NAMES`)."""


def draw_ladder(result: Mapping[str, Any], path: Path) -> Path:
    """Draws what was measured as points, the laws as dashed lines, and the rung that they have not seen as a star.

    Args:
        result: of proof.ladder.
        path: of the picture.

    Returns:
        The same path.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import LogLocator

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    series = sorted({_series(rung) for rung in result["rungs"]})
    varying = [place for place in range(len(_SERIES)) if len({each[place] for each in series}) > 1 or not place]
    colors = pyplot.get_cmap("viridis")
    held, best = result["held_out"] or {}, next(name for name in LABELS if name in result)
    for number, factor in enumerate(series):
        color = colors(0.9 * (1 - number / max(1, len(series) - 1)))
        rungs = [rung for rung in result["rungs"] if _series(rung) == factor]
        tokens = [rung["tokens"] for rung in rungs]
        label = ", ".join(f"{_SERIES[place]} × {factor[place]}" for place in varying)
        for panel, key in ((panels[0], "value"), (panels[1], "least")):
            shown = [(rung["tokens"], rung[key]) for rung in rungs if rung[key] is not None]
            panel.plot(*zip(*shown, strict=True), "o", color=color, ms=5, label=label) if shown else None
        for rung in (each for each in rungs if each["edge"]):
            panels[0].plot([rung["tokens"]], [rung["tried"]], _ENDS[rung["edge"]], color=color, ms=7)
        if not held:
            continue
        factors = [{**dict(zip(_SERIES, factor, strict=True)), "tokens": each} for each in tokens]
        panels[0].plot(tokens, [_value(result[best], each) for each in factors], "--", color=color, lw=1)
        octaves = [{name: math.log2(size) for name, size in each.items()} for each in factors]
        law = read_loss_law(result["loss"])
        panels[1].plot(tokens, [law.at(each)[0] for each in octaves], "--", color=color, lw=1)
    for panel, key in ((panels[0], best), (panels[1], "loss")):
        if held and held[key]["measured"] is not None:
            panel.plot([held["tokens"]], [held[key]["measured"]], "*", color="0.1", ms=11, label="held out")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("tokens of the run, × the config's own")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("log", base=2)
    low, high = panels[0].get_ylim()
    quarters = (1.0, 2**0.25, 2**0.5, 2**0.75) if high < 8 * low else (1.0,)
    panels[0].yaxis.set_major_locator(LogLocator(2, subs=quarters))
    panels[0].yaxis.set_major_formatter("{x:.3g}")
    panels[0].set_ylabel(f"best {LABELS[best]}")
    panels[1].set_ylabel(f"loss at the best {LABELS[best]} (nats per token)")
    panels[0].set_title(
        f"{result['verdict']} ({result['seeds']} seed{'s' if result['seeds'] > 1 else ''})", loc="left", fontsize=10
    )
    panels[1].legend(frameon=False, fontsize=8)
    save_figure(figure, path)
    pyplot.close(figure)
    return path


def _series(rung: Mapping[str, Any]) -> tuple[int, ...]:
    """Factors of what a line is drawn of; a ladder of an earlier version has one depth."""
    return tuple(rung.get(name, 1) for name in _SERIES)


def _value(law: Mapping[str, Any], factors: Mapping[str, int]) -> float:
    exponents = sum(law[name]["exponent"] * math.log2(factor) for name, factor in factors.items() if name in law)
    return float(2 ** (law["constant"] + exponents))
