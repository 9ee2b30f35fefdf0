"""Several trials at a time on one device: how many, and that their number is in no loss."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import load_config
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning import abreast
from mup_megatron.tuning.abreast import Abreast, most_abreast
from mup_megatron.tuning.process import environment
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import ConfigError
from tests.helpers.commands import Background, mup, until
from tests.helpers.configs import MIXED, make, pipeline_file
from tests.tuning.test_pipeline import outcome, record

FINDS = {
    "twice as fast, then no more": ({1: 10.0, 2: 19.0, 4: 21.0}, 16, 0.01, 2),
    "never faster": ({1: 10.0, 2: 11.9}, 16, 0.01, 1),
    "as many as there may be": ({1: 10.0, 2: 20.0, 3: 30.0}, 3, 0.01, 3),
    "as many as fit": ({1: 10.0, 2: 20.0, 4: 40.0, 5: 50.0}, 16, 0.17, 5),
    "a second one does not fit": ({1: 10.0}, 16, 0.5, 1),
    "a fifth one brings nothing": ({1: 10.0, 2: 20.0, 4: 40.0, 5: 41.0}, 16, 0.17, 4),
    "a fifth one brings half of its own": ({1: 10.0, 2: 20.0, 4: 40.0, 5: 45.0}, 16, 0.17, 5),
    "a third one brings nothing": ({1: 10.0, 2: 20.0, 3: 21.0}, 3, 0.01, 2),
    "one, and no measurement": ({}, 1, 0.01, 1),
}


@pytest.mark.parametrize("case", FINDS)
def test_the_number_is_found(case: str) -> None:
    """By hand: the speed of each number of trials, the most, each trial's share of the memory, and what is found."""
    speeds, most, share, expected = FINDS[case]
    now, said, tried = 0.0, list[str](), list[int]()
    found = Abreast(most, measured=True, say=said.append, clock=lambda: now)
    done = dict.fromkeys(range(32), 0.0)
    for _ in range(400):
        count = found.count()
        if count not in tried:
            tried.append(count)
        for worker in range(count):
            more = done[worker] + speeds.get(count, 10.0) / count
            found.stepped(worker, int(more) - int(done[worker]), share)
            done[worker] = more
        now += 1.0
    assert found.count() == expected
    assert tried == sorted({*speeds, 1})
    assert len(said) == len(speeds)
    if case == "twice as fast, then no more":
        assert said[-1].startswith("2 trials at a time on this device: 19.")
        assert "; with 4 they are 21." in said[-1]
    if case == "a fifth one brings nothing":
        assert said[-1].startswith("4 trials at a time on this device: 40.0 steps a second; with 5 they are 41.")
    if "fit" in case:
        assert said[-1].endswith("(more do not fit)")


def test_a_process_that_starts_is_not_measured() -> None:
    """The second trial says nothing for minutes: the number stays, and no window is open."""
    now = 0.0
    found = Abreast(4, measured=True, say=lambda _line: None, clock=lambda: now)
    for _ in range(40):
        now += 1.0
        found.stepped(0, 10, 0.0)
        found.count()
    assert found.count() == 2
    for _ in range(100):
        now += 1.0
        found.stepped(0, 1, 0.0)  # ten times slower beside a process that imports
        assert found.count() == 2
    for _ in range(abreast._WINDOW_STEPS + int(abreast._WINDOW_SECONDS)):
        now += 1.0
        for worker in (0, 1):
            found.stepped(worker, 9, 0.0)
            found.count()
    assert found.count() == 4


def test_a_worker_between_two_trials_is_not_slow() -> None:
    """The second trial trains one second in ten; the pair is as fast as two, and the number goes on to four."""
    now = 0.0
    found = Abreast(4, measured=True, say=lambda _line: None, clock=lambda: now)
    while found.count() == 1:
        now += 1.0
        found.stepped(0, 10, 0.0)
    for second in range(1000):
        now += 1.0
        found.stepped(0, 10, 0.0)
        if second % 10 in (0, 1):
            found.stepped(1, 10 * (second % 10), 0.0)
        if found.count() != 2:
            break
    assert found.count() == 4
    assert second > 9 * abreast._WINDOW_SECONDS


@pytest.mark.parametrize(("sharing", "expected"), [(1, 4), (2, 2)])
def test_workers_share_the_memory(sharing: int, expected: int) -> None:
    """Two workers of one machine, trials of a fifth of it: each runs two, not four."""
    now = 0.0
    found = Abreast(16, measured=True, say=lambda _line: None, sharing=sharing, clock=lambda: now)
    for _ in range(200):
        now += 1.0
        for worker in range(found.count()):
            found.stepped(worker, 10, 0.2)
    assert found.count() == expected


def test_a_container_has_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shares are of the smaller of both; a container without a limit says `max`."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(abreast, "_CGROUP_LIMIT", limit)
    whole = abreast.memory_share()
    limit.write_text("max\n")
    assert abreast.memory_share() == pytest.approx(whole, rel=0.1)
    limit.write_text(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 8}\n")
    assert abreast.memory_share() == pytest.approx(8 * whole, rel=0.1)


def test_a_number_that_is_asked_for() -> None:
    found = Abreast(3, measured=False, say=lambda _line: None)
    found.stepped(0, 1000, 1.0)
    found.died(3)
    assert found.count() == 3


