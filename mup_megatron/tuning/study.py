"""The shared study: trials planned ahead, halved in order, the best repeated with other seeds, one value moved at a
time from there on (descent.py).

Public name: `Study`.

Optuna keeps the study (storage.py: a journal file or a database, which any number of processes share) and samples the
values (sampler.py). Which values are tried depends on the seed alone. Trials are enqueued in the order of a plan, only
a few ahead of those that run, because every read of a database returns all trials that have not ended. A trial's `slot`
is its place in that plan. Halving compares a trial with those of lower slots only, and waits for them. So the same
trials are stopped and the same values chosen, whichever worker is first or fastest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, Model
from mup_megatron.config.per_tensor import flat
from mup_megatron.tuning.family import as_read, differences, digest, digested
from mup_megatron.tuning.journal import journal_path, mend
from mup_megatron.tuning.lease import Leases, Lost, Overtaken
from mup_megatron.tuning.objective import Objective, objective_of
from mup_megatron.tuning.outcome import FINISHED, State, Trial, best, descent_of
from mup_megatron.tuning.prior import first_trial
from mup_megatron.tuning.sampler import points
from mup_megatron.tuning.space import Value, bracket_of, proxy_config, rungs, values_of
from mup_megatron.tuning.storage import Ended, StudyStorage
from mup_megatron.util.errors import UserError

_POLL_SECONDS = 0.2
_MOST_LOST = 5
_AHEAD = 64  # trials that wait, at least, while the plan has more


def _deciding(config: Config) -> dict[str, Any]:
    """What decides the outcome of a study, by dotted key, as a storage gives it back; the number of trials may grow."""
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=Path())
    checkpoints = {"checkpoint_interval", "checkpoints_kept", "async_save"}
    training = proxy.training.model_dump(exclude={"train_steps", "log_interval", "eval_interval", *checkpoints})
    sections = {
        "proxy": proxy.model.model_dump(exclude={*Model.PLAIN_KERNELS}),
        "hparams": {**config.hparams.model_dump(exclude={"per_tensor"}), **flat(config.hparams.per_tensor)},
        "training": training,
        "data": config.data.model_dump(exclude={"dir", "cache_dir", "tokenizer"}),
        "tuning": {
            **config.tuning.model_dump(include={"sampler", "pruner", "reduction_factor", "objective"}),
            "train_steps": proxy.training.train_steps,
        },
        "tuning.search": {name: dimension.model_dump() for name, dimension in config.tuning.search.items()},
        "run": {"seed": config.run.seed},
    }
    decided = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    if first := first_trial(config):
        decided["tuning.prior"] = first
    if config.tuning.command:
        decided["tuning.command"] = config.tuning.command
    return as_read({**digested(config), **decided, **_of_descent(config)})


def _of_descent(config: Config) -> dict[str, Any]:
    """What decides where coordinate descent begins and goes; its trials may grow in number, the joint search's not."""
    tuning = config.tuning
    if not tuning.descent.trials:
        return {}
    of_search = {key: getattr(tuning, key) for key in ("trials", "repeat_best", "repeat_seeds")}
    stage = {"descent.factor": tuning.descent.factor, "descent.rounds": tuning.descent.rounds, **of_search}
    return {f"tuning.{key}": value for key, value in stage.items()}


