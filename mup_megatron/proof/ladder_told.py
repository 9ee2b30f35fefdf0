"""A ladder's result for people and as JSON. Public names: `lines`, `write`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mup_megatron.files import write_whole
from mup_megatron.loss_law import AXES


def lines(result: Mapping[str, Any]) -> list[str]:
    """A result for people."""
    said = [
        f"{len(result['rungs'])} rungs, {result['seeds']} seeds, {result['seconds'] / 60:.0f} minutes of one process"
    ]
    for rung in result["rungs"]:
        best = f"{rung['value'] or rung['tried']:.3g}"
        best += f" ± {rung['error']:.2f} octaves" if rung["error"] is not None else ""
        best += f", at the {rung['edge']} end of what was tried" if rung["edge"] else ""
        where = ", ".join(f"{name} × {rung[name]}" for name in AXES)
        said.append(f"  {where}: loss {rung['loss']:.4f} at lr {best}")
    law = result["rate"]
    terms = [f"{name}^({law[name]['exponent']:+.3f} ± {law[name]['error']:.3f})" for name in AXES if name in law]
    said.append(f"rate: {2 ** law['constant']:.4g} · {' · '.join(terms)}, spread {law['spread']:.2f} octaves")
    said.append(f"loss: {result['loss']['said']}, spread {result['loss']['spread']:.4f}")
    held = result["held_out"]
    rate, loss = held["rate"], held["loss"]
    octaves = "beyond what was tried" if rate["octaves"] is None else f"{rate['octaves']:+.2f} octaves off"
    said.append(
        f"held out, batch × {held['batch']}, tokens × {held['tokens']}, width × {held['width']}: "
        f"lr {rate['predicted']:.3g} ± {rate['error']:.2f} octaves predicted, {octaves}; "
        f"loss {loss['predicted']:.4f} ± {loss['error']:.4f} predicted, {loss['measured']:.4f} measured"
    )
    for name, each in result["published"].items():
        off = "not known" if each["octaves"] is None else f"{each['octaves']:+.2f} octaves off there"
        said.append(
            f"  {name}, from the first rung: {off}; all rungs scatter by {each['scatter']:.2f} octaves about it"
        )
    said += [f"dropped, too far from the minimum: {line}" for line in result["dropped"]]
    said += [f"failed: {line}" for line in result["failed"]]
    said += [*result["reasons"], *result["open"]]
    keys = ", ".join(f"{key}: {value}" for key, value in result["keys"].items())
    ends = {
        "passed": f"passed: the laws tell the largest rung; in a config: {keys}, or fitted, with its ladder.json as "
        "tuning.ladder",
        "failed": "failed: the laws do not tell the largest rung",
        "undecided": "undecided: whether the laws tell the largest rung's best rate is not known",
    }
    return [*said, ends[result["verdict"]]]


def write(result: Mapping[str, Any], directory: Path) -> Path:
    """Writes a result as JSON; returns the file."""
    path = directory / "ladder.json"
    write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return path
