"""The study: planned by the seed alone, halved in order whoever is faster, shared, resumed, chosen from."""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from mup_megatron.config import Config
from mup_megatron.tuning import storage as storage_module
from mup_megatron.tuning.lease import Leases, Lost, Overtaken
from mup_megatron.tuning.outcome import Range, Trial, choose
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, make

SEARCH = {"lr": {"log_uniform": [1e-3, 1e-1]}, "output_multiplier": {"log_uniform": [0.25, 4.0]}}


def study_config(path: Path, **overrides: Any) -> Config:
    keys = {"tuning__search": SEARCH, "tuning__trials": 8, "tuning__train_steps": 16, **overrides}
    return make(MIXED, "gpt3", run__dir=str(path), **{"proxy": {"hidden_size": 64}, **keys})


def loss_of(trial: Trial, step: int) -> float:
    """A made-up loss that depends on nothing but the trial and the step."""
    return 5 + abs(math.log(float(trial.values["lr"]) / 0.01)) / 3 - 0.01 * step + 0.001 * (trial.seed % 7)


def run_trial(study: Study, trial: Trial, pause: Any = lambda: None) -> None:
    for step in (4, 8, 12, 16):
        pause()
        if not study.survives(trial, step, loss_of(trial, step)):
            return study.finish(trial, "stopped")
    study.finish(trial, "complete", loss=loss_of(trial, 16))


def run_all(config: Config, workers: int, seed: int) -> list[Trial]:
    """The whole study by threads that dawdle at random, each with a study of its own, as processes have."""
    Study.create(config)

    def work(number: int) -> None:
        study, dice = Study(config), random.Random(f"{seed} {number}")
        while (trial := study.claim()) is not None:
            run_trial(study, trial, lambda: time.sleep(dice.random() * 0.02))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Study(config).trials()


def ends(trials: list[Trial]) -> list[tuple[int, str, Any]]:
    return [(trial.slot, trial.state, tuple(trial.reports.items())) for trial in trials]


def test_what_is_tried_depends_on_the_seed_alone(tmp_path: Path) -> None:
    points = []
    variants: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "more": {"tuning__trials": 12}, "other": {"run__seed": 8}}
    for name, overrides in variants.items():
        study = Study.create(study_config(tmp_path / name, **overrides))
        points.append([trial.values for trial in study.trials()])
    assert len(points[0]) == 8
    assert points[0] == points[1] == points[2][:8]
    assert points[0] != points[3]
    lr = [float(point["lr"]) for point in points[2]]
    assert all(1e-3 <= value <= 1e-1 for value in lr)
    assert len(set(lr)) == 12


def test_who_is_faster_does_not_matter(tmp_path: Path) -> None:
    outcomes = [ends(run_all(study_config(tmp_path / str(n)), workers=n, seed=n)) for n in (1, 2, 4)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    states = [state for _, state, _ in outcomes[0]]
    assert 0 < states.count("stopped") < len(states)


def test_halving_by_arrival_would_matter(tmp_path: Path) -> None:
    """Negative control: Optuna's own pruner, given the same trials in another order, stops others."""
    import optuna

    def stopped(order: list[Trial]) -> set[int]:
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=4, reduction_factor=2)
        study = optuna.create_study(pruner=pruner)
        gone = set()
        for trial in order:
            asked = study.ask()
            for step in (4, 8):
                asked.report(loss_of(trial, step), step)
                if asked.should_prune():
                    gone.add(trial.slot)
                    break
        return gone

    study = Study.create(study_config(tmp_path))
    trials = study.trials()
    assert stopped(trials) != stopped(trials[::-1])