class Study:
    """One study, shared by every worker. Made by `create` in one process, then found by the others.

    Args:
        config: the target's run.
        leases: where workers come and go; None where one launch starts all of them.
    """

    def __init__(self, config: Config, leases: Leases | None = None) -> None:
        self._config = config
        self.directory = Path(config.run.dir) / "tuning"
        self._storage = StudyStorage(config, self.directory)
        self._leases = leases

    def again(self) -> Study:
        """The same study, for another thread of this process: a storage is read by one at a time."""
        return Study(self._config, self._leases and self._leases.again())

    @property
    def objective(self) -> Objective:
        """What its trials are compared by."""
        return objective_of(self._config.tuning.objective)

    @property
    def descent_trials(self) -> int:
        """How many trials coordinate descent has at most."""
        return self._config.tuning.descent.trials

    @property
    def logs(self) -> str:
        """Files in its folder that hold what trials printed."""
        return "trial-*/log.txt" if self._config.tuning.command else "worker-*.log"

    @property
    def digest(self) -> str:
        """Of everything that decides the outcome."""
        return digest(self._decided)

    @cached_property
    def _decided(self) -> dict[str, Any]:
        return _deciding(self._config)

    @classmethod
    def create(cls, config: Config, leases: Leases | None = None) -> Study:
        """Makes the study or finds it, plans what is missing, and takes back what nobody runs any more.

        Without leases only where no other worker is at work: a trial that is running then was lost with its worker.
        With leases, `take_back` finds what was lost.

        Raises:
            UserError: a study of the same name was made with other settings; names the keys.
        """
        if leases is None:
            mend(journal_path(config))
        study = cls(config, leases)
        study._make()
        return study

    @classmethod
    def join(cls, config: Config, leases: Leases) -> Study | None:
        """The study that another worker made; None if none has yet.

        Raises:
            UserError: it was made with other settings; names the keys.
        """
        if config.tuning.storage == "journal" and not journal_path(config).exists():
            return None
        study = cls(config, leases)
        return study if study._check() else None

    def _make(self) -> None:
        self.check()
        self._storage.create()
        if not self._check() or self._joins_descent:
            self._storage.decide(self._decided)
        if self._leases is None:
            for trial in self.trials():
                if trial.state == "running":
                    self._storage.wait_again(trial)
        if self.descent_trials and any(map(self._is_beyond, self._storage.trials())):
            raise UserError(  # its trials are numbered behind those of the joint search
                f"tuning.trials: {self._config.tuning.trials} is fewer than this study has planned; expected as many "
                "as before where coordinate descent goes on from them, or another run.dir"
            )
        self.plan(self.trials())

    def check(self) -> None:
        """The study that is there, if any, is this one, and so are the trials in the folder.

        Raises:
            UserError: it was made with other settings, under another name, or in another storage.
        """
        if not self._check() and any(self.directory.glob("trial-*")):
            raise UserError(
                f"{self.directory}: holds trials of a study that is not in tuning.storage under this name; expected "
                "run.name, run.dir and tuning.storage as they were when it began, or that folder removed to start again"
            )

    def _check(self) -> bool:
        """Whether the study says already what decides its outcome. Raises UserError where that is something else."""
        found = self._storage.decided()
        if found is not None and found != self._decided and not self._joins_descent:
            differing = differences(found, self._decided, "then", "now")
            raise UserError(
                f"{self.directory}: this study was started with other settings ({'; '.join(differing[:8])}); change "
                f"the config back, choose another run.dir, or remove that folder to start again"
            )
        return found is not None

    @property
    def _joins_descent(self) -> bool:
        """Whether the study that is there is the joint search alone, which coordinate descent may go on from."""
        later = _of_descent(self._config)
        joint = {key: value for key, value in self._decided.items() if key not in later}
        return bool(later) and self._storage.decided() == joint

    def take_back(self, joined: Leases | None = None) -> list[str]:
        """Gives trials back whose workers are gone; their names. For the worker that leads.

        A trial that has taken too many workers with it has failed.

        Args:
            joined: leases of workers that joined a launch, whose own trials have none; None where every trial has one.
        """
        leases = joined or self._leases
        if leases is None or (joined is not None and not joined.held()):
            return []
        running = {trial.name: trial for trial in self.trials() if trial.state == "running"}
        taken = []
        for name in leases.lost(running if joined is None else running.keys() & joined.held()):
            trial = running[name]
            with suppress(Ended):  # its worker was slow, and ended it just now
                self._storage.lose(trial, _MOST_LOST)
                taken.append(name)
        return taken

    def check_held(self, trial: Trial) -> None:
        """Raises Lost where a trial of this process's was taken back."""
        if self._leases is not None:
            self._leases.check(trial.name)

    @contextmanager
    def _held(self, trial: Trial) -> Iterator[None]:
        """Around what is written of this process's own trial. Raises Lost where another one has it, or has ended it."""
        self.check_held(trial)
        try:
            yield
        except Ended:
            if self._leases is None:
                raise
            raise Lost(trial.name) from None

    @cached_property
    def points(self) -> list[dict[str, Value]]:
        """Values of the trials of the plan, by slot; empty where the sampler learns from trials that ended (tpe)."""
        return points(self._config)

    def plan(self, trials: list[Trial]) -> int:
        """Has enough trials wait, where the plan has more. For the worker that leads, or alone.

        Args:
            trials: every trial as of now.

        Returns:
            How many trials of the plan were missing before.
        """
        first = [trial for trial in trials if not trial.repeats and trial.varies is None]
        waiting = sum(trial.state == "waiting" for trial in first)
        missing = self.points[len(first) :]
        for slot, values in enumerate(missing[: max(0, _AHEAD - waiting)], start=len(first)):
            self._storage.enqueue(slot, values, self._config.run.seed)
        return len(missing)

    def repeat_best(self) -> None:
        """Plans the best trials again with other seeds, where that was not done before."""
        tuning, seed = self._config.tuning, self._config.run.seed
        trials = self.trials()
        there = {(trial.slot, trial.seed) for trial in trials}
        for chosen in best(trials)[: tuning.repeat_best]:
            for number in range(1, tuning.repeat_seeds + 1):
                if (chosen.slot, seed + number) not in there:
                    self._storage.enqueue(chosen.slot, chosen.values, seed + number, repeats=True)

    def descend(self) -> bool:
        """Plans what coordinate descent trains next, once everything before it has ended; whether there is anything."""
        trials = self.trials()
        found = descent_of(self._config, trials)
        missing = found.missing if found is not None else []
        there = {(trial.slot, trial.seed) for trial in trials}
        for run in missing:
            if (run.slot, run.seed) not in there:
                again = run.seed != self._config.run.seed
                self._storage.enqueue(run.slot, run.values, run.seed, repeats=again, varies=run.name)
        return bool(missing)

    def trials(self) -> list[Trial]:
        """Every trial, by slot. Of those that wait, the ones beyond `tuning.trials`, which was lowered, are none."""
        return [trial for trial in self._storage.trials() if not self._is_beyond(trial)]

    def _is_beyond(self, trial: Trial) -> bool:
        joint = not trial.repeats and trial.varies is None
        return joint and trial.state == "waiting" and trial.slot >= self._config.tuning.trials

    def claim(self) -> Trial | None:
        """The next trial that waits, now this process's own; None if none waits."""
        for waiting in self.trials():
            if waiting.state == "waiting" and self._storage.claim(waiting):
                if self._leases is not None:
                    self._leases.take(waiting.name)
                return self._storage.draw(waiting)
        return None

    def report(self, trial: Trial, step: int, loss: float) -> None:
        """Writes down a loss of this process's own trial; one that is no number has no place in the order: infinite.

        Raises:
            Lost: the trial was taken back.
        """
        with self._held(trial):
            self._storage.report(trial, step, loss)

    def survives(self, trial: Trial, step: int, loss: float, alive: Callable[[], None] = lambda: None) -> bool:
        """Writes down a loss and tells whether the trial goes on: successive halving in the order of slots.

        At a rung a trial goes on if it is among the best 1/reduction_factor of the trials of lower or equal slot that
        reached it. Optuna's own pruners compare with whoever happened to be there already, so that two runs of the
        same study would stop different trials.

        Args:
            trial: running, this process's own.
            step: that was reached.
            loss: evaluation loss there.
            alive: called while waiting for trials of lower slots; may raise.

        Raises:
            Overtaken: one of them was taken back from its worker; if all others wait for it here, nobody would run it.
            Lost: this trial was taken back.
        """
        self.report(trial, step, loss)
        loss = loss if math.isfinite(loss) else math.inf
        tuning = self._config.tuning
        stops = rungs(self._config)
        bracket = bracket_of(self._config, trial.slot)
        if trial.repeats or trial.varies is not None or step not in stops[bracket:]:
            return True
        while True:
            earlier = [
                other
                for other in self.trials()
                if other.slot < trial.slot and not other.repeats and bracket_of(self._config, other.slot) == bracket
            ]
            if all(step in other.reports or other.state in FINISHED for other in earlier):
                break
            if any(other.state == "waiting" for other in earlier):
                raise Overtaken
            alive()
            time.sleep(_POLL_SECONDS)
        reached = [other.reports[step] for other in earlier if step in other.reports]
        better = sum(other <= loss for other in reached)
        return better < max(1, (len(reached) + 1) // tuning.reduction_factor)

    def died(self, trial: Trial) -> Trial:
        """Notes that a process died under this process's own trial; returns the trial as it stands then."""
        with self._held(trial):
            return self._storage.died(trial)

    def finish(
        self,
        trial: Trial,
        state: State,
        *,
        loss: float | None = None,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Ends a trial; `waiting` gives it back for another process to go on with.

        Args:
            trial: running, this process's own.
            state: how it ended.
            loss: final evaluation loss, of a complete trial.
            seconds: spent in this process.
            reason: why it failed, or was given back.

        Raises:
            Lost: the trial was taken back; what this process found counts no more.
        """
        with self._held(trial):
            self._storage.finish(trial, state, loss, seconds, reason)
        if self._leases is not None:
            self._leases.drop(trial.name)
