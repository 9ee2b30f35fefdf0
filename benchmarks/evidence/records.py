"""The records beside the pages of evidence, and how their cells are worded.

Public names: `FOLDER`, `records`, `record`, `field`, `verdict`, `line_verdict`, `asked`, `steps`, `seeds`, `lacks`,
`difference`, and the cells of tables over sizes.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mup_megatron.tuning.loss_law import AXES
from mup_megatron.util.provenance import KEYS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "evidence"

LINES = {
    "mup": "µP",
    "standard": "standard",
    "fan_in": "1/sqrt(fan-in)",
    "per_layer": "a rate per layer",
    "one_ratio": "one ratio",
}
"""Parametrizations, as the tables' heads name them."""
MODELS = {"mlp": "MLP", "resnet": "ResNet"}
"""Of docs/examples/images.py."""

Rows = list[list[str]]
"""A table: its head, and its rows."""


def records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of the folder, by its path there."""
    for path in sorted(FOLDER.glob("*/*.json")):
        yield str(path.relative_to(FOLDER)), json.loads(path.read_text(encoding="utf-8"))


def record(path: str) -> dict[str, Any]:
    """One record."""
    found: dict[str, Any] = json.loads((FOLDER / path).read_text(encoding="utf-8"))
    return found


def field(found: Any, path: str) -> Any:
    """What stands at a path of names that are separated by dots; of a list of sizes, the size's item.

    Raises:
        KeyError: there is nothing.
    """
    for name in path.split("."):
        if isinstance(found, list):
            items = {str(item.get("size")) if isinstance(item, dict) else None: item for item in found}
            found = items[name] if name in items else dict(enumerate(found))[int(name)]
        else:
            found = found[name]
    return found


# --- what a record says of itself ---


def verdict(found: Mapping[str, Any]) -> str:
    """The verdict that the command gave, with its reasons, in words."""
    if "passed" not in found:
        return "none: a measurement"
    said = found.get("verdict") or ("passed" if found["passed"] else "failed")
    if "runs" in found or "rungs" in found:
        reasons = [*found["reasons"], *found.get("open", ())]
    elif "lines" in found:
        line = found["lines"][found["judged"]]
        reasons = [*line["reasons"], *line.get("open", ())]
    else:
        reasons = [f"out of bounds: {name}" for name in found["out_of_bounds"]]
        reasons += [f"undecided: {name}" for name in found.get("undecided", ())]
    return _worded(said, reasons)


def line_verdict(line: Mapping[str, Any]) -> str:
    """How one parametrization of a record would be judged, were it the one that is."""
    reasons, beyond = line["reasons"], line.get("open", ())
    return _worded("failed" if reasons else "undecided" if beyond else "passed", [*reasons, *beyond])


def _worded(said: str, reasons: list[str]) -> str:
    if len(reasons) > 4:
        reasons = [*reasons[:3], f"and {len(reasons) - 3} more"]
    return f"**{said}**" + (f": {'; '.join(reasons)}" if reasons else "")


def asked(found: Mapping[str, Any]) -> str:
    """What was measured, over which sizes."""
    if "curves" in found:
        large, small = (found[name]["model"]["hidden_size"] for name in ("config", "small"))
        return f"reverse transfer, hidden size {large} by {small}"
    if "kernels" in found:
        return f"features and losses over width, {span(found)}"
    if "rates" in found:
        return "BLEU with values that searches found"
    if "runs" in found:
        return "transferred values against tuned and default ones"
    if "repetitions" in found:
        proxy, target = found["sizes"]
        return f"a search of hidden size {target}, by {proxy}"
    if "rungs" in found:
        least, largest = found["rungs"][0], found["rungs"][-1]
        factors = (f"{axis} {least[axis]} to {largest[axis]} times" for axis in varying(found))
        return f"laws of {found.get('over', 'lr')} and loss, {', '.join(factors)}"
    if "searches" in found:
        return "cost of a search"
    if "lines" in found:
        of = f"{MODELS[found['of']]} on {found['data']}: " if "of" in found else ""
        return f"{of}{found['over']} over {found['across']}, {span(found)}"
    what = "experts" if found["over"] == "num_moe_experts" else found["axis"]
    kind = "coordinates and ranges" if "ranges" in found["cells"][0]["coordinates"] else "coordinates"
    return f"{kind} over {what}, {span(found)}"


def steps(found: Mapping[str, Any]) -> str:
    """How long it trained; nothing for searches, which replay."""
    if "rungs" in found:
        return f"{min(found['steps'].values())} to {max(found['steps'].values())}"
    if "steps" in found:
        return str(found["steps"])
    return "" if "searches" in found else str(found["config"]["training"]["train_steps"])


def seeds(found: Mapping[str, Any]) -> str:
    """How often; where searches alone were replayed, how many."""
    if "curves" in found:
        return str(len({curve["seed"] for curve in found["curves"]}))
    return f"{found['seeds']} searches" if "searches" in found and "runs" not in found else str(found["seeds"])


def lacks(found: Mapping[str, Any]) -> str:
    """Which of util.provenance's keys a record has not."""
    held = {**found, **found.get("machine", {}), **found.get("provenance", {})}
    missing = [key for key in KEYS if key not in held]
    return "no provenance" if len(missing) == len(KEYS) else f"no {', '.join(missing)}" if missing else ""


