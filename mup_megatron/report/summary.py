"""What a run did, at its end: tables for the terminal, pictures beside its files.

Public names: `summarize`, `summary`, `counted`, `extrapolated_of`, `ended_lower`, `print_transfer`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.checkpoints.checkpoint import Checkpoints
from mup_megatron.config import ONE_MINUS
from mup_megatron.config.model import FAMILIES
from mup_megatron.model.explain import shown_init
from mup_megatron.report.run_data import Curve, Run, read_run
from mup_megatron.tuning.objective import objective_of
from mup_megatron.tuning.outcome import open_sides
from mup_megatron.tuning.predicted import in_words
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from mup_megatron.tuning.record import SpentRecord, StudyRecord, TransferRecord


def summarize(directory: Path, console: Any, then: str = "") -> None:
    """Draws the pictures of a run, prints its summary and what to run next; nothing for a run that did not begin.

    Args:
        directory: of the run.
        console: of rich.
        then: the command that trains the target, said first where there is a record and no target yet.
    """
    from mup_megatron.report.pictures import draw_curves, draw_search

    try:
        run = read_run(directory)
    except UserError:
        return
    _print(summary(run), console)
    for picture in (draw_search(run), draw_curves(run) if run.target and run.target.steps else None):
        if picture is not None:
            console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    if then and run.record is not None and run.target is None:
        console.print(f"next: {then}  # the target, with these values", highlight=False, soft_wrap=True)
    folder = shlex.quote(f"./{directory}" if str(directory).startswith("-") else str(directory))
    console.print(f"next: mup-megatron report {folder}  # one HTML page of the run", highlight=False, soft_wrap=True)
    following = _FOLLOWING.get(FAMILIES.get(str((run.config.get("model") or {}).get("architecture")), "gpt"))
    if following and Checkpoints(directory / "checkpoints", 1).newest_first():
        console.print(f"next: {following.format(folder)}", highlight=False, soft_wrap=True)


_FOLLOWING = {
    "gpt": "mup-megatron generate {} 'Once upon a time'  # text from the last checkpoint",
    "t5": "mup-megatron generate {} 'Once upon a time'  # the target of a source, by the last checkpoint",
    "bert": "mup-megatron generate {} 'Once upon a [MASK]'  # masks filled by the last checkpoint",
}
"""What to do with a checkpoint, by the family of its model."""


def summary(run: Run) -> dict[str, Any]:
    """The summary as plain data: a row per hyperparameter, rows of results, remarks.

    What the target trained with stands beside what was tuned; where the two differ, the study's losses are said to be
    of other values.

    Returns:
        {"columns": [name], "values": [[cell per column]], "results": [[what, value]], "remarks": [text]}; every cell is
        text.
    """
    columns, values = _values(run)
    results, remarks = _tuned(run) if run.record is not None else ([], [])
    for curve in run.curves:
        results.append(["target loss" if curve is run.target else f"the same target, {curve.name}", curve.result])
    if run.target is not None and run.predicted is not None:
        results.append(["predicted by the ladder", in_words(run.predicted, _reached(run.target))])
    of = " of the tuned values" if run.others else ""
    moved = (run.explanation or {}).get("moved", {})
    results += [[f"{name} over batch and tokens", _step(ends)] for name, ends in moved.items()]
    times = [f"tuning{of} {run.record.budget.spent.process_seconds:.0f} s of one process"] if run.record else []
    times += [f"{curve.name} {curve.seconds:.0f} s" for curve in run.curves]
    results.append(["time", ", ".join(times)])
    if run.record is not None and not run.others:
        results.append(["tuning / target compute", _share(run, run.record.budget.spent)])
    changes = [
        f"{curve.name}: {change['key']} changed from {change['before']} to {change['now']} at step {change['step']}"
        for curve in run.curves
        for change in curve.changes
    ]
    return {
        "columns": columns,
        "values": values,
        "results": results,
        "remarks": [*changes, *remarks, *ended_lower(run)],
    }


def _values(run: Run) -> tuple[list[str], list[list[str]]]:
    """Every hyperparameter: what the target trained with, what was tuned, what was tried of which range."""
    trained = run.target.values if run.target is not None else {}
    study = run.record.study if run.record is not None else None
    tuned = study.values if study is not None else {}
    idle = () if run.has_position_bias else ("relative_bias_multiplier",)
    for name in (*idle, *ONE_MINUS):
        if name not in tuned:
            trained.pop(name, None)
    rows = []
    for name in dict.fromkeys([*tuned, *(name for name, value in trained.items() if value is not None)]):
        shown = [_shown(trained.get(name))] if trained else []
        rows.append([name, *shown, *(_searched(study, name) if study is not None else [])])
    columns = ["hyperparameter", *(["trained with"] if trained else [])]
    return [*columns, *(["tuned", "tried from", "to", "range", "interior"] if study is not None else [])], rows


def _searched(study: StudyRecord, name: str) -> list[str]:
    """Five cells: what a study found, from what to what it tried, its range, and whether the value is inside."""
    if name not in study.values:
        return [""] * 5
    value = study.values[name]
    tried = [trial.values[name] for trial in study.trials if trial.values]
    if isinstance(value, str):
        return [value, ", ".join(sorted({str(each) for each in tried})), "", "", ""]
    numbers, range_ = [float(each) for each in tried], study.ranges[name]
    open_ = [("above" if side.above else "below") for side in open_sides(value, numbers, range_)]
    searched = f"{range_.low:.3g} to {range_.high:.3g}"
    inside = "no, open " + " and ".join(open_) if open_ else "yes"
    return [_shown(value), f"{min(numbers):.3g}", f"{max(numbers):.3g}", searched, inside]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _reached(curve: Curve) -> float | None:
    """Its loss at the end; None before that."""
    return None if curve.unfinished else curve.eval_loss


def _step(ends: Sequence[float]) -> str:
    """From a trial's batch and tokens to the run's."""
    before, after = ends
    return f"{before:.6g} → {after:.6g}" + (f" (× {after / before:.4g})" if before else "")


def _tuned(run: Run) -> tuple[list[list[str]], list[str]]:
    """What the study of the run's record found: rows of results, remarks."""
    from mup_megatron.tuning.remarks import remarks

    if (record := run.record) is None:
        raise ValueError(f"{run.directory}: no transfer record")
    study, said = record.study, []
    objective = objective_of(study.objective)
    noise = f" ± {study.noise:.{objective.digits}f} per run" if study.noise is not None else ""
    seeds = len(study.candidates[0].losses)
    of = ""
    if run.others:
        of = " of the tuned values"
        shown = ", ".join(f"{n} {_shown(v)} instead of {_shown(record.values[n])}" for n, v in run.others.items())
        said.append(f"the target did not train with the values of the transfer record: {shown}")
    results = [
        ["trials", counted(study)],
        [
            f"proxy {objective.name}{of}",
            f"{objective.text(study.loss)}{noise} (mean over {seeds} seed{'s' if seeds > 1 else ''})",
        ],
    ]
    explained = run.explanation or {}
    of_ladder = (explained if "ladder" in explained else run.plan or {"ladder": record.target.ladder}).get("ladder", [])
    return results, [*said, *remarks(study, extrapolated_of(run)), *of_ladder]


