"""Workers that come and go: a trial of one that is gone is taken back, once, and by its lease alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.tuning.lease import Leases, Lost, Overtaken
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import UserError
from tests.helpers.studies import joined, loss_of, study_config


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
