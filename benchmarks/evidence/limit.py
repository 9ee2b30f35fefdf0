"""The limit of infinite width: whose features move there, and who has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.evidence import records
from benchmarks.evidence.records import Rows, record

PATH = "limit/limit.json"
LINES = {"mup": records.LINES["mup"], "fan_in": records.LINES["fan_in"], "ntk": "neural tangent"}
_FALL = 0.1
"""Octaves by which the change of the features may fall per doubling of the width."""


def limit() -> Rows:
    """By parametrization and width: how far features move, and how far the next width is."""
    found = record(PATH)
    sizes = [each["size"] for each in found["sizes"]]
    columns = ["features move by", "the next width's features", "the next width's losses", "loss at the end"]
    rows = [["", "hidden size", *columns]]
    for name, label in LINES.items():
        line = found["kernels"][name]
        for at, size in enumerate(sizes):
            pair = [f"{line[key][at]:.3f}" if at < len(sizes) - 1 else "" for key in ("kernels", "curves")]
            rows.append(
                [label if at == 0 else "", str(size), f"{line['moved'][at]:.3f}", *pair, f"{line['loss'][at]:.3f}"]
            )
    return rows


def _falls(found: Mapping[str, Any], name: str) -> float:
    """Octaves by which the change of the features falls per doubling of the width, from the least to the largest."""
    sizes, moved = found["sizes"], found["kernels"][name]["moved"]
    return math.log2(moved[0] / moved[-1]) / math.log2(sizes[-1]["size"] / sizes[0]["size"])


def _judged(found: Mapping[str, Any], name: str) -> tuple[bool, bool]:
    """Whether features keep moving; and whether features and losses of neighbors come closer, first pair to last."""
    line = found["kernels"][name]
    closer = all(line[key][-1] < line[key][0] for key in ("kernels", "curves"))
    return _falls(found, name) < _FALL, closer


def said_of_limit() -> str:
    """What each does, by the two questions."""
    found = record(PATH)
    said = []
    for name, label in LINES.items():
        moves, closer = _judged(found, name)
        line = found["kernels"][name]
        said.append(
            f"{label}: features {'keep moving' if moves else 'stop moving'} ({-_falls(found, name):+.2f} octaves per "
            f"doubling), neighboring widths come {'closer' if closer else 'no closer'} (features from "
            f"{line['kernels'][0]:.2f} apart to {line['kernels'][-1]:.2f}, losses from {line['curves'][0]:.2f} nats to "
            f"{line['curves'][-1]:.2f})."
        )
    return " ".join(said)


def only_mup() -> str:
    """The verdict on the claim: µP's features move and converge, those of each of the others do not do both."""
    found = record(PATH)
    both = [name for name in LINES if all(_judged(found, name))]
    if both == ["mup"]:
        return "**passed**"
    who = " and ".join(LINES[name] for name in both) or "none"
    return f"**failed**: whose features move and converge: {who}"
