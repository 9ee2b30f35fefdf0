"""The journal of a study: a file in the run's folder, checked line by line.

Public names: `Journal`, `journal_path`, `mend`.

Optuna replays a journal without checking it. A damaged line would therefore end in some Python error deep inside the
replay. So every line is compared with the form that Optuna writes, before Optuna reads it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from optuna.distributions import json_to_distribution
from optuna.storages.journal import JournalFileBackend
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mup_megatron.config import Config
from mup_megatron.tuning.journal_lock import JournalLock
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import check_regular, read_bytes

# --- its lines, as Optuna 4 and 5 write them ---


def _is_date(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


def _is_distribution(text: str) -> str:
    json_to_distribution(text)
    return text


_Date = Annotated[str, AfterValidator(_is_date)]
_Distribution = Annotated[str, AfterValidator(_is_distribution)]
_Id = Annotated[int, Field(ge=0)]
_State = Literal[0, 1, 2, 3, 4]  # optuna.trial.TrialState
_One = Annotated[dict[str, Any], Field(min_length=1, max_length=1)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    worker_id: str


class _CreateStudy(_Line):
    op_code: Literal[0]
    study_name: str
    directions: Annotated[list[Literal[0, 1, 2]], Field(min_length=1)]


class _OfStudy(_Line):
    op_code: Literal[1, 2, 3]
    study_id: _Id
    user_attr: _One | None = None
    system_attr: _One | None = None


class _CreateTrial(_Line):
    op_code: Literal[4]
    study_id: _Id
    datetime_start: _Date | None
    datetime_complete: _Date | None = None
    state: Literal[0, 4] = 0
    distributions: dict[str, _Distribution] = {}
    params: dict[str, float] = {}
    user_attrs: dict[str, Any] = {}
    system_attrs: dict[str, Any] = {}
    intermediate_values: dict[str, float] = {}
    value: None = None
    values: None = None


class _SetParameter(_Line):
    op_code: Literal[5]
    trial_id: _Id
    param_name: str
    param_value_internal: float
    distribution: _Distribution


class _SetState(_Line):
    op_code: Literal[6]
    trial_id: _Id
    state: _State
    values: Annotated[list[float], Field(min_length=1, max_length=1)] | None
    datetime_start: _Date | None = None
    datetime_complete: _Date | None = None


class _SetIntermediate(_Line):
    op_code: Literal[7]
    trial_id: _Id
    step: _Id
    intermediate_value: float


class _OfTrial(_Line):
    op_code: Literal[8, 9]
    trial_id: _Id
    user_attr: _One | None = None
    system_attr: _One | None = None


_LINE: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _CreateStudy | _OfStudy | _CreateTrial | _SetParameter | _SetState | _SetIntermediate | _OfTrial,
        Field(discriminator="op_code"),
    ]
)
_ATTRIBUTE = {2: "user_attr", 3: "system_attr", 8: "user_attr", 9: "system_attr"}
_RUNNING, _COMPLETE, _FINISHED = 0, 1, (1, 2, 3)


def _problem(log: Any) -> str | None:
    """What is wrong with a line of a journal; None if nothing is."""
    try:
        line = _LINE.validate_python(log)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'][1:])) or 'the line'}: {first['msg']}"
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # of json_to_distribution
        return str(error) or type(error).__name__
    attribute = _ATTRIBUTE.get(line.op_code)
    if attribute is not None and getattr(line, attribute) is None:
        return f"{attribute} is missing"
    if isinstance(line, _SetState):
        if line.state == _RUNNING and line.datetime_start is None:
            return "datetime_start is missing"
        if line.state in _FINISHED and line.datetime_complete is None:
            return "datetime_complete is missing"
        if line.state == _COMPLETE and line.values is None:
            return "values are missing"
    if isinstance(line, _SetParameter):
        return _parameter_problem(line.param_name, line.distribution, line.param_value_internal)
    if isinstance(line, _CreateTrial):
        if line.params.keys() - line.distributions.keys():
            return "a parameter without a distribution"
        problems = (_parameter_problem(name, line.distributions[name], value) for name, value in line.params.items())
        return next((problem for problem in problems if problem), None) or _steps_problem(line.intermediate_values)
    return None


def _parameter_problem(name: str, distribution: str, internal: float) -> str | None:
    try:
        json_to_distribution(distribution).to_external_repr(internal)
    except (IndexError, ValueError, TypeError, OverflowError):
        return f"{name}: {internal} is no value of its distribution"
    return None


def _steps_problem(values: Mapping[str, float]) -> str | None:
    return next((f"intermediate_values: {step} is no step" for step in values if not step.isdecimal()), None)


# --- the file ---

_MOST_BYTES = 1 << 30
"""Of a journal: some millions of lines."""


class Journal(JournalFileBackend):
    """A journal file whose lines are checked, and that stays the same file as long as a process uses it."""

    def __init__(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # Optuna's own opening would wait for ever for who writes a pipe
            check_regular(path, _MOST_BYTES)
        super().__init__(str(path), _Lock(path))
        self._path, self._file = path, _identity(path)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Lines from a number on; see Optuna. Raises UserError where one is damaged, or the file is another one."""
        self._check_there()
        number = log_number_from
        logs = super().read_logs(log_number_from)
        while True:
            number += 1
            try:
                log = next(logs)
            except StopIteration:
                return
            except FileNotFoundError:
                raise self._gone() from None
            except (ValueError, RecursionError) as error:  # JSON's, Unicode's, and "Invalid log format."
                raise UserError(f"{self._path}, line {number}: damaged ({error}){_ADVICE}") from None
            if problem := _problem(log):
                raise UserError(f"{self._path}, line {number}: damaged ({problem}){_ADVICE}")
            yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Writes lines; see Optuna, which would begin a new file where this one was removed."""
        self._check_there()
        try:
            super().append_logs(logs)
        except FileNotFoundError:
            raise self._gone() from None

    def _check_there(self) -> None:
        if _identity(self._path) != self._file:
            raise self._gone()

    def _gone(self) -> UserError:
        return UserError(
            f"{self._path}: the study's journal was removed or replaced while this process used it; put it back, or "
            "remove its folder to start the study again"
        )


class _Lock(JournalLock):
    """Of who writes. A last line that is unfinished then was left by a full disk, or by one killed while writing."""

    def acquire(self) -> bool:
        """Waits for the lock, and cuts the unfinished line off, to which the next one would be glued."""
        taken = super().acquire()
        try:
            _cut_unfinished(self.journal)
        except BaseException:
            self.release()
            raise
        return taken


def _cut_unfinished(journal: Path) -> None:
    with journal.open("rb+") as file:
        if not file.seek(0, os.SEEK_END):
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.truncate(read_bytes(journal, _MOST_BYTES).rfind(b"\n") + 1)


_ADVICE = "; put a copy of the file back, or remove its folder to start the study again"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def journal_path(config: Config) -> Path:
    """Where the study is kept, if it is kept in a journal."""
    return Path(config.run.dir).resolve() / "tuning" / "journal.log"


def mend(journal: Path) -> None:
    """Cuts off a last line that a full disk or a crash left unfinished, and a lock of one killed while writing.

    Nobody may be writing.
    """
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink(missing_ok=True)
    if journal.is_file():
        _cut_unfinished(journal)
