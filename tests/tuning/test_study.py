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
from mup_megatron.tuning.outcome import Trial
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import UserError
from tests.helpers.studies import SEARCH, loss_of, study_config


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


def test_a_folder_that_was_moved(tmp_path: Path) -> None:
    """Or mounted elsewhere: its journal holds one study, which goes on, whatever the folder is called."""
    before = Study.create(study_config(tmp_path / "a"))
    first = before.claim()
    assert first is not None
    before.finish(first, "complete", loss=4.5)
    planned = [trial.values for trial in before.trials()]
    moved = study_config(tmp_path / "b", run__name="renamed")
    before.directory.parent.rename(moved.run.dir)
    after = Study.create(moved)
    assert [trial.loss for trial in after.trials() if trial.state == "complete"] == [4.5]
    assert [trial.values for trial in after.trials()] == planned
