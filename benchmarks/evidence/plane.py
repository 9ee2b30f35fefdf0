"""The plane between the standard parametrization and µP: what the small model's best rate gives, point by point."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from benchmarks.evidence.records import LOWER, Rows, difference, record

PATH = "plane/lr-width.json"
_MUP = ("1", "1")


class Point(NamedTuple):
    """A point of the plane at the largest width.

    Args:
        kept: losses by seed at the rate that is best at the smallest width, of those that were tried; infinite where
            a run diverged. Unit: nats.
        cost: by how much their mean is above the loss at the point's own best rate. Unit: a share.
    """

    kept: list[float]
    cost: float

    @property
    def loss(self) -> float:
        """Mean over the seeds. Unit: nats."""
        return statistics.fmean(self.kept)


def _points() -> dict[tuple[str, str], Point]:
    """By the exponents INIT and LR."""
    found = record(PATH)
    points = {}
    for name, line in found["lines"].items():
        if name.startswith("interpolate:"):
            small, *_, large = line["rows"]
            losses = large["losses"][found["values"].index(small["minimum"]["tried"])]
            kept = [math.inf if loss is None else loss for loss in losses]
            init, lr = name.removeprefix("interpolate:").split(",")
            points[init, lr] = Point(kept, math.inf if small["cost"] is None else small["cost"])
    return points


def plane() -> Rows:
    """A row per exponent of the initial values, a column per exponent of the rates."""
    points = _points()
    inits, rates = (list(dict.fromkeys(pair[at] for pair in points)) for at in (0, 1))
    rows = [["", *(f"LR {lr}" for lr in rates)]]
    return rows + [[f"INIT {init}", *(_cell(points[init, lr]) for lr in rates)] for init in inits]


def _cell(point: Point) -> str:
    return f"{point.loss:.3f} (+{100 * point.cost:.1f} %)" if math.isfinite(point.loss) else "diverges"


def verdict() -> str:
    """Whether no other point ends lower than µP with the kept rate."""
    points = _points()
    own = points.pop(_MUP)
    lowest = min(points, key=lambda pair: points[pair].loss)
    apart = difference(own.kept, points[lowest].kept)
    return (
        f"**{LOWER[apart.sign]}**: {own.loss:.3f} nats at (1, 1), {points[lowest].loss:.3f} at "
        f"({', '.join(lowest)}), the lowest other, a difference of {apart}"
    )


def said_of_plane() -> str:
    """How many points keep their rate."""
    found, points = record(PATH), _points()
    bound = found["bounds"]["cost"]
    keep = [float(lr) for (_, lr), point in points.items() if point.cost <= bound]
    small, large = (size["size"] for size in found["sizes"])
    return (
        f"Loss at {large} with the best rate of {small}, and how far that is above the loss at the point's own best. "
        f"{len(keep)} of {len(points)} points are within {100 * bound:g} %, none with an LR below {min(keep):g}."
    )
