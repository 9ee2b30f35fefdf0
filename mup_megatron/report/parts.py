"""What the pages and pictures of a run read of its files: each is held against this before anything is made of it.

Public names: `read_text`, `read_json`, `checked`, `read_lines`, `read_samples`, `read_alarms`; the parts `Settings`,
`Explanation`, `Plan`, `Made`, `Audited`, `WatchedStep`, `Evaluation`.

A part names what is read of a file and no more: what else is in it, of this version or another, stays as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from mup_megatron.util import files
from mup_megatron.util.errors import UserError

_ADVICE = "put a copy of the file back, or move it away to see the rest of the run"
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Text = Annotated[str, Field(max_length=10_000)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Run(_Part):
    name: _Text | None = None


class _Tuning(_Part):
    record: _Text | None = None


class _Parametrization(_Part):
    name: _Text = "mup"


class _Training(_Part):
    train_steps: _Count | None = None
    global_batch_size: _Count | None = None
    seq_length: _Count | None = None
    lr_schedule: _Text | None = None


class _Model(_Part):
    architecture: _Text | None = None
    num_layers: _Count | None = None
    hidden_size: _Count | None = None


class Settings(_Part):
    """config.yaml, and the config of explain.json."""

    run: _Run | None = None
    model: _Model | None = None
    tuning: _Tuning | None = None
    parametrization: _Parametrization | None = None
    hparams: dict[str, float | dict[str, dict[str, float]] | None] | None = None
    training: _Training | None = None


class _Predicted(_Part):
    loss: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    error: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    why_not: _Text = ""

    @model_validator(mode="after")
    def _says_something(self) -> _Predicted:
        if not ({"loss", "error"} <= self.model_fields_set or {"why_not"} == self.model_fields_set):
            raise ValueError("neither loss and error, nor why_not")
        return self


class _Block(_Part):
    name: _Text
    init_std: float


class _Tensor(_Part):
    name: _Text
    global_shape: list[_Count]
    local_shape: list[_Count]
    base_shape: list[_Count]
    blocks: list[_Block] | None
    init: _Text = ""
    init_std: float | None
    lr: float
    eps: float | None
    weight_decay: float

    @model_validator(mode="after")
    def _has_std(self) -> _Tensor:
        if not self.blocks and self.init_std is None:
            raise ValueError("neither blocks nor init_std")
        return self


class _Change(_Part):
    step: _Count
    key: _Text
    before: Any = None
    now: Any = None


class Explanation(_Part):
    """explain.json."""

    config: Settings | None = None
    changes: list[_Change] = []
    moved: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = {}
    ladder: list[_Text] = []
    predicted: _Predicted | None = None
    forward: dict[str, float]
    parameters: list[_Tensor]


class _Cost(_Part):
    flops: Annotated[float, Field(gt=0)]


class _Proxy(_Part):
    parameters: _Count


class Plan(_Part):
    """plan.json."""

    tuning: _Proxy | None = None
    target: _Cost
    extrapolated: list[_Text]
    ladder: list[_Text] = []
    predicted: _Predicted | None = None


class Made(_Part):
    """mup.json of a checkpoint, of whichever format: no more is shown. checkpoints/manifest.py reads the whole."""

    versions: dict[str, str]


class _Finding(_Part):
    tensor: _Text
    quantity: _Text
    expected: float | None
    found: float | None
    right: bool


class Audited(_Part):
    """audit.json."""

    findings: list[_Finding]


class _Alarm(_Part):
    step: _Count
    since: _Count
    name: _Text
    quantity: _Text
    value: float | None
    cause: _Text


class WatchedStep(_Part):
    """A step's line of metrics.jsonl, as who watches reads it."""

    step: _Count
    loss: float
    seconds: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    tokens_per_second: FiniteFloat = 0.0


class _Step(WatchedStep):
    lr: float
    seconds: float
    grad_norm: float = 0.0


class _Sample(_Part):
    step: _Count
    prompt: _Text
    text: _Text


class Evaluation(_Part):
    """An evaluation's line of metrics.jsonl."""

    step: _Count
    eval_loss: float
    bleu: float = 0.0


def checked(part: type[BaseModel], data: Any, path: Path, where: str = "") -> Any:
    """The data as it was, once it is known to hold what is read of it.

    Raises:
        UserError: it does not; names the file and the key.
    """
    try:
        part.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}damaged ({key + ': ' if key else ''}{first['msg']}); {_ADVICE}") from None
    except RecursionError:
        raise UserError(f"{path}: {where}damaged (nested too deeply); {_ADVICE}") from None
    return data


def read_text(path: Path) -> str | None:
    """A text file; None where there is none. Raises UserError where it cannot be read."""
    try:
        return files.read_text(path, most=None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: damaged (not text); {_ADVICE}") from None


def read_json(path: Path, part: type[BaseModel] | None = None) -> Any:
    """A JSON file, held against a part; None where there is none. Raises UserError."""
    text = read_text(path)
    if text is None:
        return None
    data = _parsed(text, path, "")
    return data if part is None else checked(part, data, path)


def _parsed(text: str, path: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {where}damaged (not valid JSON: {error}); {_ADVICE}") from None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """metrics.jsonl: lines of steps, lines of evaluations; None where there is none.

    Raises:
        UserError: a line is damaged.
    """
    found = _objects(path)
    if found is None:
        return None
    steps = [checked(_Step, data, path, where) for where, data in found if "loss" in data]
    evaluations = [checked(Evaluation, data, path, where) for where, data in found if "eval_loss" in data]
    return steps, evaluations


def read_alarms(path: Path) -> list[dict[str, Any]]:
    """alarms.jsonl, in the order in which they were raised; empty where there is none. Raises UserError."""
    return [checked(_Alarm, alarm, path) for alarm in files.json_lines(path)]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """samples.jsonl: what the model wrote after each prompt of `run.samples`, by step; empty where there is none.

    Raises:
        UserError: a line is damaged.
    """
    return [checked(_Sample, data, path, where) for where, data in _objects(path) or ()]


def _objects(path: Path) -> list[tuple[str, dict[str, Any]]] | None:
    """A file of JSON objects, each with where it stands; a last line that a crash cut short is left out."""
    text = read_text(path)
    if text is None:
        return None
    found = []
    written = text.split("\n")
    for number, line in enumerate(written, start=1):
        if not line or (number == len(written) and not line.endswith("}")):
            continue
        where = f"line {number}: "
        data = _parsed(line, path, where)
        if not isinstance(data, dict):
            raise UserError(f"{path}: {where}damaged (no JSON object); {_ADVICE}")
        found.append((where, data))
    return found
