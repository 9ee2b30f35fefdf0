"""What checks left in a run's folder: coordinate checks, stable optima, reverse transfer.

Public names: `Proof`, `proofs`, `result_files`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDERS = ("coord-check", "stability", "reverse")
"""In a run's folder, unless a command's --output names another."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One check.

    Args:
        title: for people.
        lines: what the command said at its end.
        picture: that it drew; None if it is gone.
    """

    title: str
    lines: list[str]
    picture: Path | None


def result_files(directory: Path) -> list[Path]:
    """JSON files of checks, by kind and name."""
    return [path for folder in FOLDERS for path in sorted((directory / folder).glob("*.json"))]


def proofs(directory: Path) -> Iterator[Proof]:
    """Reads the checks of a run's folder.

    Args:
        directory: of the run.
    """
    for path in result_files(directory):
        result = json.loads(path.read_text(encoding="utf-8"))
        kind = path.parent.name
        picture = path.with_suffix(".png")
        yield Proof(
            title=_title(kind, result),
            lines=_lines(kind)(result),
            picture=picture if picture.is_file() else None,
        )


def _title(kind: str, result: Mapping[str, Any]) -> str:
    return {
        "coord-check": lambda: f"Coordinate check of {result['judged']}",
        "stability": lambda: f"Stable optima: {result['over']} over {result['across']}",
        "reverse": lambda: "Reverse transfer",
    }[kind]()


def _lines(kind: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """What the kind's command says of a result; imports what the command imports."""
    if kind == "coord-check":
        from mup_megatron.proof.coord_check import lines as of_coordinates

        return of_coordinates
    if kind == "stability":
        from mup_megatron.proof.stability import lines as of_optima

        return of_optima
    from mup_megatron.proof.reverse import lines as of_reversal

    return of_reversal