def test_the_rule_by_hand(tmp_path: Path) -> None:
    """At reduction factor 2: the best ⌊n/2⌋, at least one, of the n trials of lower or equal slot go on."""
    study = Study.create(study_config(tmp_path, tuning__trials=5))
    claimed = [study.claim() for _ in range(5)]
    losses = [3.0, 2.0, 4.0, 2.5, 1.0]
    goes_on = []
    for trial, loss in zip(claimed, losses, strict=True):
        assert trial is not None
        goes_on.append(study.survives(trial, 4, loss))
    # n=1: 3.0 leads. n=2: 2.0 leads. n=3, one goes on: not 4.0. n=4, two go on: 2.0 and 2.5. n=5, two: 1.0 and 2.0.
    assert goes_on == [True, True, False, True, True]


def test_a_step_between_rungs_stops_nobody(tmp_path: Path) -> None:
    study = Study.create(study_config(tmp_path))
    first, second = study.claim(), study.claim()
    assert first is not None
    assert second is not None
    assert study.survives(first, 12, 1.0)
    assert study.survives(second, 12, 9.0)


def test_hyperband_spares_some(tmp_path: Path) -> None:
    """Slots 2, 5, 8 are of the bracket that is never stopped, slots 1, 4, 7 of the one that is stopped late."""
    config = study_config(tmp_path, tuning__pruner="hyperband", tuning__trials=10)
    trials = run_all(config, workers=2, seed=0)
    assert all(trials[slot].state == "complete" for slot in (2, 5, 8))
    assert all(list(trials[slot].reports) != [4] for slot in (1, 4, 7))
    assert any(trial.state == "stopped" for trial in trials)


def test_a_trial_has_one_owner(tmp_path: Path) -> None:
    config = study_config(tmp_path, tuning__trials=12)
    Study.create(config)
    owned: list[int] = []

    def claim() -> None:
        study = Study(config)
        while (trial := study.claim()) is not None:
            owned.append(trial.slot)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(owned) == list(range(12))


