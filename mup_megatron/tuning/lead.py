"""Work on a study. One process leads: it plans, prints what ended, moves the study on, chooses, writes the record.

Public names: `tune` (all ranks of one launch, of which the first leads), `join_study` (workers that come and go).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.checkpoints.run_directory import Busy, own_run_directory
from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import known_vocab_size
from mup_megatron.engines.setup import Setup, resolve
from mup_megatron.parallel.layout import smallest_world
from mup_megatron.parallel.ranks import Rank, stop_signal
from mup_megatron.parallel.runtime import Meeting
from mup_megatron.tuning import Stopped, budget, record
from mup_megatron.tuning.decide import decide
from mup_megatron.tuning.fitted import ladder_of
from mup_megatron.tuning.objective import with_name
from mup_megatron.tuning.outcome import ends_of
from mup_megatron.tuning.prior import first_trial, with_prior
from mup_megatron.tuning.proxy_band import band_of_runs
from mup_megatron.tuning.recording import make_record
from mup_megatron.tuning.remarks import remarks
from mup_megatron.tuning.space import proxy_config, short, values_of, with_values, without_fitted
from mup_megatron.util.errors import UserError
from mup_megatron.util.progress import Progress, time_left

if TYPE_CHECKING:
    from mup_megatron.tuning.lease import Leases
    from mup_megatron.tuning.outcome import Choice, Trial
    from mup_megatron.tuning.study import Study

_BEAT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0
_LEAD_SECONDS = 1.0
_ALIKE = 3


def tune(setup: Setup, rank: Rank, meeting: Meeting, progress: Progress) -> None:
    """Has every rank of a launch work on one study until its record is written. Collective.

    Args:
        setup: of the target; its layout is for the record.
        rank: this process; the first leads.
        meeting: where the ranks have met.
        progress: takes what the leader says.

    Raises:
        UserError: bad input, or a rank that was lost.
        Stopped: SIGTERM.
    """
    from mup_megatron.tuning.lease import Leases
    from mup_megatron.tuning.study import Study
    from mup_megatron.tuning.worker import work

    setup = dataclasses.replace(setup, config=with_prior(setup.config))
    config = setup.config
    if not rank.is_first:
        meeting.await_told("study")
        beat = _Heartbeat(meeting, rank)

        def done() -> bool:
            beat.beat()
            return meeting.told("tuned") is not None

        work(config, Study(config), rank, done)
        return
    heartbeat, joined = _Heartbeat(meeting, rank), Leases(Path(config.run.dir) / "tuning", config.tuning.lease_timeout)
    joined.end()
    study = Study.create(config)
    meeting.tell("study", "")

    def listen() -> None:
        heartbeat.listen()
        _take_back(study, progress, joined)

    leader = _Leader(study, progress, listen)
    try:
        work(config, study, rank, leader.done, progress.say)
    finally:
        leader.announce()
    _write_record(setup, rank, study, progress)
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
    # Where the record is there nothing is tuned, and the prior's may be gone.
    config = config if config.record_path.exists() else with_prior(config)
    setup = resolve(config, smallest_world(config), trains=False)
    config, directory = setup.config, Path(config.run.dir)
    with ExitStack() as held:
        number = _free_number(directory, held)
        alone = Rank(rank=number, local_rank=rank.local_rank)
        member = _Member(config, alone, held)
        with stop_signal() as terminated:
            while (study := member.study()) is None and not member.recorded():
                if terminated():
                    raise Stopped
                time.sleep(0.2)
        if study is not None:
            _work_as_member(setup, study, alone, member)
        return member.leads


def _work_as_member(setup: Setup, study: Study, rank: Rank, member: _Member) -> None:
    from mup_megatron.tuning.worker import work

    config = setup.config
    with member.progress as progress:
        try:
            work(config, study, rank, member.done, progress.say)
        finally:
            member.announce()
        if member.leads and not member.recorded():
            _write_record(setup, rank, study, progress)


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
        self._study: Study | None = None
        self._leader: _Leader | None = None
        self.leads = False
        self.progress = Progress(True)

    def recorded(self) -> bool:
        """Whether the record is there: nothing is left to tune."""
        return self._config.record_path.exists()

    def study(self) -> Study | None:
        """The study, once it is there; whoever leads makes it. None if it is not, or is not needed."""
        from mup_megatron.tuning.study import Study

        if self._try_to_lead():
            if not decide(self._config, self._rank, self.progress):
                return None
            self._study = Study.create(self._config, self._leases)
        else:
            self._study = Study.join(self._config, self._leases)
        return self._study

    def done(self) -> bool:
        """Whether every trial is done; the leader moves the study on."""
        if self.recorded():
            return True
        if self._leader is None and (study := self._study) is not None and self._try_to_lead():
            self._leader = _Leader(study, self.progress, lambda: _take_back(study, self.progress))
        return self._leader is not None and self._leader.done()

    def announce(self) -> None:
        """Says which trials ended."""
        if self._leader is not None:
            self._leader.announce()

    def _try_to_lead(self) -> bool:
        if not self.leads and time.monotonic() - self._tried > _LEAD_SECONDS:
            self._tried = time.monotonic()
            with suppress(Busy):
                self._held.enter_context(own_run_directory(self._directory, Rank(), ".pipeline.lock"))
                self.leads = True
        return self.leads


def _take_back(study: Study, progress: Progress, joined: Leases | None = None) -> None:
    for name in study.take_back(joined):
        progress.say(f"{name}: its worker is gone; it waits for another one")


class _Heartbeat:
    """Tells the first rank that the others live; a rank lost with its node would be waited for otherwise for ever."""

    def __init__(self, meeting: Meeting, rank: Rank) -> None:
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

    def __init__(self, study: Study, progress: Progress, listen: Callable[[], None]) -> None:
        self._study, self._progress, self._listen = study, progress, listen
        self._said = {
            (trial.name, trial.state) for trial in study.trials() if trial.state not in ("waiting", "running")
        }
        self._repeating = False
        self._began, self._before = time.monotonic(), len(self._said)
        if self._said:
            progress.say(f"going on with a study of which {len(self._said)} trials are done")

    def done(self) -> bool:
        """Whether every trial is done, repetitions and coordinate descent included."""
        self._listen()
        trials = self.announce()
        check_failures(trials, self._study.directory, self._study.logs)
        if self._study.plan(trials) or any(trial.state in ("waiting", "running") for trial in trials):
            return False
        if not self._repeating:
            self._repeating = True
            self._study.repeat_best()
            return self.done()
        return not self._study.descend()

    def announce(self) -> list[Trial]:
        """Says which trials ended since the last time; returns all."""
        trials = self._study.trials()
        varied = sum(trial.varies is not None for trial in trials)
        repeats = sum(trial.repeats and trial.varies is None for trial in trials)
        joint = max(len(self._study.points), len(trials) - varied - repeats)
        total = joint + repeats + max(varied, self._study.descent_trials)
        for trial in trials:
            if trial.state in ("waiting", "running") or (trial.name, trial.state) in self._said:
                continue
            self._said.add((trial.name, trial.state))
            values = ", ".join(f"{name} {short(value)}" for name, value in trial.values.items())
            objective = self._study.objective
            loss = f"{objective.name} {objective.text(trial.loss)}" if trial.loss is not None else ""
            steps = max(trial.reports, default=0)
            if trial.varies is not None:
                values = f"{trial.varies} moved; {values}"
            how = {"stopped": f"stopped at step {steps}, {loss}", "complete": loss, "diverged": "diverged"}
            ended = sum(1 for other in trials if other.state not in ("waiting", "running"))
            self._progress.say(
                f"{trial.name} ({ended}/{total}): {how.get(trial.state, trial.reason or 'failed')}  [{values}]  "
                f"{trial.seconds:.0f} s"
                + time_left(ended - self._before, time.monotonic() - self._began, total - ended)
            )
        return trials


def check_failures(trials: Sequence[Trial], directory: Path, logs: str = "worker-*.log") -> None:
    """Ends a study whose first trials all failed for one reason, which the others would share.

    Args:
        trials: of the study.
        directory: of the study.
        logs: files there that say more.

    Raises:
        UserError: three trials failed alike, and none came as far as an evaluation.
    """
    ended = [trial for trial in trials if trial.state not in ("waiting", "running")]
    reasons = ends_of(ended)
    if len(ended) < _ALIKE or len(reasons) > 1 or any(trial.state != "failed" or trial.reports for trial in ended):
        return
    raise UserError(
        f"{directory}: the first {len(ended)} trials all failed with: {reasons[0]}; {logs} there says more. "
        "Nothing else was tried; when it is mended, remove that folder to start again"
    )


def _write_record(setup: Setup, rank: Rank, study: Study, progress: Progress) -> None:
    from mup_megatron.model.build import parametrize
    from mup_megatron.tuning.outcome import choose

    config = setup.config
    choice = choose(config, study.trials())
    values = {**values_of(config), **choice.values}
    chosen = with_values(config, values)
    vocab_size = known_vocab_size(config)
    plan = budget.plan(config, vocab_size, rank.world_size)
    unknown = without_fitted(chosen) if chosen.parametrization.unfitted else {}
    table = parametrize(derive(chosen, {"model.as_built": None, **unknown}), vocab_size)
    found = {"name": config.run.name, "digest": study.digest, "seed": config.run.seed, **choice.as_json()}
    if first := first_trial(config):
        found["prior"] = first
    written = make_record(
        dataclasses.replace(table, config=chosen),
        setup.layout,
        values,
        study=with_name(found, study.objective),
        budget={**plan.as_json(), "spent": spent(config, choice.trials, plan)},
        ladder=ladder_of(config, None),
    )
    if (there := record.TransferRecord.read(config.record_path, config)) is not None:  # a target may have read it
        said = f"written meanwhile, for {there.target.name}; it stays, and its values are taken"
        progress.say(f"{config.record_path}: {said}")
        return
    record.write_record(config.record_path, written)
    progress.say(f"chosen: {', '.join(f'{name} {short(value)}' for name, value in choice.values.items())}")
    for line in remarks(written.study, written.target.extrapolated):
        progress.say(line)
    progress.say(f"record: {config.record_path}")
    _write_band(chosen, study, choice, vocab_size, progress)


def _write_band(config: Config, study: Study, choice: Choice, vocab_size: int, progress: Progress) -> None:
    """What the chosen trial and its repetitions were like while they trained, beside the record.

    Args:
        config: the target's run, with the chosen values.
        study: whose trials they are.
        choice: of the study.
        vocab_size: padded.
        progress: says where the band is.
    """
    from mup_megatron.model.build import parametrize

    complete = [trial for trial in choice.trials if trial.state == "complete"]
    folders = {trial.name: study.directory / trial.name for trial in complete}
    best = {trial.name: folders[trial.name] for trial in complete if trial.slot == choice.slot}
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=study.directory)
    table = parametrize(derive(proxy, {"model.as_built": None}), vocab_size)
    band = band_of_runs(table, best, folders)
    path = config.record_path.with_suffix(".band.json")
    if band is not None:
        band.write(path)
        progress.say(f"band: {path}, of {len(band.runs)} runs of the proxy")


def spent(config: Config, trials: Sequence[Trial], plan: budget.Plan) -> dict[str, Any]:
    """What tuning took: every trial up to the last step that it reported, or its last one."""
    proxy = proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir))
    steps = sum(max(trial.reports, default=0) for trial in trials)
    tokens = steps * proxy.training.global_batch_size * proxy.sample_tokens
    flops = plan.tuning.flops / plan.tuning.tokens * tokens
    seconds = sum(trial.seconds for trial in trials)
    return {"tokens": tokens, "flops": flops, "share": flops / plan.target.flops, "process_seconds": seconds}
