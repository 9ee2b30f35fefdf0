"""The main job: tune the proxy, transfer its values, train the target.

Public names: `run_pipeline`, `join_study`, `apply_record`.

Every rank of a launch first works on one shared study, then all train the target. The first rank plans, moves the study
on, chooses, and writes the record; the others hear of it where the ranks have met (runtime.Meeting).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from mup_megatron import runtime, train
from mup_megatron.checkpoint import check_folder
from mup_megatron.config import Config
from mup_megatron.data.parts import check_parts
from mup_megatron.data.prepare import data_directory, known_vocab_size, prepare
from mup_megatron.errors import UserError
from mup_megatron.files import write_whole
from mup_megatron.layout import Layout, smallest_world
from mup_megatron.progress import Progress
from mup_megatron.ranks import Rank, sigterm
from mup_megatron.run_directory import CONTROLS, PLAN, Busy, own_run_directory
from mup_megatron.setup import Setup, resolve
from mup_megatron.tuning import Stopped, budget, record
from mup_megatron.tuning.space import (
    Value,
    check_overrides,
    key_of,
    keys_of,
    proxy_config,
    value_of,
    values_of,
    with_values,
)

_BEAT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0
_LEAD_SECONDS = 1.0


def run_pipeline(config: Config, rank: Rank, *, control: bool = False, allowed_changes: tuple[str, ...] = ()) -> None:
    """Tunes if there is no record and the config allows it, then trains the target with the transferred values.

    Args:
        config: the run.
        rank: this process.
        control: whether to train the same target in the other parametrizations afterwards, with the same values.
        allowed_changes: keys that may differ from the target's checkpoint.

    Raises:
        UserError: bad input.
        Stopped: SIGTERM while tuning.
        Terminated: SIGTERM while training.
        Diverged: the target's loss is no finite number.
    """
    only = config.tuning.run == "only"
    # A tuning job may have any number of processes; what it says of the target is for the fewest that fit.
    setup = resolve(config, smallest_world(config) if only else rank.world_size, trains=not only)
    config = setup.config
    for name in controls(config) if control and not only else ():
        config.derive(control_keys(config, name))  # refused now, not when the target has been paid for
    directory = Path(config.run.dir)
    with own_run_directory(directory, rank, ".pipeline.lock"), Progress(rank.is_first) as progress:
        meeting = runtime.Meeting(rank)
        if rank.is_first:
            meeting.tell("tune", json.dumps(_decide(config, rank, progress, allowed_changes)))
        if json.loads(meeting.await_told("tune")):
            _tune(config, setup.layout, rank, meeting, progress)
        if rank.is_first:
            meeting.tell("values", json.dumps(_values(config, progress, allowed_changes)))
        setup = setup.derive(keys_of(json.loads(meeting.await_told("values"))))
        if only:
            meeting.part(rank)
            return
        train.train(setup, rank, allowed_changes, meeting=meeting)
        for name in controls(config) if control else ():
            runtime.stop_distributed()
            progress.say(f"the same target, {CONTROLS[name]}, with the same values")
            try:
                train.train(setup.derive(control_keys(config, name)), rank, allowed_changes, meeting=meeting)
            except train.Diverged as diverged:
                progress.say(f"{CONTROLS[name]}: {diverged}")


def controls(config: Config) -> list[str]:
    """The parametrizations that the run is compared with: all that are not µP, and not its own."""
    return [name for name in CONTROLS if name != config.parametrization.name]


def control_keys(config: Config, name: str) -> dict[str, str]:
    """What makes the target one of another parametrization, beside the run and on its data."""
    return {
        "run.name": f"{config.run.name}, {name}",
        "run.dir": str(Path(config.run.dir) / name),
        "parametrization.name": name,
        "data.dir": str(data_directory(config)),
    }


def apply_record(config: Config) -> tuple[Config, dict[str, Any]]:
    """The config with the values of its record.

    Raises:
        UserError: no record, or one that does not belong to this config.
    """
    path = record.record_path(config)
    found = record.read_record(path, config)
    if found is None:
        raise config.error("tuning.record", f"no such file: {path}; expected a transfer record (mup-megatron tune)")
    return with_values(config, _transferred(config, found)), found


def _values(config: Config, progress: Progress, allowed: tuple[str, ...]) -> dict[str, Value]:
    """The values to train with: the record's, else the config's own."""
    found = record.read_record(record.record_path(config), config)
    if found is None:
        return {}
    values, given = _transferred(config, found, allowed), values_of(config)
    for name, value in found["values"].items():
        if values[name] != value:
            progress.say(f"{key_of(name)}: {values[name]} as given, not {value} of the record (--allow-change)")
        elif name not in found["tuned"] and given.get(name) not in (None, value):
            progress.say(f"{key_of(name)}: {value} as it was while tuning, not {given[name]}")
    return values


def _transferred(config: Config, found: dict[str, Any], allowed: tuple[str, ...] = ()) -> dict[str, Value]:
    """The record's values, but for those that were given on the command line and may differ.

    Raises:
        ConfigError: one that was given on the command line and may not; it would be dropped.
    """
    values = dict(found["values"])
    for name, value in found["values"].items():
        key, given = key_of(name), value_of(config, name)
        if given == value or not config.is_overridden(key):
            continue
        if key not in allowed:
            tuned = "tuned" if name in found["tuned"] else "tuned with"
            raise config.error(
                key,
                f"{given} is given, and {record.record_path(config)} says {value} ({tuned}), which a transfer takes; "
                "expected no such override, or `train`, which trains with the values of hparams:, or pipeline "
                f"--allow-change {key}",
            )
        values[name] = given
    return values


def _decide(config: Config, rank: Rank, progress: Progress, allowed: tuple[str, ...] = ()) -> bool:
    """Whether to tune; the first rank says the plan, and prepares the data for all.

    What the folder holds already is looked at before anything is written, and stays if it is another run's.
    """
    path = record.record_path(config)
    found = record.read_record(path, config)
    tune = found is None and config.tuning.run != "never"
    if tune and not config.tuning.search:
        raise config.error(
            "tuning.search", "missing; expected what to tune, or tuning.run: never to train with the values of hparams:"
        )
    if tune and not float([*config.data.split.split(","), "0"][1]):
        raise config.error(
            "data.split",
            f"{config.data.split} holds nothing to validate on, by which trials are compared; expected 98,2,0",
        )
    if config.tuning.run == "never" and found is None and config.tuning.record is not None:
        raise config.error("tuning.record", f"no such file: {path}")
    _check_folder(config, found, tune, allowed)
    directory = Path(config.run.dir)
    plan = budget.plan(config, known_vocab_size(config), rank.world_size, measure=tune)
    if tune:
        _check_proxy(config)
        _check_writable(path, config)
        _check_study(config)
        for line in budget.lines(config, plan):
            progress.say(line)
        budget.check_share(config, plan)
        write_whole(directory / "config.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False))
    elif found is not None:
        progress.say(f"{path}: tuned values of this family, found {found['created']}; nothing to tune")
    else:
        progress.say("tuning.run: never, and no record; training with the values of hparams:")
    if tune or config.tuning.run != "only":
        extrapolated = record.extrapolated(config, found)
        write_whole(directory / PLAN, json.dumps({**plan.as_json(), "extrapolated": extrapolated}, indent=1))
    prepared = prepare(config, progress.say)
    check_parts(config, prepared.blend[0], validation=tune or bool(config.training.eval_interval))
    return tune


def _check_folder(config: Config, found: dict[str, Any] | None, tune: bool, allowed: tuple[str, ...]) -> None:
    """What the folder holds of a target is of this config. Raises UserError."""
    if found is not None:
        check_folder(with_values(config, _transferred(config, found, allowed)), allowed)
    elif not tune:
        check_folder(config, allowed)
    else:
        check_overrides(config, allowed)
        # More trials for a target that is there already; it stays what it is.
        begun = check_folder(config, (*allowed, *map(key_of, values_of(config))))
        if begun and config.tuning.run != "only":
            raise config.error(
                "run.dir",
                f"{config.run.dir} holds a target that trained with the values of hparams:, and tuning would find "
                "others; expected another run.dir, or `train` to go on with it",
            )


def _check_study(config: Config) -> None:
    """The study that is there, if any, is of this config. Raises UserError."""
    from mup_megatron.tuning.study import Study

    if any((Path(config.run.dir) / "tuning").glob("trial-*")):
        Study(config).check()


def _check_proxy(config: Config) -> None:
    """What each trial would be refused for is said once, before the first. Raises ConfigError."""
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir))
    resolve(proxy, 1)


def _check_writable(path: Path, config: Config) -> None:
    """Whether the record can be written when tuning has been paid for. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config.error("tuning.record", f"cannot write to {path.parent}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise config.error("tuning.record", f"cannot write to {path.parent}: permission denied")


def _tune(config: Config, layout: Layout, rank: Rank, meeting: runtime.Meeting, progress: Progress) -> None:
    from mup_megatron.tuning.study import Study
    from mup_megatron.tuning.worker import work

    if not rank.is_first:
        meeting.await_told("study")
        beat = _Heartbeat(meeting, rank)

        def done() -> bool:
            beat.beat()
            return meeting.told("tuned") is not None

        work(config, Study(config), rank, done)
        return
    study = Study.create(config)
    meeting.tell("study", "")
    leader = _Leader(study, progress, _Heartbeat(meeting, rank).listen)
    try:
        work(config, study, rank, leader.done, progress.say)
    finally:
        leader.announce()
    _write_record(config, layout, rank, study, progress)
    meeting.tell("tuned", "")


def join_study(config: Config, rank: Rank) -> bool:
    """Works on the config's study beside whoever does so already, until its record is written.

    Workers come and go, on any node that sees run.dir: whoever holds the folder's lock leads (plans, takes back the
    trials of workers that are gone, chooses, writes the record), and when it goes another one does.

    Args:
        config: the target's run.
        rank: this process; its local rank chooses the GPU. Nothing else of its launcher counts.

    Returns:
        Whether this process led at the end.

    Raises:
        UserError: bad input.
        Stopped: SIGTERM.
    """
    setup = resolve(config, smallest_world(config), trains=False)
    config, directory = setup.config, Path(config.run.dir)
    with ExitStack() as held:
        number = _free_number(directory, held)
        alone = Rank(rank=number, local_rank=rank.local_rank)
        member = _Member(config, alone, held)
        with sigterm() as terminated:
            while (study := member.study()) is None and not member.recorded():
                if terminated():
                    raise Stopped
                time.sleep(0.2)
        if study is not None:
            _work_as_member(setup, study, alone, member)
        return member.leads


def _work_as_member(setup: Setup, study: Any, rank: Rank, member: _Member) -> None:
    from mup_megatron.tuning.worker import work

    config = setup.config
    with member.progress as progress:
        try:
            work(config, study, rank, member.done, progress.say)
        finally:
            member.announce()
        if member.leads and not member.recorded():
            _write_record(config, setup.layout, rank, study, progress)


def _free_number(directory: Path, held: ExitStack) -> int:
    """A number that no other worker of the folder has, as long as `held` is open."""
    (directory / "tuning").mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        with suppress(Busy):
            held.enter_context(own_run_directory(directory / "tuning", Rank(), f".worker-{number}.lock"))
            return number
    raise AssertionError


class _Member:
    """One of the workers that come and go: it leads where nobody else does.

    Args:
        config: the run.
        rank: this process.
        held: what this process holds until it ends.
    """

    def __init__(self, config: Config, rank: Rank, held: ExitStack) -> None:
        from mup_megatron.tuning.lease import Leases

        self._config, self._rank, self._held = config, rank, held
        self._directory = Path(config.run.dir)
        self._leases = Leases(self._directory / "tuning", config.tuning.lease_timeout)
        self._tried = -math.inf
        self._study: Any = None
        self._leader: _Leader | None = None
        self.leads = False
        self.progress = Progress(True)

    def recorded(self) -> bool:
        """Whether the record is there: nothing is left to tune."""
        return record.record_path(self._config).exists()

    def study(self) -> Any:
        """The study, once it is there; whoever leads makes it. None if it is not, or is not needed."""
        from mup_megatron.tuning.study import Study

        if self._try_to_lead():
            if not _decide(self._config, self._rank, self.progress):
                return None
            self._study = Study.create(self._config, self._leases)
        else:
            self._study = Study.join(self._config, self._leases)
        return self._study

    def done(self) -> bool:
        """Whether every trial is done; the leader moves the study on."""
        if self.recorded():
            return True
        if self._leader is None and self._try_to_lead():
            self._leader = _Leader(self._study, self.progress, self._take_back)
        return self._leader is not None and self._leader.done()

    def announce(self) -> None:
        """Says which trials ended."""
        if self._leader is not None:
            self._leader.announce()

    def _take_back(self) -> None:
        for name in self._study.take_back():
            self.progress.say(f"{name}: its worker is gone; it waits for another one")

    def _try_to_lead(self) -> bool:
        if not self.leads and time.monotonic() - self._tried > _LEAD_SECONDS:
            self._tried = time.monotonic()
            with suppress(Busy):
                self._held.enter_context(own_run_directory(self._directory, Rank(), ".pipeline.lock"))
                self.leads = True
        return self.leads


class _Heartbeat:
    """Tells the first rank that the others live; a rank lost with its node would be waited for otherwise for ever."""

    def __init__(self, meeting: runtime.Meeting, rank: Rank) -> None:
        self._meeting, self._rank = meeting, rank
        self._count, self._at = 0, -math.inf
        self._heard = {other: ("", time.monotonic()) for other in range(1, rank.world_size)}

    def beat(self) -> None:
        """Says that this rank lives."""
        if time.monotonic() - self._at > _BEAT_SECONDS:
            self._count, self._at = self._count + 1, time.monotonic()
            self._meeting.tell(f"beat-{self._rank.rank}", str(self._count))

    def listen(self) -> None:
        """On the first rank. Raises UserError if one has been silent for too long."""
        now = time.monotonic()
        if now - self._at < _BEAT_SECONDS:
            return
        self._at = now
        for other, (last, since) in self._heard.items():
            if (said := self._meeting.told(f"beat-{other}") or "") != last:
                self._heard[other] = (said, now)
            elif now - since > _SILENCE_SECONDS:
                raise UserError(
                    f"tuning: rank {other} has been silent for {_SILENCE_SECONDS / 60:.0f} minutes and is taken for "
                    "lost; start the same command again, it goes on with the study"
                )


class _Leader:
    """What the first rank does between and during trials: says what ended, and moves the study on."""

    def __init__(self, study: Any, progress: Progress, listen: Callable[[], None]) -> None:
        self._study, self._progress, self._listen = study, progress, listen
        self._said = {
            (trial.name, trial.state) for trial in study.trials() if trial.state not in ("waiting", "running")
        }
        self._repeating = False
        if self._said:
            progress.say(f"going on with a study of which {len(self._said)} trials are done")

    def done(self) -> bool:
        """Whether every trial is done, repetitions included."""
        self._listen()
        trials = self.announce()
        if self._study.plan(trials) or any(trial.state in ("waiting", "running") for trial in trials):
            return False
        if not self._repeating:
            self._repeating = True
            self._study.repeat_best()
            return self.done()
        return True

    def announce(self) -> list[Any]:
        """Says which trials ended since the last time; returns all."""
        trials = self._study.trials()
        repeats = sum(trial.repeats for trial in trials)
        total = max(len(self._study.points), len(trials) - repeats) + repeats
        for trial in trials:
            if trial.state in ("waiting", "running") or (trial.name, trial.state) in self._said:
                continue
            self._said.add((trial.name, trial.state))
            values = ", ".join(f"{name} {_short(value)}" for name, value in trial.values.items())
            loss = f"loss {trial.loss:.4f}" if trial.loss is not None else ""
            steps = max(trial.reports, default=0)
            how = {"stopped": f"stopped at step {steps}, {loss}", "complete": loss, "diverged": "diverged"}
            ended = sum(1 for other in trials if other.state not in ("waiting", "running"))
            self._progress.say(
                f"{trial.name} ({ended}/{total}): {how.get(trial.state, trial.reason or 'failed')}  [{values}]  "
                f"{trial.seconds:.0f} s"
            )
        return trials


def _short(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _write_record(config: Config, layout: Layout, rank: Rank, study: Any, progress: Progress) -> None:
    from mup_megatron.model import parametrize
    from mup_megatron.tuning.outcome import choose

    choice = choose(config, study.trials())
    values = {**values_of(config), **choice.values}
    chosen = with_values(config, values)
    vocab_size = known_vocab_size(config)
    plan = budget.plan(config, vocab_size, rank.world_size)
    written = record.make_record(
        chosen,
        parametrize(chosen, vocab_size),
        layout,
        values,
        study={"name": config.run.name, "digest": study.digest, "seed": config.run.seed, **choice.as_json()},
        budget={**plan.as_json(), "spent": spent(config, choice.trials, plan)},
    )
    record.write_record(record.record_path(config), written)
    progress.say(f"chosen: {', '.join(f'{name} {_short(value)}' for name, value in choice.values.items())}")
    for line in record.remarks(written, written["target"]["extrapolated"]):
        progress.say(line)
    progress.say(f"record: {record.record_path(config)}")


def spent(config: Config, trials: list[Any], plan: budget.Plan) -> dict[str, Any]:
    """What tuning took: every trial up to the last step that it reported, or its last one."""
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir))
    steps = sum(max(trial.reports, default=0) for trial in trials)
    tokens = steps * proxy.training.global_batch_size * proxy.training.seq_length
    flops = plan.tuning.flops / plan.tuning.tokens * tokens
    seconds = sum(trial.seconds for trial in trials)
    return {"tokens": tokens, "flops": flops, "share": flops / plan.target.flops, "process_seconds": seconds}
