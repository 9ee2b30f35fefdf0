"""The coordinate check in every regime under which some rule matters, and one table.

Public names: `thorough`, `in_regime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mup_megatron.config import Config
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.check import Check
from mup_megatron.proof.coord_check import coord_check
from mup_megatron.proof.regimes import REGIMES
from mup_megatron.proof.roles import KEY_BIAS
from mup_megatron.proof.told import lines, write
from mup_megatron.proof.verdict import Slope, together, verdict_of
from mup_megatron.util.errors import UserError

SAME = 1e-3
"""How far two runs of the same numbers may be from each other, relatively: sums in another order, and Adam's signs of
what is nearly zero."""


def thorough(
    config: Config, rank: Rank, asked: Check, directory: Path, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs every regime and writes each one's result. Collective.

    Args:
        config: the run.
        rank: this process.
        asked: of the plain regime, which alone is compared with another parametrization.
        directory: for the regimes' results, in a folder `regimes`.
        say: takes lines of progress.

    Returns:
        The whole result, the same on every rank; that of the plain regime, for the picture.

    Raises:
        UserError: bad input to the plain check. What another regime cannot do is told in its row.
    """
    rows: list[dict[str, Any]] = []
    plain: dict[str, Any] = {}
    for name, regime in REGIMES.items():
        if not regime.thorough and regime.optimizer != config.optimizer.name:
            continue
        say(f"regime {name}: {regime.what}")
        try:
            of_regime = replace(asked, regime=name, compare=asked.compare and name == "plain")
            row, result = in_regime(config, rank, of_regime, plain, say)
        except UserError as error:
            if name == "plain":
                raise
            rows.append({"regime": name, "verdict": "not run", "why": str(error)})
            continue
        rows.append(row)
        if name == "plain":
            plain = result
        elif rank.is_first:
            write(result, directory / "regimes")
        if not regime.repeat:
            for line in lines(result):
                say(f"  {line}")
    verdict = together(row["verdict"] for row in rows)
    whole = {"judged": "thorough", "passed": verdict == "passed", "verdict": verdict, "regimes": rows}
    return {**whole, "provenance": plain["provenance"]}, plain


def in_regime(
    config: Config, rank: Rank, asked: Check, plain: Mapping[str, Any], say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One regime's row of the table, and its result. Collective.

    Args:
        config: the run.
        rank: this process.
        asked: names the regime; µP is judged.
        plain: result of the plain regime, for what has to repeat it.
        say: takes lines of progress.
    """
    repeat = REGIMES[asked.regime].repeat
    # The same numbers or others: one seed says it.
    asked = replace(asked, point="mup", seeds=1 if repeat else asked.seeds)
    result = coord_check(config, rank, asked, say=say)
    row = _repeated(asked.regime, plain, result, start=repeat == "start") if repeat else _row(asked.regime, result)
    return row, result


def _row(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A regime's verdict, with its worst module or parameter."""
    verdicts = result["verdicts"][result["judged"]]
    judged = {name: each for name, each in verdicts.items() if each["verdict"] != "not judged"}
    worst = max(judged, key=lambda each: Slope.of(judged[each]).order)
    own = {key: result[key] for key in ("verdict", "out_of_bounds", "undecided")}
    return {"regime": name, "worst": worst, **judged[worst], **own}


def _repeated(name: str, plain: Mapping[str, Any], result: Mapping[str, Any], *, start: bool) -> dict[str, Any]:
    """A regime that has to give the plain regime's numbers; `start`: its outputs before the first step."""
    known = {(cell["factor"], cell["seed"]): cell for cell in plain["cells"] if cell["line"] == "mup"}
    worst, most = None, 0.0
    apart: dict[str, dict[str, Any]] = {}
    for cell in result["cells"]:
        here, there = (dict(_numbers(each["coordinates"])) for each in (cell, known[cell["factor"], cell["seed"]]))
        for key in here.keys() | there.keys():
            one, other = here.get(key), there.get(key)
            if key[1].endswith(KEY_BIAS) or one == other or (start and not _starts(*key)):
                continue
            off = 1.0 if one is None or other is None else abs(one - other) / max(abs(one), abs(other))
            if off > most:
                worst, most = key, off
            if off > apart.get(key[1], {"difference": SAME})["difference"]:
                apart[key[1]] = {"quantity": key[0], "step": key[2], "factor": cell["factor"], "difference": off}
    row: dict[str, Any] = {"regime": name, "verdict": verdict_of(apart, False), "difference": most, "bound": SAME}
    row |= {"out_of_bounds": sorted(apart, key=lambda each: -apart[each]["difference"]), "undecided": []}
    return row if worst is None else {**row, "worst": worst[1], "quantity": worst[0], "step": worst[2], "apart": apart}


def _starts(quantity: str, name: str, step: int) -> bool:
    """Whether a number is an output before the first step, behind the embedding's multiplier."""
    return (quantity, step) == ("output", 0) and not name.startswith("embedding.")


def _numbers(coordinates: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, int], float | None]]:
    """(quantity, name, step) to every number of one model."""
    for quantity, table in {**coordinates["modules"], "update": coordinates["updates"]}.items():
        for name, values in table.items():
            for step, value in enumerate(values):
                yield (quantity, name, step), value
