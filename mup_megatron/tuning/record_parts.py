"""What is read of a transfer record, however the target goes on, and of which kind each part must be.

Public name: `check_record`. A record whose checksum is right may still come from a script, or from another version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from mup_megatron.tuning.fitted import Fitted
from mup_megatron.util.errors import UserError

_PARTS = {"created": str, "digest": str, "family": dict, "values": dict, "tuned": list, "study": dict, "budget": dict}


def check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Whether everything that is read of a record is of its kind.

    Args:
        path: of the record, for the message.
        record: as plain data.

    Raises:
        UserError: a part is missing or malformed; names it.
    """
    for key, kind in _PARTS.items():
        if not isinstance(record.get(key), kind):
            raise UserError(f"{path}: {key} is missing or no {kind.__name__}")
    for key in ("target", "proxy", "rules", "versions"):
        if not isinstance(record.get(key, {}), dict):
            raise UserError(f"{path}: {key} is no dict")
    try:
        _Proxy.model_validate(record.get("proxy", {}))
    except ValidationError as error:
        where = ".".join(("proxy", *map(str, error.errors()[0]["loc"])))
        raise UserError(f"{path}: {where}: expected whole numbers above 0 by name, as tuning writes them") from None
    try:
        if record.get("ladder"):
            Fitted.model_validate(record["ladder"])
    except ValidationError as error:
        where = ".".join(("ladder", *map(str, error.errors()[0]["loc"])))
        raise UserError(f"{path}: {where}: expected what a ladder says there (mup-megatron ladder)") from None
    try:
        _Study.model_validate(record["study"])
    except (ValidationError, RecursionError):
        expected = "candidates, noise, interior, values, trials and ranges as tuning writes them"
        raise UserError(f"{path}: study: expected {expected}") from None


class _Part(BaseModel):
    # The record stays as plain data, so a number that is written as text must not count as a number.
    model_config = ConfigDict(strict=True)


class _Proxy(_Part):
    """What is read of a proxy: on how much it was trained (`_trained`)."""

    trained: dict[str, Annotated[int, Field(gt=0, le=2**63)]] = {}


class _Range(_Part):
    low: FiniteFloat
    high: FiniteFloat
    log: bool


class _Candidate(_Part):
    slot: int
    within_noise: Any
    losses: Annotated[list[float | None], Field(min_length=1)] | None = None
    mean: float | None = None


class _Tried(_Part):
    values: dict[str, float | str]
    slot: int | None = None
    state: str | None = None
    loss: float | None = None


class _Move(_Part):
    name: str
    before: float | str
    after: float | str
    loss_before: FiniteFloat
    loss_after: FiniteFloat


class _Descent(_Part):
    """What is read of coordinate descent: what it moved."""

    moves: list[_Move]
    count: int
    noise: FiniteFloat | None
    ended: str | None


class _Study(_Part):
    """What is read of a study, however the target goes on."""

    candidates: list[_Candidate]
    interior: dict[str, Any]
    noise: float | None
    values: dict[str, float | str] = {}
    trials: list[_Tried] = []
    ranges: dict[str, _Range] = {}
    objective: Literal["loss", "bleu"] = "loss"
    descent: _Descent | None = None

    @model_validator(mode="after")
    def _numbers_are_numbers(self) -> _Study:
        for name in self.interior:
            found = [values[name] for values in (self.values, *(one.values for one in self.trials)) if name in values]
            least = 0.0 if name in self.ranges and self.ranges[name].log else -math.inf
            bounds = [self.ranges[name].low, self.ranges[name].high] if name in self.ranges else []
            if found and name not in self.values:
                raise ValueError(f"no value of {name}")
            if not all(isinstance(one, float) and math.isfinite(one) and one > least for one in (*found, *bounds)):
                raise ValueError(f"a value of {name} is no number, or none of its range")
        return self

    @model_validator(mode="after")
    def _noise_can_be_told(self) -> _Study:
        if self.noise is None or not self.candidates:
            return self  # then nothing is said of noise (`_noise`)
        if self.candidates[0].mean is None or any(one.losses is None for one in self.candidates):
            raise ValueError("a candidate lacks its losses or their mean")
        if not all({"slot", "state", "loss"} <= one.model_fields_set and one.slot is not None for one in self.trials):
            raise ValueError("a trial lacks its slot, state or loss")
        return self
