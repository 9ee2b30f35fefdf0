"""A coordinate check's result as lines of text, and as a file.

Public names: `lines`, `write`, `bound_of`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.run_directory import write_whole
from mup_megatron.proof.verdict import advice
from mup_megatron.util.errors import UserError

_MOST = 12
"""Names that are told of one kind; the others are in the file."""


def lines(result: Mapping[str, Any]) -> list[str]:
    """A result for people.

    Args:
        result: of `coord_check`, or of one that was written.
    """
    if "regimes" in result:
        return _table(result)
    sizes = ", ".join(f"{size['size']}" for size in result["sizes"])
    layouts = "; ".join(dict.fromkeys(size["layout"] for size in result["sizes"]))
    what = "layers" if result["axis"] == "depth" else result["over"].replace("_", " ")
    said = [
        f"coordinate check of {result['judged']}: {what} {sizes}, {result['steps']} steps at rate {result['lr']:.3g}, "
        f"{result['tokens']} tokens, seeds {result['seeds']}, {layouts}"
    ]
    said += [f"set for this regime: {key} = {value}" for key, value in result["set"].items()]
    said += [f"never ran: {name}" for name in result["silent"]]
    said += [f"not a finite loss: {where}" for where in result["not_finite"]]
    verdicts = result["verdicts"][result["judged"]]
    undecided = result["undecided"]
    for state, names in (("out of bounds", result["out_of_bounds"]), ("undecided", undecided)):
        said += [f"{state}: {name}: {_worst(verdicts[name], result['axis'])}" for name in names[:_MOST]]
        if len(names) > _MOST:
            said.append(f"{state}: and {len(names) - _MOST} more")
    if undecided:
        open_ = {name: verdicts[name] for name in undecided}
        said.append(advice(open_, result["seeds"], result["lr"]))
    judged = [verdict for verdict in verdicts.values() if verdict["verdict"] != "not judged"]
    within = len(judged) - len(result["out_of_bounds"]) - len(undecided)
    said.append(
        f"{result['verdict']}: {within} of {len(judged)} modules and parameters are within bounds"
        + (f", {len(undecided)} undecided" if undecided else "")
    )
    return said


def _table(result: Mapping[str, Any]) -> list[str]:
    """A row per regime: its verdict, and of what is worst slope, interval and bound."""
    rows = [("regime", "verdict", "worst", "quantity", "found", "expected (bounds)")]
    notes = []
    for row in result["regimes"]:
        if row["verdict"] == "not run":
            rows.append((row["regime"], "not run", row["why"], "", "", ""))
            continue
        quantity = f"{row.get('quantity', '')} at step {row.get('step', 0)}"
        if "difference" in row:
            found, expected = f"{row['difference']:.1e} from plain", f"0 (to {row['bound']:.0e})"
        else:
            spread = "" if row["confidence"] is None else f" ± {row['confidence']:.2f}"
            slope = (
                ("is 0" if row["zero"] else "no number") if row["slope"] is None else f"size^{row['slope']:.2f}{spread}"
            )
            found, expected = slope, bound_of(row)
            if row["quantity"] in ("rate", "drawn", "copies") and row["slope"] is not None:
                found = f"{row['slope']:.3g} times it" if row["expected"] else f"{row['slope']:.3g}"
        rows.append((row["regime"], row["verdict"], row.get("worst", "all alike"), quantity, found, expected))
        for state in ("out_of_bounds", "undecided"):
            names = row[state]
            more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
            notes += [f"{row['regime']}: {state.replace('_', ' ')}: {', '.join(names[:_MOST])}{more}"] if names else []
    widths = [max(len(row[column]) for row in rows if row[1] != "not run" or column < 2) for column in range(6)]
    said = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    left = [f"{row['regime']} ({row['why']})" for row in result["regimes"] if row["verdict"] == "not run"]
    passed = sum(row["verdict"] == "passed" for row in result["regimes"])
    total = f"{result['verdict']}: {passed} of {len(result['regimes'])} regimes passed"
    return [*said, *notes, f"{total}, {len(left)} not run: {'; '.join(left)}" if left else total]


def _worst(verdict: Mapping[str, Any], axis: str) -> str:
    """What was found of one module or parameter."""
    quantity, slope, when = verdict["quantity"], verdict["slope"], f" at step {verdict['step']}"
    if quantity == "copies":
        far = "" if slope is None else f" by {slope:.3g} of what a step adds"
        return f"its copies on tensor-parallel ranks differ{far}{when}, expected no difference"
    if quantity == "rate" and slope is not None:
        return f"first update is {slope:.3g} times its rate, expected 1"
    if quantity == "drawn" and slope is not None:
        if not verdict["expected"]:
            return f"initial values have a mean size of {slope:.3g}, expected 0"
        bounds = f"{1 - verdict['low']:.3g} to {1 + verdict['high']:.3g}"
        return f"initial values are {slope:.3g} times what the config says, expected 1 ({bounds})"
    what = {"initial": "initial size", "update": "way of updates"}.get(quantity, quantity)
    when = "" if quantity in ("initial", "drawn") else when
    if slope is None and not verdict["zero"]:
        return f"{what}{when} is no number at some size"
    if slope is None:
        return {"update": "does not move", "change": "does not change"}.get(quantity, f"{what} is 0") + when
    spread = (
        " (no points to tell its error from)" if verdict["confidence"] is None else f" ± {verdict['confidence']:.2f}"
    )
    size = "depth" if axis == "depth" else "size"
    return f"{what}{when} goes as {size}^{slope:.2f}{spread}, expected {bound_of(verdict)}"


def bound_of(verdict: Mapping[str, Any]) -> str:
    """The expected slope and how far from it is allowed: `0.00 (-0.25 to 0.25)`."""
    expected = verdict["expected"]
    low = "any" if verdict["low"] is None else f"{expected - verdict['low']:.2f}"
    high = "any" if verdict["high"] is None else f"{expected + verdict['high']:.2f}"
    return f"{expected:.2f} ({low} to {high})"


def write(result: Mapping[str, Any], directory: Path) -> Path:
    """Writes a result as JSON, under the name of what was judged; numbers that are none as null.

    Args:
        result: of `coord_check` or `thorough`.
        directory: is made.

    Returns:
        The file.

    Raises:
        UserError: the folder cannot be written to.
    """
    regime = result.get("regime", "plain")
    name = result["judged"] if regime == "plain" or "without" in result["judged"] else f"{result['judged']}-{regime}"
    path = directory / f"{re.sub(r'[^a-z0-9.,_-]+', '-', name.lower())}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lines_ = (f"{json.dumps(key)}: {_compact(value)}" for key, value in result.items())
        write_whole(path, "{\n" + ",\n".join(lines_) + "\n}\n")
    except OSError as error:
        raise UserError(f"--output: cannot write to {directory}: {error.strerror}") from None
    return path


def _compact(value: Any) -> str:
    """JSON, an item of a list on a line."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)
