"""What checks left in a run's folder: coordinate checks, stable optima, reverse transfer.

Public names: `Proof`, `proofs`, `result_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.report.parts import read_json
from mup_megatron.util.errors import UserError

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

    Raises:
        UserError: a file is damaged.
    """
    for path in result_files(directory):
        result = read_json(path)
        kind = path.parent.name
        picture = path.with_suffix(".png")
        try:
            title, lines = _title(kind, result), [str(line) for line in _lines(kind)(result)]
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            # What `lines` reads of a result is all over it, and only its own command writes one.
            raise UserError(
                f"{path}: damaged ({type(error).__name__}: {error}); expected a result of {kind}; run the command "
                "again, or move the file away to see the rest of the run"
            ) from None
        yield Proof(title=title, lines=lines, picture=picture if picture.is_file() else None)


def _title(kind: str, result: Mapping[str, Any]) -> str:
    return {
        "coord-check": lambda: f"Coordinate check of {result['judged']}",
        "stability": lambda: f"Stable optima: {result['over']} over {result['across']}",
        "reverse": lambda: "Reverse transfer",
    }[kind]()


def _lines(kind: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """What the kind's command says of a result; imports what the command imports."""
    if kind == "coord-check":
        from mup_megatron.proof.told import lines as of_coordinates

        return of_coordinates
    if kind == "stability":
        from mup_megatron.proof.stability import lines as of_optima

        return of_optima
    from mup_megatron.proof.reverse import lines as of_reversal

    return of_reversal
