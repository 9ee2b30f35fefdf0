"""What trials are compared by, in the words of the people who read it. Public names: `Objective`, `LOSS`, `BLEU`,
`objective_of`, `with_name`.

A study looks for the smallest of one number, which its storage and its record call `loss`. Where trials are compared by
BLEU (tuning.objective), that number is 100 - BLEU. People are shown BLEU, under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How a study's number is shown.

    Args:
        key: of tuning.objective, and of a record.
        name: for people.
        unit: in brackets behind the name, on axes.
        digits: behind the point.
        best: what is shown where the study's number is 0, if larger is better; None if the number is shown as it is.
    """

    key: str
    name: str
    unit: str
    digits: int
    best: float | None = None

    def shown(self, number: float) -> float:
        """What people read for a study's number."""
        return number if self.best is None else self.best - number

    def text(self, number: float) -> str:
        """The same as text, without its name."""
        return f"{self.shown(number):.{self.digits}f}"

    @property
    def axis(self) -> str:
        """Of a picture."""
        return f"proxy {self.name} ({self.unit})"


LOSS = Objective(key="loss", name="loss", unit="nats per token", digits=4)
BLEU = Objective(key="bleu", name="BLEU", unit="higher is better", digits=2, best=100.0)
_BY_KEY = {each.key: each for each in (LOSS, BLEU)}


def objective_of(key: str) -> Objective:
    """By the key that tuning.objective and a record's study have."""
    return _BY_KEY[key]


def with_name(study: Mapping[str, Any], objective: Objective) -> dict[str, Any]:
    """A record's study that names what it compared: beside each `loss` and `mean` stands what people read.

    A study of losses stays as it is.
    """
    if objective is LOSS:
        return dict(study)

    def told(part: Mapping[str, Any], number: str) -> dict[str, Any]:
        value = part[number]
        return {**part, objective.key: None if value is None else objective.shown(value)}

    parts: dict[str, Any] = {
        "trials": [told(trial, "loss") for trial in study["trials"]],
        "candidates": [told(candidate, "mean") for candidate in study["candidates"]],
    }
    if "descent" in study:
        moves = [
            {
                **move,
                f"{objective.key}_before": objective.shown(move["loss_before"]),
                f"{objective.key}_after": objective.shown(move["loss_after"]),
            }
            for move in study["descent"]["moves"]
        ]
        parts["descent"] = {**study["descent"], "moves": moves}
    return {"objective": objective.key, **told(study, "loss"), **parts}
