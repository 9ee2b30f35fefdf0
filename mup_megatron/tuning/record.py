"""transfer.json: the tuned values, what each becomes on the target, and what they were found with.

Public names: `TransferRecord`, `StudyRecord`, `TrialRecord`, `write_record`.

A record belongs to a family (family.py). A config whose digest differs is refused with the keys that differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from mup_megatron.config import Config
from mup_megatron.tuning.family import differences, digest, digested
from mup_megatron.tuning.fitted import Fitted
from mup_megatron.tuning.outcome import Range
from mup_megatron.tuning.space import with_values
from mup_megatron.util.errors import ConfigError, UserError
from mup_megatron.util.files import read_text, write_whole

FORMAT = 1
_MOST_DIFFERENCES = 8
_Value = float | str
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Text = Annotated[str, Field(max_length=10_000)]


class _Part(BaseModel):
    """Strict, so that a number that is written as text is no number. What is not read here stays as it was."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")


class TrialRecord(_Part):
    """A trial of the study; see outcome.Trial."""

    slot: _Count
    seed: _Count
    state: _Text
    values: dict[str, _Value]
    repeats: bool = False
    loss: float | None
    reports: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], float | None]
    reason: _Text | None = None
    seconds: float


class CandidateRecord(_Part):
    """One of the best trials with its repetitions; see outcome.Candidate."""

    slot: _Count
    losses: Annotated[list[float | None], Field(min_length=1)]
    mean: float
    within_noise: bool


class MoveRecord(_Part):
    """A value that coordinate descent found better; see descent.Move."""

    name: str
    before: _Value
    after: _Value
    loss_before: FiniteFloat
    loss_after: FiniteFloat


class DescentRecord(_Part):
    """What coordinate descent moved; see descent.Descent."""

    moves: list[MoveRecord]
    count: _Count
    noise: FiniteFloat | None
    ended: str | None


class StudyRecord(_Part):
    """What the values were found with (outcome.Choice), by what trials were compared, where `tuning.prior` began."""

    values: Annotated[dict[str, _Value], Field(min_length=1)]
    loss: float
    noise: float | None
    interior: dict[str, bool]
    ranges: dict[str, Range]
    candidates: Annotated[list[CandidateRecord], Field(min_length=1)]
    trials: list[TrialRecord]
    descent: DescentRecord | None = None
    objective: Literal["loss", "bleu"] = "loss"
    prior: dict[str, _Value] = {}

    @model_validator(mode="after")
    def _belong_together(self) -> StudyRecord:
        tried = [trial.values for trial in self.trials if trial.values]
        if not tried:
            raise ValueError("no trial has values")
        for name, value in self.values.items():
            if any(name not in values or isinstance(values[name], str) != isinstance(value, str) for values in tried):
                raise ValueError(f"a trial has no value of {name}")
            if not isinstance(value, str) and name not in self.interior:
                raise ValueError(f"interior says nothing of {name}")
        for name in self.interior:
            if name not in self.values:
                raise ValueError(f"no value of {name}")
            if name not in self.ranges:
                raise ValueError(f"no range of {name}")
            least = 0.0 if self.ranges[name].log else -math.inf
            for value in (self.values[name], *(values[name] for values in tried if name in values)):
                if isinstance(value, str) or not math.isfinite(value) or value <= least:
                    raise ValueError(f"a value of {name} is no number, or none of its range")
        return self


class SpentRecord(_Part):
    """What tuning took, of all its trials."""

    tokens: _Count
    flops: float
    share: float
    process_seconds: float


class BudgetRecord(_Part):
    """The plan (budget.Plan), and what was spent."""

    spent: SpentRecord


class ProxyRecord(_Part):
    """The proxy's sizes, on how many steps, tokens and layers it was trained, and with what schedule and clipping."""

    sizes: dict[str, Any] = {}
    trained: dict[str, Annotated[int, Field(gt=0, le=2**63)]]
    settings: dict[str, FiniteFloat | _Text | list[FiniteFloat]] = {}


class TargetRecord(_Part):
    """The target of the run that tuned: its name, its sizes, what the values become there, where it is extrapolated,
    which of the values µTransfer does not move, and what a ladder tells of it."""

    name: _Text
    sizes: dict[str, Any]
    becomes: dict[str, Any]
    extrapolated: list[_Text]
    not_transferred: list[_Text]
    ladder: list[_Text] = []