# --- cells ---


def octaves(row: Mapping[str, Any]) -> str:
    """Octaves from a size's optimum to the largest's, with the standard error over seeds where there are several."""
    if row["drift"] is None:
        return "beyond what was tried"
    spread = f" ± {row['drift']['error']:.2f}" if row["drift"]["error"] else ""
    return f"{row['drift']['octaves']:+.2f}{spread}"


def cost(row: Mapping[str, Any]) -> str:
    """What the best tried value of a size costs the largest."""
    return "diverges" if row["cost"] is None else f"{100 * row['cost']:.2f} %"


def cost_of_fitted(found: Mapping[str, Any], row: Mapping[str, Any], line: str = "mup") -> str:
    """What the vertex of a size's parabola costs the largest.

    The largest's loss there is that of the parabola through the three tried values that are nearest, and its least loss
    that of the parabola of its own minimum, so the grid of what was tried has no part in it.
    """
    large = found["lines"][line]["rows"][-1]
    small, least = row["minimum"]["value"], large["minimum"]["value"]
    if small is None or least is None:
        return "beyond what was tried"
    return f"{100 * (_between(found, large, small) / _between(found, large, least) - 1):.2f} %"


def _between(found: Mapping[str, Any], row: Mapping[str, Any], value: float) -> float:
    """A size's mean loss at a value, by Lagrange's parabola over log2 of the three nearest that were tried."""
    places = sorted(range(len(found["values"])), key=lambda at: abs(math.log2(found["values"][at] / value)))[:3]
    x = [math.log2(found["values"][at] / value) for at in places]
    means = [statistics.fmean(row["losses"][at]) for at in places]
    others = [[x[two] for two in range(3) if two != one] for one in range(3)]
    return sum(
        mean * math.prod(each / (each - own) for each in rest) for mean, own, rest in zip(means, x, others, strict=True)
    )


def varying(found: Mapping[str, Any]) -> list[str]:
    """In what the rungs of a ladder differ."""
    return [axis for axis in AXES if len({rung.get(axis, 1) for rung in found["rungs"]}) > 1]


def best(row: Mapping[str, Any]) -> str:
    """Where a size's minimum lies."""
    least = row["minimum"]
    if least["edge"]:
        return f"{'below' if least['edge'] == 'low' else 'above'} {least['tried']:.2g}"
    return f"{least['value'] or least['tried']:.2g}"


def row_of(found: Mapping[str, Any], size: int, line: str = "mup") -> dict[str, Any]:
    """A size's row."""
    row: dict[str, Any] = next(row for row in found["lines"][line]["rows"] if row["size"] == size)
    return row


def losses(found: Mapping[str, Any], line: str = "mup") -> str:
    """Every size's lowest loss."""
    return ", ".join(f"{row['minimum']['loss']:.3f}" for row in found["lines"][line]["rows"])


def judged_from(found: Mapping[str, Any]) -> int:
    """The size that is compared with the largest."""
    size: int = found.get("from", found["sizes"][0]["size"])
    return size


def span(found: Mapping[str, Any]) -> str:
    """The least and the largest size."""
    sizes = [size["size"] for size in found["sizes"]]
    return f"{sizes[0]} to {sizes[-1]}"


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""By the number of pairs: the errors of their mean to either side that hold 95 %, by Student's t distribution."""


class Difference(NamedTuple):
    """Mean of pairs' differences, and half of its 95 % interval."""

    mean: float
    half: float

    @property
    def sign(self) -> int:
        """1 or -1, or 0 where the interval holds 0 and the mean decides nothing."""
        return 0 if abs(self.mean) <= self.half else 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.half:.3f}" if math.isfinite(self.half) else ", one seed")


def difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Of pairs, such as the seeds' losses of two models; the interval of one pair has no end."""
    pairs = [a - b for a, b in zip(one, other, strict=True)]
    if len(pairs) == 1:
        return Difference(pairs[0], math.inf)
    return Difference(statistics.fmean(pairs), STUDENT[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs)))


LOWER = {-1: "passed", 0: "undecided", 1: "failed"}
"""By the sign of a difference: the verdict on the claim that the first ends lower."""
