"""Pictures of a run.

Public names: `draw_curves`, `draw_search`, `extent_of`, `limits`, `marked`, `load_pyplot`, `save_figure`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.report.run_data import Run
from mup_megatron.tuning.objective import objective_of
from mup_megatron.tuning.record import StudyRecord, TrialRecord
from mup_megatron.util.files import write_whole

COLORS = ("#4878a8", "#c44e52", "#dd8452")
"""Of the target, and of the same in the parametrizations that it is compared with."""

MARK = "#808080"
"""Of what a ladder predicted."""

STATES = {
    "complete": ("trained to the end", "o", "#4878a8"),
    "stopped": ("stopped early", "v", "#b0b0b0"),
    "diverged": ("diverged", "x", "#c44e52"),
}
"""How a trial that ended so is drawn: label, marker, color."""


BEYOND = "#8c564b"
"""Of the ring about a trial that stands at the edge of the picture and belongs beyond it."""


def load_pyplot() -> Any:
    """Matplotlib's pyplot, which draws into files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def marked(run: Run) -> dict[str, Any] | None:
    """What a ladder told of the target, as a mark in the picture of its losses.

    Returns:
        {"step", "loss", "bar" (two standard errors, nats), "label"}: the target's last step; None where no loss was
        told, or no target has begun.
    """
    told = run.predicted
    if run.target is None or told is None or "loss" not in told:
        return None
    bar = 2 * told["error"]
    label = f"predicted by the ladder: {told['loss']:.4f} ± {bar:.4f}"
    return {"step": run.target.whole or run.target.last, "loss": told["loss"], "bar": bar, "label": label}


def draw_curves(run: Run) -> Path:
    """Training loss per step, evaluations as points, the base learning rate below; the controls beside the target.

    What a ladder predicted stands at the target's last step, with two standard errors to either side.

    Returns:
        Path of the picture, `loss.png` in the run's folder.
    """
    pyplot = load_pyplot()
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7, 4.6), sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    for curve, color in zip(run.curves, COLORS, strict=False):
        steps = [line["step"] for line in curve.steps]
        top.plot(steps, [line["loss"] for line in curve.steps], color=color, lw=0.8, alpha=0.45)
        top.plot(
            [line["step"] for line in curve.evaluations],
            [line["eval_loss"] for line in curve.evaluations],
            "o-",
            color=color,
            ms=4,
            lw=1.4,
            label=f"{curve.name}: evaluation, last {curve.result}",
        )
        bottom.plot(steps, [line["lr"] for line in curve.steps], color="0.4", lw=1.2)
    if (mark := marked(run)) is not None:
        place = {"x": mark["step"], "y": mark["loss"], "yerr": mark["bar"]}
        top.errorbar(**place, fmt="D", color=MARK, ms=5, capsize=4, label=mark["label"])
    top.set_ylabel("loss (nats per token)")
    name = (run.config.get("run") or {}).get("name", run.directory.name)
    top.set_title(f"{name}: the target, training (thin) and evaluation", loc="left", fontsize=10)
    top.legend(frameon=False)
    bottom.set_ylabel("base lr")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path = run.directory / "loss.png"
    save_figure(figure, path)
    pyplot.close(figure)
    return path


def draw_search(run: Run) -> Path | None:
    """What trials were compared by over each hyperparameter that was tuned, the chosen value marked.

    Returns:
        Path of the picture, `search.png` in the run's folder; None without a record.
    """
    if run.record is None:
        return None
    pyplot = load_pyplot()
    from matplotlib import ticker

    study = run.record.study
    names = list(study.values)
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(3.3 * columns, 2.7 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    axes = grid.ravel()
    trials = [trial for trial in study.trials if trial.values]
    low, high = limits(trials)
    objective = objective_of(study.objective)
    for axis, name in zip(axes, names, strict=False):
        for state, (label, marker, color) in STATES.items():
            # A loss above the picture, and one that is no number, stands at its upper edge; a BLEU at its lower one.
            shown = [trial for trial in trials if trial.state == state]
            losses = [min(trial.loss, high) if trial.loss is not None else high for trial in shown]
            heights = [objective.shown(loss) for loss in losses]
            axis.plot([trial.values[name] for trial in shown], heights, marker, color=color, ms=5, label=label)
        beyond = [trial.values[name] for trial in trials if trial.loss is None or trial.loss > high]
        if beyond:
            edge = [objective.shown(high)] * len(beyond)
            axis.plot(beyond, edge, "o", color=BEYOND, mfc="none", ms=9, label="worse than is shown")
        chosen = study.values[name]
        axis.axvline(chosen, color="0.2", lw=1, ls=":", label="chosen")
        axis.set_title(f"{name} = {_shown(chosen)}", fontsize=9, loc="left")
        if name in run.others:
            axis.axvline(run.others[name], color=COLORS[1], lw=1.2, ls="--")
            axis.set_title(f"{axis.get_title('left')}; trained with {_shown(run.others[name])}", fontsize=9, loc="left")
        extent = extent_of(study, name)
        for low_end, high_end in extent.untried if extent is not None else ():
            axis.axvspan(low_end, high_end, color="0.93", lw=0, zorder=0, label="range, nothing tried")
        if extent is not None and extent.log:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
            axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        if extent is not None:
            axis.set_xlim(*extent.limits)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(*sorted(map(objective.shown, (low, high + 0.04 * (high - low)))))
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    for row in grid:
        row[0].set_ylabel(objective.axis, fontsize=8)
    named = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    path = run.directory / "search.png"
    save_figure(figure, path)
    pyplot.close(figure)
    return path


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What a picture shows of a hyperparameter: the range that was searched, tried or not.

    Args:
        low: lower end.
        high: upper end.
        log: whether the axis is logarithmic.
        untried: parts in which nothing was tried, at the ends.
    """

    low: float
    high: float
    log: bool
    untried: list[tuple[float, float]]

    @property
    def limits(self) -> tuple[float, float]:
        """Of the axis: a little beyond both ends."""
        if self.log:
            room = (self.high / self.low) ** 0.03
            return self.low / room, self.high * room
        room = 0.03 * (self.high - self.low)
        return self.low - room, self.high + room


def extent_of(study: StudyRecord, name: str) -> Extent | None:
    """The extent of a hyperparameter of a study; None where it is no number, or has one value alone."""
    tried = [trial.values[name] for trial in study.trials if trial.values]
    numbers = [value for value in tried if isinstance(value, int | float)]
    if len(numbers) != len(tried) or not numbers:
        return None
    first, last = min(numbers), max(numbers)
    searched = study.ranges[name]
    low, high = min(searched.low, first), max(searched.high, last)
    if low == high:
        return None
    untried = [(start, end) for start, end in ((low, first), (last, high)) if start < end]
    return Extent(low=low, high=high, log=searched.log, untried=untried)


def limits(trials: Sequence[TrialRecord]) -> tuple[float, float]:
    """From the best loss to the worst, or, where some are far off, to four times the distance of the median."""
    losses = sorted(trial.loss for trial in trials if trial.loss is not None)
    if not losses:
        return 0.0, 1.0
    low, middle = losses[0], losses[len(losses) // 2]
    high = min(losses[-1], low + 4 * (middle - low)) if middle > low else losses[-1]
    high = max(high, low + 1e-3)
    return low - 0.05 * (high - low), high


def save_figure(figure: Any, path: Path) -> None:
    """Whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_whole(path, picture.getvalue())
