"""What an evaluation found, for people. Public name: `print_results`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_results(found: Mapping[str, Any], console: Console) -> None:
    """A row per figure.

    Args:
        found: what `evaluate` returned.
        console: where it goes.
    """
    title = f"{found['checkpoint']}, step {found['step']}, {found['precision']}, {found['layout']}"
    table = Table("task", "file", "examples", "figure", "value", "standard error", title=title)
    for result in found["results"]:
        head = [result["task"].replace("_", "-"), result["file"], f"{result['examples']:,}"]
        for name, value in result["metrics"].items():
            if name.endswith("_error"):
                continue
            error = result["metrics"].get(f"{name}_error")
            table.add_row(*head, name.replace("_", " "), _number(value), "" if error is None else f"{error:.4f}")
            head = ["", "", ""]
    console.print(table)
    if "likelihood" in found:
        console.print(found["likelihood"], soft_wrap=True)
    for result in found["results"]:
        if "signature" in result:
            console.print(f"BLEU: {result['signature']}", soft_wrap=True)


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
