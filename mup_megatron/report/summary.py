"""What a run did, at its end: tables for the terminal, pictures beside its files.

Public names: `summarize`, `summary`, `print_transfer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.errors import UserError
from mup_megatron.report.run import Run, read_run


def summarize(directory: Path, console: Any) -> None:
    """Draws the pictures of a run and prints its summary; nothing for a run that did not begin."""
    from mup_megatron.report.pictures import draw_curves, draw_search

    try:
        run = read_run(directory)
    except UserError:
        return
    if run.record is not None:
        _print(summary(run), console)
    for picture in (draw_search(run), draw_curves(run) if run.target and run.target.steps else None):
        if picture is not None:
            console.print(f"picture: {picture}", highlight=False, soft_wrap=True)


def summary(run: Run) -> dict[str, Any]:
    """The summary as plain data: a row per tuned value, rows of results, remarks.

    Returns:
        {"values": [[name, tuned, tried from, tried to, interior]], "results": [[what, value]], "remarks": [text]};
        every cell is text.
    """
    from mup_megatron.tuning.record import remarks

    if (record := run.record) is None:
        raise ValueError(f"{run.directory}: no transfer record")
    study, spent = record["study"], record["budget"]["spent"]
    tried = [trial["values"] for trial in study["trials"] if trial["values"]]
    values = []
    for name, value in study["values"].items():
        if isinstance(value, str):
            values.append([name, value, ", ".join(sorted({str(v[name]) for v in tried})), "", ""])
            continue
        numbers = [v[name] for v in tried]
        inside = "yes" if study["interior"][name] else "no, at the edge"
        values.append([name, f"{value:.4g}", f"{min(numbers):.3g}", f"{max(numbers):.3g}", inside])
    noise = f" ± {study['noise']:.4f} per run" if study["noise"] is not None else ""
    seeds = len(study["candidates"][0]["losses"])
    ended = {
        state: sum(1 for t in study["trials"] if t["state"] == state)
        for state in ("complete", "stopped", "diverged", "failed")
    }
    results = [
        ["trials", ", ".join(f"{count} {state}" for state, count in ended.items() if count)],
        ["proxy loss", f"{study['loss']:.4f}{noise} (mean over {seeds} seed{'s' if seeds > 1 else ''})"],
    ]
    for curve in run.curves:
        if curve.eval_loss is not None:
            what = "target loss" if curve is run.target else f"the same target, {curve.name}"
            results.append([what, f"{curve.eval_loss:.4f}"])
    times = [f"tuning {spent['process_seconds']:.0f} s of one process"]
    times += [f"{curve.name} {curve.seconds:.0f} s" for curve in run.curves]
    results.append(["time", ", ".join(times)])
    # The record may be a family's: its share and what it says of the target are those of the run that tuned.
    share, extrapolated = spent["share"], record["target"]["extrapolated"]
    if run.plan is not None:
        share, extrapolated = spent["flops"] / run.plan["target"]["flops"], run.plan["extrapolated"]
    results.append(["tuning / target compute", f"{share:.3g} ({spent['flops']:.2e} FLOPs, {spent['tokens']:,} tokens)"])
    return {"values": values, "results": results, "remarks": [*remarks(record, extrapolated), *_verdict(run)]}


def _verdict(run: Run) -> list[str]:
    """Which parametrization ended lower, whichever it is."""
    if run.target is None:
        return []
    said = []
    for control in run.controls.values():
        if control.steps and not math.isfinite(control.steps[-1]["loss"]):
            said.append(f"{control.name}: diverged with the values that µP transferred")
            continue
        ours, theirs = run.target.eval_loss, control.eval_loss
        if ours is None or theirs is None:
            continue
        lower, higher, by = (
            (run.target, control, theirs - ours) if ours <= theirs else (control, run.target, ours - theirs)
        )
        said.append(f"{lower.name} ends {by:.4f} nats lower than {higher.name}, with the same values")
    return said


def _print(data: Mapping[str, Any], console: Any) -> None:
    from rich.table import Table

    table = Table(box=None, title="tuned on the proxy, at the base", title_justify="left")
    for column in ("hyperparameter", "value", "tried from", "to", "interior"):
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


def print_transfer(record: Mapping[str, Any], becomes: Mapping[str, Any], console: Any) -> None:
    """The record's values, and what each becomes on a target (record.becomes)."""
    from rich.table import Table

    values = Table(box=None, title="at the base", title_justify="left", show_header=False)
    for name, value in record["values"].items():
        how = "tuned" if name in record["tuned"] else "as configured"
        if value is not None:
            values.add_row(name, value if isinstance(value, str) else f"{value:.6g}", how)
    console.print(values)
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
        std = row["init_std"]
        shown = (
            " ".join(f"{block} {value:.4g}" for block, value in std.items()) if isinstance(std, dict) else f"{std:.4g}"
        )
        eps = "" if row["eps"] is None else f"{row['eps']:.4g}"
        table.add_row(name, f"{row['lr']:.4g}", shown, eps, f"{row['weight_decay']:.4g}")
    console.print(table)
