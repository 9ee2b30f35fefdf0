"""One HTML page that compares runs: their curves in one figure, what differs between them in one table.

Public name: `write_comparison`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.report.document import curves, document, table, write_document
from mup_megatron.report.run_data import Run, read_run
from mup_megatron.util.errors import UserError
from mup_megatron.util.secrets import masked_data

# Where a run lies and what it is called are said once, not as a difference.
_PLACES = ("run.name", "run.dir")


def write_comparison(directories: Sequence[Path], path: Path) -> Path:
    """Writes a page that compares runs.

    Args:
        directories: of the runs.
        path: of the page.

    Raises:
        UserError: a folder holds no run that trained, or the page cannot be written.
    """
    import plotly.offline

    runs = [(str(directory), read_run(directory)) for directory in directories]
    for name, run in runs:
        if run.target is None:
            raise UserError(f"{name}: holds no training run (metrics.jsonl); expected one to compare")
    return write_document(path, comparison(runs, plotly.offline.get_plotlyjs()))


def comparison(runs: Sequence[tuple[str, Run]], plotly: str) -> str:
    """The page as text.

    Args:
        runs: each with its folder's name.
        plotly: Plotly's own code.
    """
    drawn = [dataclasses.replace(run.target, name=name) for name, run in runs if run.target is not None]
    results = [
        ["last evaluation, nats per token", *(curve.result for curve in drawn)],
        ["steps", *(str(curve.last) for curve in drawn)],
        ["time in steps", *(f"{curve.seconds:.0f} s" for curve in drawn)],
    ]
    # The config of an older version may hold a password.
    settings = [_flat(masked_data(run.config)) for _, run in runs]
    keys = dict.fromkeys(key for values in settings for key in values)
    differing = [
        [key, *(_shown(values.get(key)) for values in settings)]
        for key in keys
        if key not in _PLACES and len({repr(values.get(key)) for values in settings}) > 1
    ]
    names = [name for name, _ in runs]
    sections = [
        f"<h1>{len(runs)} runs</h1>",
        table(("", *names), results),
        '<div id="curves"></div>',
        "<h2>Settings that differ</h2>",
        table(("", *names), differing) if differing else "<p>None.</p>",
    ]
    return document(f"{len(runs)} runs", sections, {"curves": curves(drawn)}, plotly)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a config: {"hparams.lr": 0.01}."""
    if not isinstance(values, dict):
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