def test_trials_that_die_halve_the_number() -> None:
    """Once for all that ran together; then nothing is measured any more, and the last one stays."""
    now, said = 0.0, list[str]()
    found = Abreast(8, measured=True, say=said.append, clock=lambda: now)

    def train(seconds: int) -> int:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            for worker in range(found.count()):
                found.stepped(worker, 10, 0.01)
        return found.count()

    while train(1) < 4:
        pass
    for _ in range(3):
        found.died(4)
    assert said[-1] == "2 trials at a time from here on, in case memory was short"
    assert train(100) == 2
    found.died(2)
    found.died(1)
    assert (train(100), len(said)) == (1, 4)


@pytest.mark.slow
def test_a_trial_beside_another_dies(tmp_path: Path, start: Callable[..., Background]) -> None:
    """Killed while two are tried, as the kernel does where memory is short: one goes on, the other waits."""
    long = {"tuning__train_steps": 4000, "tuning__max_compute_share": 1e4, "tuning__trials_per_device": "auto"}
    path = pipeline_file(tmp_path, **long, tuning__trials=2, tuning__repeat_best=0)
    command = start("tune", path)
    second = tmp_path / "run" / "tuning" / "trial-001" / "metrics.jsonl"
    until(lambda: second.exists() and len(second.read_text().splitlines()) > 5, seconds=180)
    _, later = sorted(command.trials())
    os.kill(later, signal.SIGKILL)
    study = Study(load_config(path))
    until(lambda: [trial.state for trial in study.trials()] == ["running", "waiting"])
    os.kill(command.process.pid, signal.SIGTERM)
    out, _ = command.process.communicate(timeout=120)
    assert "1 trial at a time from here on, in case memory was short" in out


def test_shares_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    without = {"LOCAL_WORLD_SIZE": "2"}
    assert [environment(Rank(), without, number)["OMP_NUM_THREADS"] for number in (1, 2, 4, 16)] == ["4", "2", "1", "1"]
    assert environment(Rank(), {"OMP_NUM_THREADS": "3"}, 4)["OMP_NUM_THREADS"] == "3"
    auto = make(MIXED, "gpt3", tuning__trials_per_device="auto")
    assert [most_abreast(auto, ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert most_abreast(make(MIXED, "gpt3", tuning__trials_per_device=5), 8) == 5


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tuning__trials_per_device": 0}, r"tuning\.trials_per_device: expected a number > 0 or 'auto', found 0"),
        ({"tuning__trials_per_device": "many"}, r"tuning\.trials_per_device: expected .* found 'many'"),
        (
            {"tuning__trials_per_device": 2, "tuning__command": ["torchrun", "pretrain_gpt.py"]},
            r"tuning\.trials_per_device: a trial that a script runs .* expected 1, found 2",
        ),
    ],
)
def test_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(MIXED, "gpt3", **keys)


@pytest.mark.slow
def test_their_number_is_in_no_loss(tmp_path: Path) -> None:
    """Three at a time in one worker: every trial ends as it does alone, with its losses to the last bit."""
    folders = {}
    for number in ("1", "3"):
        folders[number] = tmp_path / number
        folders[number].mkdir()
        result = mup("tune", pipeline_file(folders[number]), f"tuning.trials_per_device={number}")
        assert result.returncode == 0, result.stderr
    assert outcome(folders["3"]) == outcome(folders["1"])
    assert record(folders["3"])["values"] == record(folders["1"])["values"]
    logs = {number: sorted(path.name for path in folder.rglob("worker-*.log")) for number, folder in folders.items()}
    assert logs == {"1": ["worker-0.log"], "3": ["worker-0-1.log", "worker-0-2.log", "worker-0.log"]}


@pytest.mark.slow
def test_a_signal(tmp_path: Path, start: Callable[..., Background]) -> None:
    """Both trials are saved, and the same command goes on with them."""
    long = {"tuning__train_steps": 4000, "tuning__max_compute_share": 1e4, "tuning__trials_per_device": 2}
    path = pipeline_file(tmp_path, **long, tuning__trials=2, tuning__repeat_best=0)
    command = start("tune", path)
    folders = [tmp_path / "run" / "tuning" / f"trial-00{number}" for number in (0, 1)]
    until(lambda: all((folder / "metrics.jsonl").exists() for folder in folders))
    until(lambda: all(len((folder / "metrics.jsonl").read_text().splitlines()) > 5 for folder in folders))
    os.kill(command.process.pid, signal.SIGTERM)
    _, err = command.process.communicate(timeout=120)
    assert command.process.returncode == 143, err
    assert "the same command goes on" in err
    assert all(list((folder / "checkpoints").glob("step_*")) for folder in folders)
    assert [trial.state for trial in Study(load_config(path)).trials()] == ["waiting", "waiting"]


@pytest.mark.slow
def test_what_goes_wrong_beside_the_first_ends_the_command(tmp_path: Path) -> None:
    """A trial in another thread that cannot start its folder: one sentence, no hang."""
    path = pipeline_file(tmp_path, tuning__trials_per_device=2)
    blocked = tmp_path / "run" / "tuning"
    blocked.mkdir(parents=True)
    (blocked / "worker-0-1.log").mkdir()  # where the second process would print to
    result = mup("tune", path)
    assert result.returncode not in (0, None)
    assert "worker-0-1.log" in result.stderr
