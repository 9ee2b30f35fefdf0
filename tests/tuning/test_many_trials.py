"""Many trials, many workers, many kills: every trial ends once, whatever the storage."""

from __future__ import annotations

import importlib.util
import math
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import Config
from mup_megatron.tuning.lease import Leases
from mup_megatron.tuning.outcome import FINISHED
from mup_megatron.tuning.space import rungs, tuning_steps
from mup_megatron.tuning.study import Study
from tests.helpers import postgres
from tests.helpers.commands import environment
from tests.helpers.configs import MIXED, make
from tests.helpers.study_worker import loss_of

LEASE = 3
SEARCH = {"lr": {"log_uniform": [1e-3, 1e-1]}, "output_multiplier": {"log_uniform": [0.25, 4.0]}}


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """`tuning.storage` of each kind."""
    (tmp_path / "tuning").mkdir()
    if request.param == "postgresql":
        if postgres.postgres_programs() is None or importlib.util.find_spec("psycopg") is None:
            pytest.skip("needs PostgreSQL and psycopg: apt-get install postgresql")
        with postgres.server(tmp_path / "server") as url:
            yield url
    else:
        yield "journal" if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


class Workers:
    """Workers that are killed and started again."""

    def __init__(self, config: Config, folder: Path, count: int) -> None:
        self._path, self._folder, self._count = folder / "run.yaml", folder, count
        self._path.write_text(yaml.safe_dump(config.model_dump()))
        self._started = 0
        self.running: dict[subprocess.Popen[bytes], Path] = {}
        self.logs: list[Path] = []
        self.errors: list[str] = []

    def fill(self) -> None:
        """Starts as many as are missing; one that left by itself must have left well."""
        for process in [process for process in self.running if process.poll() is not None]:
            if process.returncode not in (0, -signal.SIGKILL):
                self.errors.append(self.running[process].with_suffix(".err").read_text())
            del self.running[process]
        while len(self.running) < self._count and not self.errors:
            log = self._folder / f"worker-{self._started}.log"
            self._started += 1
            self.logs.append(log)
            command = [sys.executable, "-m", "tests.helpers.study_worker", str(self._path), str(log)]
            with log.with_suffix(".err").open("w") as errors:
                self.running[subprocess.Popen(command, stderr=errors, env=environment())] = log

    def ended(self) -> int:
        """Trials that they have ended, by what they wrote; the study itself may be busy with them."""
        return sum(line.startswith("ended") for log in list(self.logs) for line in words(log))

    def kill(self, draw: random.Random) -> None:
        """One of them, at once: one that has a trial, where there is one."""
        last = {process: words(log) for process, log in list(self.running.items())}
        busy = [process for process, lines in last.items() if lines and lines[-1].startswith("claimed")]
        draw.choice(busy or list(last)).kill()

    def stop(self) -> None:
        """All, once they have seen that nothing is left."""
        for process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Killer(threading.Thread):
    """Kills workers, spread over the study, whatever it takes; its looks wait for no lock of the study's."""

    def __init__(self, workers: Workers, trials: int, kills: int) -> None:
        super().__init__(daemon=True)
        self._workers, self._trials, self._kills = workers, trials, kills
        self.killed, self.done = 0, threading.Event()

    def run(self) -> None:
        """Until all are killed, or nobody needs it any more."""
        draw = random.Random(5)
        while self.killed < self._kills and not self.done.wait(0.02):
            if self._workers.running and self._workers.ended() >= self._trials * (self.killed + 1) / (self._kills + 1):
                self._workers.kill(draw)
                self.killed += 1


def undisturbed(config: Config, points: list[dict[str, Any]]) -> list[tuple[int, str, Any]]:
    """How every trial ends by the rule, worked out trial by trial in the order of the plan."""
    reached: dict[int, list[float]] = {}
    found = []
    for slot, values in enumerate(points):
        reports, state = {}, "complete"
        for step in [*rungs(config), tuning_steps(config)]:
            loss = reports[step] = loss_of(values, step)
            if step in rungs(config):
                earlier = reached.setdefault(step, [])
                better = sum(other <= loss for other in earlier)
                earlier.append(loss)
                if better >= max(1, len(earlier) // config.tuning.reduction_factor):
                    state = "stopped"
                    break
        found.append((slot, state, tuple(reports.items())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "trials", "count", "kills"),
    [
        pytest.param("journal", 40, 3, 3, id="journal, 40"),
        pytest.param("journal", 250, 6, 15, id="journal"),
        pytest.param("sqlite", 100, 6, 8, id="sqlite"),
        pytest.param("postgresql", 100, 6, 8, id="postgresql"),
    ],
    indirect=["storage"],
)
def test_every_trial_ends_once(
    tmp_path: Path,
    storage: str,
    trials: int,
    count: int,
    kills: int,
    record_property: Any,
) -> None:
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(tmp_path),
        proxy={"hidden_size": 64},
        tuning__search=SEARCH,
        tuning__train_steps=16,
        tuning__trials=trials,
        tuning__storage=storage,
        tuning__lease_timeout=LEASE,
    )
    leader = Study.create(config, Leases(tmp_path / "tuning", LEASE))
    workers = Workers(config, tmp_path, count)
    workers.fill()
    killer = Killer(workers, trials, kills)
    killer.start()
    began, taken_back = time.monotonic(), 0
    try:
        while True:
            now = leader.trials()
            leader.plan(now)
            states = Counter(trial.state for trial in now)
            ended = sum(states[state] for state in FINISHED)
            if ended == trials:
                break
            assert time.monotonic() - began < 900, states
            workers.fill()
            assert not workers.errors, workers.errors
            taken_back += len(leader.take_back())
            time.sleep(0.5)
    finally:
        killer.done.set()
        killer.join()
        workers.stop()
    record_property("seconds", round(time.monotonic() - began))
    found = leader.trials()
    assert killer.killed > kills / 2  # the last trials may end between two looks
    assert taken_back > 0
    assert [trial.slot for trial in found] == list(range(trials))
    assert [(trial.slot, trial.state, tuple(trial.reports.items())) for trial in found] == undisturbed(
        config, leader.points
    )
    assert all(math.isfinite(trial.loss or math.nan) for trial in found)
    ends = Counter(line for log in workers.logs for line in words(log) if line.startswith("ended"))
    assert max(ends.values()) == 1
    assert sum(ends.values()) >= trials - killer.killed  # a worker may be killed between the two
    if not storage.startswith("journal"):
        leader._storage.backend.remove_session()
        leader._storage.backend.engine.dispose()


def words(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []
