"""The loss curve of a run as a picture. Public name: `draw_loss`."""

from __future__ import annotations

import json
from pathlib import Path

TRAIN_COLOR, EVAL_COLOR = "#4878a8", "#c44e52"


def draw_loss(run: Path) -> Path:
    """Draws metrics.jsonl of a run: training loss per step, evaluation losses as points, the learning rate below.

    Args:
        run: the run's folder.

    Returns:
        Path of the picture, `loss.png` in that folder.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7, 4.6), sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    top.plot(
        [line["step"] for line in steps], [line["loss"] for line in steps], color=TRAIN_COLOR, lw=1.2, label="training"
    )
    if evaluations:
        top.plot(
            [line["step"] for line in evaluations],
            [line["eval_loss"] for line in evaluations],
            "o-",
            color=EVAL_COLOR,
            ms=4,
            lw=1,
            label=f"evaluation, last {evaluations[-1]['eval_loss']:.3f}",
        )
    top.set_ylabel("loss (nats per token)")
    top.set_title(f"{run.name}: loss", loc="left", fontsize=10)
    top.legend(frameon=False)
    bottom.plot([line["step"] for line in steps], [line["lr"] for line in steps], color="0.4", lw=1.2)
    bottom.set_ylabel("base lr")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path = run / "loss.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
