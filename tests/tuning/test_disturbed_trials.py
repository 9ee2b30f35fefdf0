"""A trial that is disturbed, and a study that ends as an undisturbed one.

SIGTERM at every kind of moment; a worker that is stopped (SIGSTOP) for longer than it is waited for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import load_config
from mup_megatron.data.prepare import prepare
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning import Stopped
from mup_megatron.tuning.outcome import FINISHED
from mup_megatron.tuning.study import Study
from mup_megatron.tuning.worker import work
from tests.helpers.commands import Background, metrics, until
from tests.helpers.configs import pipeline_file

STEPS, RUNGS = 8, (2, 4)
LAST_RUNG = RUNGS[-1]


def study_of(folder: Path, data: Path) -> tuple[Any, Study]:
    keys = {"tuning__trials": 2, "tuning__train_steps": STEPS, "tuning__repeat_best": 0, "data__dir": str(data)}
    config = load_config(pipeline_file(folder, **keys))
    prepare(config)
    return config, Study.create(config)


def finish(config: Any, study: Study, disturb: Callable[[], None] = lambda: None) -> None:
    """Works until every trial has ended; `disturb` is asked whenever the worker looks up."""

    def done() -> bool:
        disturb()
        return all(trial.state in FINISHED for trial in study.trials())

    work(config, study, Rank(), done)


def outcome(study: Study) -> list[tuple[Any, ...]]:
    """How every trial ended, to the last bit of each loss."""
    return [
        (trial.slot, tuple(trial.values.items()), trial.state, tuple(trial.reports.items())) for trial in study.trials()
    ]


@pytest.fixture(scope="module", autouse=True)
def _one_thread_a_trial() -> Iterator[None]:
    """As tests/helpers/commands.py has it: to the last bit, a loss depends on the number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    config, study = study_of(tmp_path_factory.mktemp("undisturbed"), data)
    finish(config, study)
    found = outcome(study)
    assert found[0][2] == "complete"
    assert list(dict(found[0][3])) == [2, 4, 6, 8]
    return found


class Trial:
    """What trial-000 has left on the disk and told its study."""

    def __init__(self, study: Study) -> None:
        self._study, self._folder = study, study.directory / "trial-000"

    def lines(self, kind: str) -> list[int]:
        path = self._folder / "metrics.jsonl"
        return [line["step"] for line in metrics(self._folder) if kind in line] if path.exists() else []

    def reported(self) -> list[int]:
        return list(self._study.trials()[0].reports)

    def saving(self) -> list[Path]:
        return list((self._folder / "checkpoints").glob("*.partial"))


# The worker hears nothing while it waits here, so that a report is on its way, or not made yet, when SIGTERM comes.
MOMENTS: dict[str, tuple[Callable[[Trial], bool], Callable[[Trial], Any]]] = {
    "start-up": (lambda trial: True, lambda trial: True),
    "training": (lambda trial: True, lambda trial: trial.lines("loss")),
    "evaluating": (lambda trial: True, lambda trial: 2 in trial.lines("loss")),
    "reporting": (lambda trial: True, lambda trial: 2 in trial.lines("eval_loss")),
    "saving": (lambda trial: 2 in trial.reported(), lambda trial: trial.saving() or 3 in trial.lines("loss")),
    "the last report": (lambda trial: 6 in trial.reported(), lambda trial: STEPS in trial.lines("eval_loss")),
    "after the last report": (lambda trial: STEPS in trial.reported(), lambda trial: True),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm(undisturbed: list[tuple[Any, ...]], data: Path, tmp_path: Path, moment: str) -> None:
    config, study = study_of(tmp_path, data)
    trial, (before, there) = Trial(study), MOMENTS[moment]
    sent: list[str] = []

    def disturb() -> None:
        started = study.trials()[0].state == "running"
        if started and not sent and before(trial):
            until(lambda: there(trial), 240, every=0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append(moment)

    with pytest.raises(Stopped):
        finish(config, study, disturb)
    assert sent
    again = Study.create(config)
    assert "running" not in {trial.state for trial in again.trials()}
    finish(config, again)
    assert outcome(again) == undisturbed


@pytest.mark.slow
def test_sigterm_to_the_trial_alone(undisturbed: list[tuple[Any, ...]], data: Path, tmp_path: Path) -> None:
    """It saves and ends; its worker takes that for a death, and it goes on."""
    config, study = study_of(tmp_path, data)
    trial = Trial(study)
    sent: list[int] = []

    def disturb() -> None:
        if not sent and 2 in trial.lines("loss"):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            sent.extend(int(child) for child in children if b"tuning.trial" in command_line(child))
            os.kill(sent[0], signal.SIGTERM)

    finish(config, study, disturb)
    assert study.trials()[0].attempts == 1
    assert outcome(study) == undisturbed


def command_line(process: str | int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def folder_of(process: int) -> str | None:
    """The trial's folder in which a process writes down its steps."""
    try:
        files = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return None
    found = [Path(file).parent for file in files if file.endswith("/metrics.jsonl")]
    return found[0].name if found and (found[0] / "metrics.jsonl").stat().st_size else None


@pytest.mark.slow
def test_a_worker_that_is_stopped(data: Path, tmp_path: Path, start: Callable[..., Background]) -> None:
    """As by `scontrol suspend`: its trial is another worker's meanwhile, and it takes no harm when it wakes up."""
    keys = {"tuning__trials": 4, "tuning__train_steps": 40, "tuning__repeat_best": 0, "data__dir": str(data)}
    keys["tuning__lease_timeout"] = 3
    quiet, path = tmp_path / "quiet", tmp_path / "run.yaml"
    quiet.mkdir()
    config = load_config(pipeline_file(quiet, **keys))
    study = Study.create(config)
    finish(config, study)
    expected = outcome(study)

    pipeline_file(tmp_path, **keys)
    leader = start("tune", path, "--join")
    until(lambda: (tmp_path / "run" / "tuning" / "journal.log").exists())
    sleeper = start("tune", path, "--join")
    name = until(lambda: next((found for trial in sleeper.trials() if (found := folder_of(trial))), None), every=0.001)
    for process in sleeper.processes():
        os.kill(process, signal.SIGSTOP)
    out, err = leader.process.communicate(timeout=240)
    assert leader.process.returncode == 0, err
    again = f"{name}-again-1"
    held = tmp_path / "run" / "tuning" / name
    assert f"{name}: {held} is held by a worker that is stopped; it starts again beside it" in out
    assert (tmp_path / "run" / "tuning" / again / "metrics.jsonl").exists()
    assert outcome(Study(load_config(path))) == expected
    for process in sleeper.processes():
        os.kill(process, signal.SIGCONT)
    out, err = sleeper.process.communicate(timeout=60)
    assert sleeper.process.returncode == 0, err
    assert f"{name}: this worker had been silent for too long, another one has it now" in out
    assert outcome(Study(load_config(path))) == expected