class TransferRecord(_Part):
    """What transfer.json says.

    Args:
        created: when, ISO 8601.
        digest: of `family`.
        family: what must be equal for the values to transfer, by dotted key (family.py).
        values: every hyperparameter at the base, by name.
        tuned: names of those that were searched; the others are as the config had them.
        target: of the run that tuned.
        proxy: of the same run.
        rules: the parametrization and the optimizer's update rule.
        study: what the values were found with.
        budget: the plan, and what was spent.
        versions: of the packages that tuned.
        ladder: what a ladder measured of the family; None without one.
    """

    created: _Text
    digest: str
    family: dict[str, Any]
    values: dict[str, _Value | None]
    tuned: list[str]
    target: TargetRecord
    proxy: ProxyRecord
    rules: dict[str, Any]
    study: StudyRecord
    budget: BudgetRecord
    versions: dict[str, str]
    ladder: Fitted | None = None

    @classmethod
    def read(cls, path: Path, config: Config | None) -> TransferRecord | None:
        """The record in a file, checked; None if there is no file.

        Args:
            path: of the record.
            config: the run that wants its values; None to read it without asking whom it is for.

        Raises:
            UserError: damaged, edited by hand, of a newer format, or of another family; says which keys differ.
        """
        if (plain := _plain(path)) is None:
            return None
        try:
            found = cls.model_validate({key: plain[key] for key in plain if key not in ("format", "checksum")})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"{path}: {where}: expected what tuning writes there ({first['msg']})") from None
        except RecursionError:
            raise UserError(f"{path}: nested too deeply; expected a transfer record") from None
        if config is not None:
            _check_family(path, found, config)
            _check_trials(path, found, config)
            try:
                with_values(config, found.values)
            except ConfigError as error:
                raise UserError(f"{path}: values: {error.key}: {error.problem}") from None
            except KeyError as error:
                raise UserError(f"{path}: values: {error.args[0]}") from None
        return found

    @classmethod
    def expect(cls, path: Path, config: Config | None) -> TransferRecord:
        """As `read`; a file that is not there is a UserError too."""
        found = cls.read(path, config)
        if found is None:
            raise UserError(f"{path}: cannot read the transfer record: No such file or directory")
        return found

    def as_json(self) -> dict[str, Any]:
        """As it is written: with its format, and a checksum over the rest."""
        plain = {"format": FORMAT, **self.model_dump(exclude_unset=True)}
        if self.ladder is not None:
            plain["ladder"] = self.ladder.as_json()
        return {**plain, "checksum": digest(plain)}


def write_record(path: Path, record: TransferRecord | Mapping[str, Any]) -> None:
    """Writes a record, or other plain data, whole or not at all."""
    plain = record.as_json() if isinstance(record, TransferRecord) else record
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(plain, indent=1) + "\n", sync=True)


def _plain(path: Path) -> dict[str, Any] | None:
    """What a file says, its format and its checksum right; None if there is no file. Raises UserError."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the transfer record: {error}") from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: line {error.lineno}: not valid JSON: {error.msg}; expected a transfer record"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; expected a transfer record") from None
    if not isinstance(record, dict) or not isinstance(record.get("format"), int):
        raise UserError(f"{path}: not a transfer record: it names no format")
    if record["format"] != FORMAT:
        raise UserError(f"{path}: format {record['format']}; this version of mup-megatron reads format {FORMAT}")
    if record.get("checksum") != digest({key: value for key, value in record.items() if key != "checksum"}):
        raise UserError(
            f"{path}: checksum: does not match what the record says, so it was edited or damaged; move it "
            "away, and tune again, or set values by hand under hparams: with tuning.run: never"
        )
    return record


def _check_family(path: Path, record: TransferRecord, config: Config) -> None:
    settings = digested(config, record.tuned)
    if record.digest == digest(settings):
        return
    differing = differences(record.family, settings, "in the record", "in the config")[:_MOST_DIFFERENCES]
    raise UserError(
        f"{path}: the transfer record belongs to another family than {config.source or 'this config'} "
        f"({'; '.join(differing)}); change the config back, or name another tuning.record or run.dir to tune again"
    )


def _check_trials(path: Path, record: TransferRecord, config: Config) -> None:
    """Rules over batch and tokens count from what the record's trials had, which must be what the config says."""
    trained = record.proxy.trained
    if not config.parametrization.has_horizon_rule:
        return
    for name in ("global_batch_size", "seq_length", "train_steps"):
        here = getattr(config.tuning, name) or getattr(config.training, name)
        if name in trained and trained[name] != here:
            raise UserError(
                f"{path}: its values were found at {name} {trained[name]:,}, from which the rules over batch and "
                f"tokens count, but the config's trials have {here:,}; expected tuning.{name}: {trained[name]}"
            )