def counted(study: StudyRecord) -> str:
    """Its trials by how they ended, and the repetitions of the best ones, in words."""
    own = [trial.state for trial in study.trials if not trial.repeats]
    ended = ", ".join(f"{count} {state}" for state in _STATES if (count := own.count(state)))
    again = len(study.trials) - len(own)
    repeated = f", and {again} repetition{'s' if again > 1 else ''} with other seeds" if again else ""
    return f"{len(own)} ({ended}){repeated}"


_STATES = ("complete", "stopped", "diverged", "failed")


def extrapolated_of(run: Run) -> Sequence[str]:
    """Where this run's target leaves what was tuned on.

    The record may be a family's: what it says of a target is of the one that it was tuned for.
    """
    if run.plan is not None:
        found: Sequence[str] = run.plan["extrapolated"]
        return found
    return run.record.target.extrapolated if run.record is not None else []


def _share(run: Run, spent: SpentRecord) -> str:
    """What tuning took of this run's own target."""
    took = f"{spent.flops:.2e} FLOPs, {spent.tokens:,} tokens"
    return f"{spent.flops / run.plan['target']['flops']:.3g} ({took})" if run.plan is not None else took


def ended_lower(run: Run) -> list[str]:
    """Which parametrization ended lower, whichever it is, where both took all their steps with the same values."""
    if run.target is None or run.target.unfinished:
        return []
    said = []
    for control in run.controls.values():
        if control.values != run.target.values:
            continue
        if control.unfinished.startswith("diverged"):
            said.append(f"{control.name}: diverged with the values that µP transferred")
            continue
        ours, theirs = run.target.eval_loss, control.eval_loss
        if control.unfinished or ours is None or theirs is None:
            continue
        lower, higher, by = (
            (run.target, control, theirs - ours) if ours <= theirs else (control, run.target, ours - theirs)
        )
        said.append(f"{lower.name} ends {by:.4f} nats lower than {higher.name}, with the same values")
    return said


def _print(data: Mapping[str, Any], console: Any) -> None:
    from rich.table import Table

    table = Table(box=None, title="hyperparameters, at the base", title_justify="left")
    for column in data["columns"]:
        table.add_column(column, justify="left" if column in ("hyperparameter", "interior") else "right")
    for row in data["values"]:
        table.add_row(*row)
    console.print(table)
    results = Table(box=None, show_header=False, title="results", title_justify="left")
    for row in data["results"]:
        results.add_row(*row)
    console.print(results)
    for line in data["remarks"]:
        console.print(f"- {line}", highlight=False)


def print_transfer(
    record: TransferRecord,
    moved: Mapping[str, Sequence[float]],
    becomes: Mapping[str, Any],
    said: Sequence[str],
    console: Any,
) -> None:
    """The record's values, before and after the rules over batch and tokens (horizon.moved), what each becomes on a
    target (recording.becomes), and remarks on all of them.
    """
    from rich.table import Table

    values = Table(box=None, title="at the base", title_justify="left", show_header=False)
    for name, value in record.values.items():
        how = "tuned" if name in record.tuned else "as while tuning"
        if value is not None:
            values.add_row(name, value if isinstance(value, str) else f"{value:.6g}", how)
    console.print(values)
    for name, ends in moved.items():
        console.print(f"over batch and tokens: {name} {_step(ends)}", highlight=False)
    forward = becomes["forward"]
    console.print(
        f"on the target: logits = {forward['readout']:.6g} · W h, "
        f"attention logits = {forward['softmax_scale']:.6g} · q·k, "
        f"embedding × {forward['embedding']:.6g}, residual branches × {forward['residual']:.6g}",
        highlight=False,
    )
    table = Table(box=None)
    for column in ("tensor", "lr", "init std", "eps", "weight decay"):
        table.add_column(column, justify="left" if column == "tensor" else "right", no_wrap=True)
    for name, row in becomes["tensors"].items():
        eps = "" if row["eps"] is None else f"{row['eps']:.4g}"
        table.add_row(name, f"{row['lr']:.4g}", shown_init(row), eps, f"{row['weight_decay']:.4g}")
    console.print(table)
    for line in said:
        console.print(f"- {line}", highlight=False)
