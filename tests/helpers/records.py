"""Transfer records, and what one says of its study and its budget, where a test asks nothing of either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mup_megatron.tuning.family import digest

BUDGET: dict[str, Any] = {"spent": {"tokens": 1024, "flops": 1e9, "share": 0.01, "process_seconds": 1.5}}


def study_of(values: dict[str, float | str] | None = None, **changed: Any) -> dict[str, Any]:
    """A study of one trial, which is the chosen one.

    Args:
        values: of that trial.
        changed: keys of the study in the place of these.
    """
    values = values or {"lr": 0.004}
    numbers = {name: float(value) for name, value in values.items() if not isinstance(value, str)}
    trial = {"slot": 0, "seed": 7, "state": "complete", "repeats": False, "loss": 2.5, "reports": {"8": 2.5}}
    return {
        "values": values,
        "loss": 2.5,
        "noise": None,
        "interior": dict.fromkeys(numbers, False),
        "ranges": {name: {"low": value, "high": value, "log": False} for name, value in numbers.items()},
        "candidates": [{"slot": 0, "values": values, "losses": [2.5], "mean": 2.5, "within_noise": False}],
        "trials": [{**trial, "values": values, "reason": None, "seconds": 0.5}],
        **changed,
    }


def write_values(path: Path, **values: Any) -> str:
    """A transfer record of these values, whose checksum holds and whose family is nobody's; its path."""
    said: dict[str, Any] = {"format": 1, "created": "", "digest": "", "family": {}, "values": values, "tuned": []}
    said |= {"target": {"name": "", "sizes": {}, "becomes": {}, "extrapolated": [], "not_transferred": []}}
    said |= {"proxy": {"trained": {}}, "rules": {}, "study": study_of(), "budget": BUDGET, "versions": {}}
    path.write_text(json.dumps({**said, "checksum": digest(said)}))
    return str(path)
