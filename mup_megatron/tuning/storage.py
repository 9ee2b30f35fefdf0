"""A study as Optuna keeps it: in a journal in the run's folder, or in a database. What is read there is checked.

Public names: `StudyStorage`, `Ended`. Only this module knows Optuna's storages, its states of a trial, and the
attributes that this project adds to a trial; study.py decides what happens to a trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mup_megatron.config import Config
from mup_megatron.tuning.family import digest
from mup_megatron.tuning.journal import Journal, journal_path
from mup_megatron.tuning.outcome import State, Trial
from mup_megatron.tuning.sampler import sampler, suggest
from mup_megatron.tuning.space import Value, distributions
from mup_megatron.util.errors import UserError


class Ended(Exception):
    """The trial has ended; nothing more can be written down of it."""


_STATES: dict[State, TrialState] = {
    "waiting": TrialState.WAITING,
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "diverged": TrialState.COMPLETE,
    "stopped": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


class _Attributes(BaseModel):
    """A trial's user attributes in the study."""

    model_config = ConfigDict(strict=True, extra="ignore")
    slot: Annotated[int, Field(ge=0)]
    seed: Annotated[int, Field(ge=0)]
    repeats: bool = False
    diverged: bool = False
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    reason: str | None = None
    attempts: int = 0
    lost: int = 0
    varies: str | None = None