def owners_on_sqlite(path: Path) -> int:
    """How many of two workers get the only trial, where each waits for the other between looking and taking."""
    (path / "tuning").mkdir(parents=True)
    config = study_config(path, tuning__storage=f"sqlite:///{path}/study.db", tuning__trials=1)
    Study.create(config)
    both, owned = threading.Barrier(2), []

    def meet(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        if statement.startswith("UPDATE trials"):
            with suppress(threading.BrokenBarrierError):
                both.wait(1)

    def claim() -> None:
        study = Study(config)
        sqlalchemy.event.listen(study._storage.backend.engine, "before_cursor_execute", meet)
        owned.append(study.claim())

    threads = [threading.Thread(target=claim) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(trial is not None for trial in owned)


def test_a_trial_has_one_owner_on_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert owners_on_sqlite(tmp_path / "ours") == 1
    monkeypatch.setattr(
        storage_module, "_one_at_a_time", lambda _engine: None
    )  # as Python's driver begins transactions
    assert owners_on_sqlite(tmp_path / "driver's") == 2


def test_the_plan_is_enqueued_as_it_is_needed(tmp_path: Path) -> None:
    """A look at a database costs what has not ended; who plans, and how often, changes nothing."""
    config = study_config(tmp_path, tuning__trials=150)
    study = Study.create(config)
    assert len(study.trials()) == 64
    assert study.plan(study.trials()) == 150 - 64
    assert len(study.trials()) == 64  # enough wait
    for _ in range(10):
        assert study.claim() is not None
    other = Study(config)
    assert other.plan(other.trials()) == 150 - 64
    assert len(other.trials()) == 74
    while (trial := other.claim()) is not None:
        other.finish(trial, "stopped")
        other.plan(other.trials())
    found = study.trials()
    assert study.plan(found) == 0
    assert [trial.slot for trial in found] == list(range(150))
    assert [trial.values for trial in found] == study.points


def test_a_trial_that_ends_while_it_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker was slow, no more; what it found stays, and the leader goes on."""
    config = study_config(tmp_path)
    leader = Study.create(config, Leases(tmp_path / "tuning", 0.2))
    slow = joined(config, tmp_path, 0.2)
    trial = slow.claim()
    assert trial is not None
    silence(slow)
    assert slow._leases is not None
    monkeypatch.setattr(slow._leases, "check", lambda _name: None)  # it has looked just before
    leader.take_back()
    time.sleep(0.3)
    assert leader._leases is not None
    lost = leader._leases.lost

    def meanwhile(running: Any) -> list[str]:
        found = lost(running)
        slow.finish(trial, "complete", loss=2.0)
        return found

    monkeypatch.setattr(leader._leases, "lost", meanwhile)
    assert leader.take_back() == []
    assert (leader.trials()[0].state, leader.trials()[0].loss) == ("complete", 2.0)


def test_what_a_lost_worker_had_waits_again(tmp_path: Path) -> None:
    config = study_config(tmp_path)
    study = Study.create(config)
    lost = study.claim()
    assert lost is not None
    study.survives(lost, 4, 3.0)
    assert study.trials()[0].state == "running"
    again = Study.create(config)
    assert [trial.state for trial in again.trials()] == ["waiting"] * 8
    taken = again.claim()
    assert taken is not None
    assert (taken.slot, taken.values, taken.reports) == (0, lost.values, {4: 3.0})


def test_a_study_of_other_settings_is_refused(tmp_path: Path) -> None:
    Study.create(study_config(tmp_path))
    with pytest.raises(UserError, match=r"tuning.train_steps: 16 then, 20 now"):
        Study.create(study_config(tmp_path, tuning__train_steps=20))
    with pytest.raises(UserError, match=r"hparams.weight_decay: 0.1 then, 0.0 now"):
        Study.create(study_config(tmp_path, hparams__weight_decay=0.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data__split", "90,10,0"),
        ("training__lr_schedule", "linear"),
        ("proxy", {"ffn_hidden_size": 128}),
        ("run__seed", 9),
    ],
)
def test_whatever_decides_the_outcome_is_compared(tmp_path: Path, key: str, value: Any) -> None:
    Study.create(study_config(tmp_path))
    with pytest.raises(UserError, match="this study was started with other settings"):
        Study.create(study_config(tmp_path, **{key: value}))


def test_a_lock_that_a_killed_writer_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a relative folder, where Optuna's link would dangle and never be taken for stale."""
    monkeypatch.chdir(tmp_path)
    Study.create(study_config(Path("run")))
    (tmp_path / "run" / "tuning" / "journal.log.lock").symlink_to("run/tuning/journal.log")
    assert len(Study.create(study_config(Path("run"))).trials()) == 8


def test_a_line_that_a_full_disk_left_unfinished(tmp_path: Path) -> None:
    """The next line would be glued to it, and the journal damaged for ever; who writes next cuts it off."""
    config = study_config(tmp_path)
    worker = Study.create(config, Leases(tmp_path / "tuning", 1.0))
    journal, lost = tmp_path / "tuning" / "journal.log", b'{"op_code":7,"worker_id":"7e'
    with journal.open("ab") as file:
        file.write(lost)
    trial = worker.claim()
    assert trial is not None
    worker.report(trial, 4, 5.0)
    assert lost + b"{" not in journal.read_bytes()
    assert joined(config, tmp_path).trials()[0].reports == {4: 5.0}
    assert len(Study.create(config, Leases(tmp_path / "tuning", 1.0)).trials()) == 8


def test_a_study_may_grow(tmp_path: Path) -> None:
    run_all(study_config(tmp_path), workers=1, seed=0)
    study = Study.create(study_config(tmp_path, tuning__trials=11))
    assert [trial.state for trial in study.trials()][8:] == ["waiting"] * 3


def test_repetitions_are_planned_once(tmp_path: Path) -> None:
    config = study_config(tmp_path)
    run_all(config, workers=1, seed=0)
    study = Study(config)
    best = min((t for t in study.trials() if t.state == "complete"), key=lambda t: t.loss or 0)
    for _ in range(2):
        study.repeat_best()
    repetitions = [trial for trial in study.trials() if trial.repeats]
    assert len(repetitions) == 4
    assert {trial.seed for trial in repetitions} == {8, 9}
    assert [trial.name for trial in repetitions if trial.slot == best.slot] == [
        f"trial-{best.slot:03d}-seed-8",
        f"trial-{best.slot:03d}-seed-9",
    ]
    assert all(trial.values == best.values for trial in repetitions if trial.slot == best.slot)


def test_the_grid_is_gone_through_once(tmp_path: Path) -> None:
    search = {"lr": {"choice": [0.01, 0.02, 0.03]}, "lr_schedule": {"choice": ["cosine", "linear"]}}
    study = Study.create(study_config(tmp_path, tuning__sampler="grid", tuning__search=search, tuning__trials=100))
    points = {(trial.values["lr"], trial.values["lr_schedule"]) for trial in study.trials()}
    assert points == {(lr, schedule) for lr in (0.01, 0.02, 0.03) for schedule in ("cosine", "linear")}
    assert len(study.trials()) == 6


def misses(path: Path, sampler: str) -> tuple[float, float]:
    """Mean distance of lr to its best value, in e-folds, of the first ten trials (drawn at random) and the last."""
    trials = run_all(study_config(path, tuning__sampler=sampler, tuning__trials=40), workers=1, seed=0)
    assert all(trial.state in ("complete", "stopped") and set(trial.values) == set(SEARCH) for trial in trials)
    distances = [abs(math.log(float(trial.values["lr"]) / 0.01)) for trial in trials]
    return statistics.fmean(distances[:10]), statistics.fmean(distances[-10:])


def test_a_sampler_that_learns(tmp_path: Path) -> None:
    first, last = misses(tmp_path / "tpe", "tpe")
    assert last < first / 2
    first, last = misses(tmp_path / "random", "random")  # negative control
    assert last > first / 2


@pytest.mark.parametrize("storage", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_storages_keep_the_same_contract(tmp_path: Path, storage: str) -> None:
    url = "journal" if storage == "journal" else f"sqlite:///{tmp_path}/study.db"
    (tmp_path / "tuning").mkdir()
    config = study_config(tmp_path, tuning__storage=url)
    trials = run_all(config, workers=2, seed=1)
    assert ends(trials) == ends(run_all(study_config(tmp_path / "other"), workers=1, seed=1))
    study = Study.create(config)
    study.repeat_best()
    trial = study.claim()
    assert trial is not None
    study.finish(trial, "diverged", seconds=1.5, reason="loss is nan")
    found = next(other for other in study.trials() if other.name == trial.name)
    assert (found.state, found.loss, found.seconds, found.reason) == ("diverged", math.inf, 1.5, "loss is nan")


def trial(slot: int, loss: float | None, *, seed: int = 7, state: Any = "complete", lr: float = 0.01) -> Trial:
    return Trial(
        id=slot,
        slot=slot,
        values={"lr": lr},
        seed=seed,
        repeats=seed != 7,
        state=state,
        loss=loss,
        reports={} if loss is None else {16: loss},
        seconds=1.0,
        reason=None,
        attempts=0,
    )


def test_the_choice_by_hand(tmp_path: Path) -> None:
    trials = [
        trial(0, 3.00, lr=0.02),
        trial(0, 3.20, seed=8, lr=0.02),
        trial(1, 3.05, lr=0.03),
        trial(1, 3.07, seed=8, lr=0.03),
        trial(2, 3.90, lr=0.01),
        trial(3, 3.50, state="stopped", lr=0.04),
        trial(4, math.inf, state="diverged", lr=0.9),
        trial(5, None, state="failed", lr=0.05),
    ]
    choice = choose(study_config(tmp_path), trials)
    # Means 3.10 and 3.06: the better single run is not the better candidate.
    assert choice.slot == 1
    assert choice.loss == pytest.approx(3.06)
    # Deviations ±0.10 and ±0.01: sqrt((2·0.01 + 2·0.0001) / 2) = sqrt(0.0101).
    assert choice.noise == pytest.approx(math.sqrt(0.0101))
    # 0.04 apart, two standard errors are 2 · 0.1005 · sqrt(1/2 + 1/2) = 0.2010.
    assert [(c.slot, c.within_noise) for c in choice.candidates] == [(1, False), (0, True)]
    # Searched from 1e-3 to 1e-1. Below 0.03 log(3) was tried down to 0.01, log(10) was not; above all of it was.
    assert choice.interior == {"lr": False}
    assert choice.ranges == {"lr": Range(low=1e-3, high=1e-1, log=True)}
    low = [trial(9, None, state="failed", lr=0.004)]  # log(7.5) and log(4)
    assert choose(study_config(tmp_path), [*trials, *low]).interior == {"lr": True}
    assert choice.as_json()["trials"][6]["loss"] is None


def test_at_the_edge(tmp_path: Path) -> None:
    trials = [trial(0, 3.0, lr=0.1), trial(1, 4.0, lr=0.01), trial(2, 4.0, lr=0.02, state="stopped")]
    assert choose(study_config(tmp_path), trials).interior == {"lr": False}
    assert choose(study_config(tmp_path), trials).noise is None


def test_a_candidate_that_diverged_with_another_seed_is_not_chosen(tmp_path: Path) -> None:
    trials = [trial(0, 3.0), trial(0, math.inf, seed=8, state="diverged"), trial(1, 3.5), trial(1, 3.5, seed=8)]
    assert choose(study_config(tmp_path), trials).slot == 1


def test_every_candidate_diverged_with_another_seed(tmp_path: Path) -> None:
    trials = [trial(0, 3.0), trial(0, math.inf, seed=8, state="diverged")]
    with pytest.raises(UserError, match="each of the best 2 trials diverged with another seed"):
        choose(study_config(tmp_path), trials)


def test_workers_that_learn_do_not_draw_the_same(tmp_path: Path) -> None:
    config = study_config(tmp_path, tuning__sampler="tpe")
    Study.create(config)
    claimed = [Study(config).claim() for _ in range(4)]
    assert len({trial.values["lr"] for trial in claimed if trial is not None}) == 4


def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tuning.storage: cannot open sqlite:////none/study.db"):
        Study.create(study_config(tmp_path, tuning__storage="sqlite:////none/study.db"))
    with pytest.raises(UserError, match=r"tuning.storage: may hold .* with a driver of sqlite"):
        study_config(tmp_path, tuning__storage="nothing://here")


def test_nothing_to_choose_from(tmp_path: Path) -> None:
    trials = [trial(0, math.inf, state="diverged"), trial(1, None, state="failed")]
    with pytest.raises(UserError, match="none of the 2 trials ended with a finite loss"):
        choose(study_config(tmp_path), trials)


def joined(config: Config, path: Path, seconds: float = 1.0) -> Study:
    """The study as another worker sees it."""
    study = Study.join(config, Leases(path / "tuning", seconds))
    assert study is not None
    return study


def silence(study: Study) -> None:
    """The worker is gone: nothing touches its leases any more."""
    assert study._leases is not None
    study._leases._held.clear()


def taken_back(leader: Study, seconds: float, joined: Leases | None = None) -> list[str]:
    names, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        names += leader.take_back(joined)
        time.sleep(0.05)
    return names


def test_a_study_is_joined_once_it_is_there(tmp_path: Path) -> None:
    config = study_config(tmp_path)
    assert Study.join(config, Leases(tmp_path / "tuning", 1.0)) is None
    Study.create(config, Leases(tmp_path / "tuning", 1.0))
    assert len(joined(config, tmp_path).trials()) == 8
    with pytest.raises(UserError, match="started with other settings"):
        joined(study_config(tmp_path, tuning__train_steps=32), tmp_path)


def test_a_trial_of_a_worker_that_is_gone(tmp_path: Path) -> None:
    """It is taken back once, by its lease alone; those of workers that live stay theirs, however long they take."""
    config = study_config(tmp_path)
    leader = Study.create(config, Leases(tmp_path / "tuning", 1.0))
    gone, slow = joined(config, tmp_path), joined(config, tmp_path)
    lost, kept = gone.claim(), slow.claim()
    assert lost is not None
    assert kept is not None
    assert taken_back(leader, 2.0) == []  # longer than the lease
    silence(gone)
    assert taken_back(leader, 2.0) == [lost.name]
    slow.check_held(kept)
    with pytest.raises(Lost):  # it was only slow, and lets go
        gone.check_held(lost)
    with pytest.raises(Lost):
        gone.survives(lost, 4, 1.0)
    with pytest.raises(Lost):  # what it found counts no more
        gone.finish(lost, "complete", loss=1.0)
    assert next(trial for trial in leader.trials() if trial.name == lost.name).state == "waiting"
    again = slow.claim()
    assert again is not None
    assert again.name == lost.name
    with pytest.raises(Lost):  # the new owner's lease is not the old one's
        gone.check_held(lost)


def test_a_launch_takes_back_what_a_joined_worker_had(tmp_path: Path) -> None:
    """Its own trials have no lease and stay; while the joined worker lives, so does its trial."""
    config = study_config(tmp_path)
    leases = Leases(tmp_path / "tuning", 0.3)
    (tmp_path / "tuning" / "leases" / "trial-000@of-a-worker-long-gone").touch()
    leases.end()
    launch = Study.create(config)
    own = launch.claim()
    worker = joined(config, tmp_path, 0.3)
    theirs = worker.claim()
    assert own is not None
    assert theirs is not None
    assert taken_back(launch, 0.9, leases) == []  # three leases long
    silence(worker)
    assert taken_back(launch, 0.9, leases) == [theirs.name]
    assert {trial.name: trial.state for trial in launch.trials()}[own.name] == "running"
    assert launch.claim() == next(trial for trial in launch.trials() if trial.name == theirs.name)


def test_two_threads_of_a_worker_are_two_owners(tmp_path: Path) -> None:
    """The worker was silent, its trial was taken back, and its own other thread has it: the first one hears of it."""
    config = study_config(tmp_path, tuning__trials=1)
    leader = Study.create(config, Leases(tmp_path / "tuning", 0.2))
    first = joined(config, tmp_path, 0.2)
    second = first.again()
    lost = first.claim()
    assert lost is not None
    silence(first)
    assert taken_back(leader, 0.5) == [lost.name]
    assert second.claim() is not None
    with pytest.raises(Lost):
        first.check_held(lost)


def test_a_trial_that_takes_its_workers_with_it(tmp_path: Path) -> None:
    config = study_config(tmp_path, tuning__trials=1)
    leader = Study.create(config, Leases(tmp_path / "tuning", 0.2))
    for _ in range(5):
        worker = joined(config, tmp_path, 0.2)
        assert worker.claim() is not None
        silence(worker)
        assert len(taken_back(leader, 0.5)) == 1
    [trial] = leader.trials()
    assert (trial.state, trial.reason) == ("failed", "its worker was lost, 5 times")
    assert joined(config, tmp_path).claim() is None


@pytest.mark.parametrize("launch", [False, True])
def test_nobody_waits_for_a_trial_that_nobody_runs(tmp_path: Path, launch: bool) -> None:
    """The only worker left waits at a rung for a trial of a lower slot that is taken back then: it takes that one."""
    config, leases = study_config(tmp_path), Leases(tmp_path / "tuning", 0.3)
    leader = Study.create(config, None if launch else leases)
    gone, left = joined(config, tmp_path, 0.3), Study(config) if launch else joined(config, tmp_path)
    first, second = gone.claim(), left.claim()
    assert first is not None
    assert second is not None
    silence(gone)

    def alive() -> None:
        leader.take_back(leases if launch else None)

    with pytest.raises(Overtaken):
        left.survives(second, 4, loss_of(second, 4), alive)
    left.finish(second, "waiting")
    again = left.claim()
    assert again is not None
    assert again.slot == first.slot