class StudyStorage:
    """The study of a run's folder; any number of processes share it.

    Args:
        config: the target's run.
        directory: of a journal; is made.

    Raises:
        UserError: the database cannot be opened, or a line of the journal is damaged.
    """

    def __init__(self, config: Config, directory: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.backend = _open(config, directory)
        """Optuna's own storage."""
        self._config, self._space = config, distributions(config)
        # A database may hold the studies of many folders. A journal lies in the folder, which may be moved or mounted
        # elsewhere: the one study in it is this one.
        self._name = f"{config.run.name}-{digest({'dir': str(Path(config.run.dir).resolve())})[:8]}"
        if config.tuning.storage == "journal":
            there = [study.study_name for study in self.backend.get_all_studies()]
            self._name = there[0] if len(there) == 1 else self._name
        self._loaded: optuna.Study | None = None

    # --- the study ---

    @property
    def _study(self) -> optuna.Study:
        if self._loaded is None:
            self._loaded = self._load(sampler(self._config))
        return self._loaded

    def _load(self, samples: optuna.samplers.BaseSampler) -> optuna.Study:
        return optuna.load_study(
            study_name=self._name, storage=self.backend, sampler=samples, pruner=optuna.pruners.NopPruner()
        )

    def create(self) -> None:
        """Makes the study where it is not there."""
        optuna.create_study(study_name=self._name, storage=self.backend, direction="minimize", load_if_exists=True)

    def decided(self) -> dict[str, Any] | None:
        """What decides the study's outcome, as it was written down; None where there is no study, or it does not say.

        Raises:
            UserError: it is damaged.
        """
        try:
            found = self._study.user_attrs.get("decided")
        except KeyError:  # Optuna knows no study of this name
            return None
        if not isinstance(found, dict | None):
            raise self._damaged("it does not say what decides its outcome")
        return found

    def decide(self, settings: Mapping[str, Any]) -> None:
        """Writes down what decides the study's outcome, by dotted key; plain data as JSON has it."""
        self._study.set_user_attr("decided", dict(settings))

    def _damaged(self, problem: str) -> UserError:
        storage = self._config.tuning.storage
        where = journal_path(self._config) if storage == "journal" else storage
        return UserError(f"{where}: study {self._name}: damaged ({problem}); remove it to start the study again")

    # --- its trials ---

    def enqueue(
        self, slot: int, values: Mapping[str, Value], seed: int, *, repeats: bool = False, varies: str | None = None
    ) -> None:
        """Has a trial wait; see `Trial`."""
        more = {**({"repeats": True} if repeats else {}), **({"varies": varies} if varies else {})}
        attrs = {"slot": slot, "seed": seed, **more}
        self._study.enqueue_trial(dict(values), user_attrs=attrs)

    def trials(self) -> list[Trial]:
        """Every trial, by slot. Raises UserError where one is damaged."""
        found = [self._trial(frozen) for frozen in self._study.get_trials(deepcopy=False)]
        return sorted(found, key=lambda trial: (trial.slot, trial.seed))

    def again(self, trial: Trial) -> Trial:
        """A trial as it stands now. Raises UserError where it is damaged."""
        return self._trial(self.backend.get_trial(trial.id))

    def _trial(self, frozen: FrozenTrial) -> Trial:
        try:
            attrs = _Attributes.model_validate(frozen.user_attrs)
        except ValidationError as error:
            first = error.errors()[0]
            raise self._damaged(f"trial {frozen.number}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        values = dict(frozen.params) or frozen.system_attrs.get("fixed_params", {})
        if not _fits(values, self._space, ended=frozen.state.is_finished()):
            raise self._damaged(f"trial {frozen.number}: its values are not of tuning.search")
        state = next(state for state, theirs in _STATES.items() if theirs is frozen.state)
        reports = dict(sorted(frozen.intermediate_values.items()))
        loss = frozen.value if frozen.state is TrialState.COMPLETE else next(reversed(reports.values()), None)
        return Trial(
            id=frozen._trial_id,
            slot=attrs.slot,
            values=dict(values),
            seed=attrs.seed,
            repeats=attrs.repeats,
            state="diverged" if state == "complete" and attrs.diverged else state,
            loss=loss,
            reports=reports,
            seconds=attrs.seconds,
            reason=attrs.reason,
            attempts=attrs.attempts,
            varies=attrs.varies,
        )

    def claim(self, trial: Trial) -> bool:
        """Takes a trial that waits; False where another process was faster."""
        try:
            return self.backend.set_trial_state_values(trial.id, TrialState.RUNNING)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def draw(self, trial: Trial) -> Trial:
        """Writes down the values of a trial that was claimed, those that were enqueued or the sampler's; returns it."""
        # A study keeps the trials that its sampler learns from until its own `ask` or `tell`; and every process would
        # draw the same points with the same sampler.
        learns = self._config.tuning.sampler == "tpe"
        study = self._load(sampler(self._config, trial.slot)) if learns else self._study
        if learns:  # of a database the new study knows no trial before it has read them; its sampler reads them late
            study.get_trials(deepcopy=False)
        suggest(optuna.trial.Trial(study, trial.id), self._space)
        return self.again(trial)

    def report(self, trial: Trial, step: int, loss: float) -> None:
        """Writes down a loss; one that is no number has no place in the order: infinite. Raises Ended."""
        with _open_to_writing():
            self.backend.set_trial_intermediate_value(trial.id, step, loss if math.isfinite(loss) else math.inf)

    def died(self, trial: Trial) -> Trial:
        """Counts a process that died under a trial; returns the trial as it stands then. Raises Ended."""
        with _open_to_writing():
            self.backend.set_trial_user_attr(trial.id, "attempts", trial.attempts + 1)
        return self.again(trial)

    def lose(self, trial: Trial, most: int) -> None:
        """Has a trial wait again whose worker is gone; at the `most`th time it has failed. Raises Ended."""
        with _open_to_writing():
            times = self.backend.get_trial(trial.id).user_attrs.get("lost", 0) + 1
            self.backend.set_trial_user_attr(trial.id, "lost", times)
            if times < most:
                self.backend.set_trial_state_values(trial.id, TrialState.WAITING)
            else:
                self.backend.set_trial_user_attr(trial.id, "reason", f"its worker was lost, {times} times")
                self.backend.set_trial_state_values(trial.id, TrialState.FAIL)

    def wait_again(self, trial: Trial) -> None:
        """Has a trial wait again that was running. Raises Ended."""
        with _open_to_writing():
            self.backend.set_trial_state_values(trial.id, TrialState.WAITING)

    def finish(self, trial: Trial, state: State, loss: float | None, seconds: float, reason: str) -> None:
        """Ends a trial, or with `waiting` has it wait again. Raises Ended.

        Args:
            trial: running.
            state: how it ended.
            loss: final evaluation loss (nats per token), of a complete trial.
            seconds: spent, beyond those written down before.
            reason: why it failed, or waits; may be empty.
        """
        with _open_to_writing():
            self.backend.set_trial_user_attr(trial.id, "seconds", trial.seconds + seconds)
            if reason:
                self.backend.set_trial_user_attr(trial.id, "reason", reason)
            if state == "diverged":
                self.backend.set_trial_user_attr(trial.id, "diverged", True)
            values = [math.inf if loss is None else loss] if state in ("complete", "diverged") else None
            self.backend.set_trial_state_values(trial.id, _STATES[state], values)


@contextmanager
def _open_to_writing() -> Iterator[None]:
    try:
        yield
    except optuna.exceptions.UpdateFinishedTrialError:
        raise Ended from None


def _fits(values: object, space: Mapping[str, BaseDistribution], *, ended: bool) -> bool:
    """Whether values are of the study's search space; a worker writes a trial's down one by one.

    Args:
        values: of a trial.
        space: of the study.
        ended: whether the trial has: then all are there, or, where it never began, none.
    """
    if not isinstance(values, dict) or set(values) - set(space) or (ended and values and len(values) < len(space)):
        return False
    return all(_holds(space[name], value) for name, value in values.items())


def _holds(distribution: BaseDistribution, value: object) -> bool:
    if isinstance(distribution, FloatDistribution):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and distribution.low <= value <= distribution.high  # type: ignore[operator]
    return isinstance(distribution, CategoricalDistribution) and value in distribution.choices


def _open(config: Config, directory: Path) -> optuna.storages.BaseStorage:
    """The config's storage."""
    if config.tuning.storage != "journal":
        # SQLite lets one process write at a time; the others wait for it.
        waits = {"connect_args": {"timeout": 300}} if config.tuning.storage.startswith("sqlite") else {}
        try:
            storage = optuna.storages.RDBStorage(config.tuning.storage, engine_kwargs=waits)
        except Exception as error:  # sqlalchemy's, a driver's, or an import's
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise config.error("tuning.storage", f"cannot open {config.tuning.storage}: {reason}") from None
        if waits:
            _one_at_a_time(storage.engine)
        return storage
    path = journal_path(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(Journal(path))
    except OSError as error:
        raise UserError(f"{path}: cannot open the study's journal: {error.strerror}") from None


def _one_at_a_time(engine: Any) -> None:
    """Has SQLite's transactions begin before their first read (SQLAlchemy, dialects/sqlite, "Serializable isolation").

    Python's driver begins them at the first write, so that two workers may both read that a trial waits, and both take
    it.
    """
    from sqlalchemy import event

    event.listen(engine, "connect", lambda connection, _record: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # those that are open already
