"""Coordinate descent after the joint search: its sequence by hand, whoever runs it, killed or not, and its record."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.config.study import CoordinateDescent, Range
from mup_megatron.tuning import budget, descent, outcome
from mup_megatron.tuning.descent import Descent, Run, descend, neighbours, order_of
from mup_megatron.tuning.objective import BLEU, LOSS, with_name
from mup_megatron.tuning.outcome import Trial, choose
from mup_megatron.tuning.record import StudyRecord
from mup_megatron.tuning.remarks import remarks
from mup_megatron.tuning.study import Study
from mup_megatron.util.errors import UserError
from tests.helpers.commands import mup
from tests.helpers.configs import MIXED, make, pipeline_file

EMBEDDING = "per_tensor.embedding.lr"
SEARCH = {
    "lr": {"log_uniform": [1e-3, 1.0]},
    "output_multiplier": {"log_uniform": [0.25, 4.0]},
    EMBEDDING: {"log_uniform": [0.25, 64.0]},
}
SPACE = {name: Range.model_validate(dimension) for name, dimension in SEARCH.items() if name != "output_multiplier"}


def bowl(values: Mapping[str, Any], seed: int) -> float:
    """0.05 log2(embedding / 4)² + 0.1 log2(lr / 0.08)², and 0.001 per seed."""
    return 0.05 * math.log2(values[EMBEDDING] / 4) ** 2 + 0.1 * math.log2(values["lr"] / 0.08) ** 2 + 0.001 * seed


def gone(most: int = 100, noise: float | None = 0.005, rounds: int = 1) -> tuple[Descent, list[tuple[Run, float]]]:
    """A whole descent from lr 0.01 and embedding 1, whose loss is 0.1 · 3² + 0.05 · 2² = 1.1, and its runs in order."""
    start = {"lr": 0.01, EMBEDDING: 1.0}
    known: dict[tuple[int, int], float] = {}
    runs: list[tuple[Run, float]] = []
    # Of so many pairs that the few of the descent itself hardly move it.
    groups = [] if noise is None else [[0.0, math.sqrt(2) * noise]] * 10_000
    while True:
        said = CoordinateDescent(trials=most, rounds=rounds)
        found = descend(said, SPACE, (3, start, {seed: bowl(start, seed) for seed in (0, 1)}), groups, known, 8)
        if not found.missing:
            return found, runs
        for run in found.missing:
            known[run.slot, run.seed] = bowl(run.values, run.seed)
            runs.append((run, run.values[run.name]))


# Embedding: from 1 (1.1) to 2 (0.95), to 4 (0.9), not to 8 (0.95). Rate: from 0.01 (0.9) to 0.02 (0.4), 0.04 (0.1),
# 0.08 (0), not to 0.16 (0.1). What is lower with seed 0 is repeated with seed 1.
SEQUENCE = [
    *[(8, 0, 2.0), (9, 0, 0.5), (8, 1, 2.0), (10, 0, 4.0), (10, 1, 4.0), (11, 0, 8.0)],
    *[(12, 0, 0.02), (13, 0, 0.005), (12, 1, 0.02), (14, 0, 0.04), (14, 1, 0.04)],
    *[(15, 0, 0.08), (15, 1, 0.08), (16, 0, 0.16)],
]


def check_the_sequence() -> None:
    found, runs = gone()
    assert [(run.slot, run.seed, value) for run, value in runs] == SEQUENCE, "another sequence than by hand"
    assert found.values == {"lr": 0.08, EMBEDDING: 4.0}
    assert (found.slot, found.start, found.count, found.ended) == (15, 3, 14, "rounds")
    moved = [(move.name, move.before, move.after) for move in found.moves]
    assert moved == [
        *[(EMBEDDING, 1.0, 2.0), (EMBEDDING, 2.0, 4.0)],
        *[("lr", 0.01, 0.02), ("lr", 0.02, 0.04), ("lr", 0.04, 0.08)],
    ]
    losses = [(round(move.loss_before, 9), round(move.loss_after, 9)) for move in found.moves]
    means = [1.1005, 0.9505, 0.9005, 0.4005, 0.1005, 0.0005]  # over seeds 0 and 1
    assert losses == list(itertools.pairwise(means))


def test_the_sequence_by_hand() -> None:
    check_the_sequence()


def test_a_descent_that_ignores_the_losses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it takes every first side."""
    run, accept = descent._Walk._run, descent._Walk._accept
    monkeypatch.setattr(descent._Walk, "_run", lambda walk, runs: [0.0 * loss for loss in run(walk, runs)])
    monkeypatch.setattr(descent._Walk, "_accept", lambda walk, tried, first: accept(walk, tried, first) or True)
    with pytest.raises(AssertionError, match="another sequence than by hand"):
        check_the_sequence()


def test_what_is_within_noise_does_not_move() -> None:
    """Two seeds each: 2 · 0.2 · sqrt(2/2) = 0.4 is asked for. Embedding: 0.15 is less; rate: 0.5 is more, then 0.3."""
    found, runs = gone(noise=0.2)
    assert found.values == {"lr": 0.02, EMBEDDING: 1.0}
    assert [(run.slot, run.seed) for run, _ in runs] == [
        (8, 0),
        (9, 0),
        (8, 1),
        (10, 0),
        (11, 0),
        (10, 1),
        (12, 0),
        (12, 1),
    ]
    assert gone(noise=None)[0].ended == "noise"


def test_the_noise_is_of_both_stages() -> None:
    """The joint search's one pair says 0.01/√2, by which a gain of 0.025 would be one: 2 · 0.0071 · sqrt(2/2).

    The pair that has the gain differs by 0.16: sqrt((0.01² + 0.16²)/2 / 2) is 0.080, and twice that is more.
    """
    lr = {"lr": SPACE["lr"]}
    start = (0, {"lr": 0.01}, {0: 5.0, 1: 5.01})
    for pair, moves in (((4.9, 5.06), 0), ((4.975, 4.985), 1)):  # 0.025 lower each
        known = {(3, 0): pair[0], (4, 0): 6.0, (3, 1): pair[1], (5, 0): 6.0}
        found = descend(CoordinateDescent(trials=9), lr, start, [[5.0, 5.01]], known, 3)
        assert len(found.moves) == moves
        assert not found.missing
        assert found.noise == pytest.approx(math.sqrt((0.01**2 + (pair[1] - pair[0]) ** 2) / 4))


def test_it_ends_at_its_trials() -> None:
    """Six runs are the embedding's; the rate's two sides would be the seventh and eighth."""
    found, runs = gone(most=7)
    assert (found.ended, len(runs), found.values) == ("trials", 6, {"lr": 0.01, EMBEDDING: 4.0})
    assert gone(most=8)[1][:6] == runs


def test_the_second_round_takes_smaller_steps() -> None:
    """The root of 2 from the optimum: every side is worse."""
    found, runs = gone(rounds=2)
    assert [round(value, 6) for _, value in runs[14:]] == [5.656854, 2.828427, 0.113137, 0.056569]
    assert found.count == 18


@pytest.mark.parametrize(
    ("dimension", "value", "step", "expected"),
    [
        ({"log_uniform": [0.001, 0.03]}, 0.02, 2.0, [(1, 0.03), (-1, 0.01)]),
        ({"log_uniform": [0.001, 0.03]}, 0.03, 2.0, [(-1, 0.015)]),
        ({"uniform": [0.0, 0.8]}, 0.4, 2.0, [(1, 0.5), (-1, 0.30000000000000004)]),
        ({"uniform": [0.0, 0.8]}, 0.0, 4.0, [(1, 0.2)]),
        ({"choice": [1.0, 4.0, 2.0]}, 2.0, 2.0, [(1, 4.0), (-1, 1.0)]),
        ({"choice": [1.0, 4.0, 2.0]}, 4.0, 9.0, [(-1, 2.0)]),
        ({"choice": ["cosine", "linear", "WSD"]}, "linear", 2.0, [(0, "cosine"), (0, "WSD")]),
    ],
)
def test_both_sides_of_a_value(dimension: Any, value: Any, step: float, expected: Any) -> None:
    assert neighbours(Range.model_validate(dimension), value, step) == expected


def test_the_embedding_s_rate_comes_first() -> None:
    names = ["lr", "per_tensor.router.lr", "weight_decay", EMBEDDING, "per_tensor.embedding.init"]
    found = order_of({name: Range(uniform=[0, 1]) for name in names})
    assert found == [EMBEDDING, "per_tensor.router.lr", "per_tensor.embedding.init", "lr", "weight_decay"]


# The stage in a study


def study_config(path: Path, **overrides: Any) -> Config:
    stage = {"trials": 40, "factor": 2.0}
    keys = {"tuning__search": SEARCH, "tuning__trials": 4, "tuning__train_steps": 16, "tuning__descent": stage}
    return make(MIXED, "gpt3", run__dir=str(path), **{"proxy": {"hidden_size": 64}, **keys, **overrides})


def loss_of(trial: Trial, step: int) -> float:
    """A bowl in all three values; seeds differ by less than moves do, and more steps are better."""
    third = 0.02 * math.log2(trial.values["output_multiplier"]) ** 2
    return 3 + bowl(trial.values, trial.seed % 3) + third - 0.01 * step


def work_on(config: Config, most: int, killed: int = 10**6) -> int:
    """A worker that runs so many trials of a study, claims one more where it is killed; how many it ran."""
    study, done = Study(config), 0
    while done < most and (trial := study.claim()) is not None:
        if done == killed:
            return done
        for step in (4, 8, 12, 16):
            if not study.survives(trial, step, loss_of(trial, step)):
                study.finish(trial, "stopped")
                break
        else:
            study.finish(trial, "complete", loss=loss_of(trial, 16))
        done += 1
    return done


def waits(study: Study) -> bool:
    return any(trial.state == "waiting" for trial in study.trials())


def lead(config: Config, workers: int = 1, killed: int | None = None) -> list[Trial]:
    """The whole study, as a leader moves it on; every process is gone after so many trials, and new ones come."""
    study, repeated = Study.create(config), False
    while True:
        threads = [threading.Thread(target=work_on, args=(config, 10**6)) for _ in range(workers - 1)]
        for thread in threads:
            thread.start()
        work_on(config, 10**6, 10**6 if killed is None else killed)
        for thread in threads:
            thread.join()
        if killed is not None:
            study, repeated = Study.create(config), False  # takes back what was running
            if waits(study):
                continue
        if not repeated:
            repeated = True
            study.repeat_best()
            if waits(study):
                continue
        if not study.descend():
            return study.trials()


def facts(trials: list[Trial]) -> list[Any]:
    return [(trial.slot, trial.seed, trial.varies, trial.repeats, trial.state, trial.values) for trial in trials]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, list[Trial]]:
    config = study_config(tmp_path_factory.mktemp("descent"))
    return config, lead(config)


def test_a_study_goes_on_from_its_best_trial(whole: tuple[Config, list[Trial]]) -> None:
    """Near the bowl's bottom at the end, by moves from the joint search's choice; no trial of it is stopped."""
    config, trials = whole
    joint = choose(study_config(Path(config.run.dir), tuning__descent={}), [t for t in trials if t.varies is None])
    found = choose(config, trials)
    assert found.descent is not None
    assert found.descent.start == joint.slot
    assert found.loss < joint.loss
    values = dict(joint.values)
    for move in found.descent.moves:
        assert values[move.name] == move.before
        assert move.after / move.before in (pytest.approx(2), pytest.approx(0.5)) or move.after in (64.0, 0.25, 4.0)
        values[move.name] = move.after
    assert found.values == values
    assert abs(math.log2(values["lr"] / 0.08)) <= 0.5
    assert abs(math.log2(values[EMBEDDING] / 4)) <= 0.5
    moved = [trial for trial in trials if trial.varies is not None]
    assert {trial.state for trial in moved} == {"complete"}
    assert [trial.varies for trial in moved if not trial.repeats][:2] == [EMBEDDING, EMBEDDING]
    assert len(moved) == found.descent.count <= 40
    assert min(trial.slot for trial in moved) == 4
    assert found.candidates[0].slot == found.slot


@pytest.mark.parametrize(("workers", "killed"), [(3, None), (1, 1), (1, 2)])
def test_who_runs_it_and_how_often_it_is_killed_does_not_matter(
    tmp_path: Path, whole: tuple[Config, list[Trial]], workers: int, killed: int | None
) -> None:
    assert facts(lead(study_config(tmp_path), workers, killed)) == facts(whole[1])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["quasi_random", "tpe"])
def test_in_a_database(tmp_path: Path, sampler: str) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    found = lead(study_config(tmp_path / "run", tuning__storage=url, tuning__sampler=sampler))
    assert any(trial.varies for trial in found)
    assert facts(found) == facts(lead(study_config(tmp_path / "other", tuning__sampler=sampler)))


def test_a_finished_study_may_go_on(tmp_path: Path, whole: tuple[Config, list[Trial]]) -> None:
    """The stage may be asked for later, not changed, and not left out again."""
    lead(study_config(tmp_path, tuning__descent={}))
    assert facts(lead(study_config(tmp_path))) == facts(whole[1])
    for stage in ({}, {"trials": 40, "factor": 3.0}):
        with pytest.raises(UserError, match=r"started with other settings.*tuning\.descent\.factor"):
            Study.create(study_config(tmp_path, tuning__descent=stage))
    with pytest.raises(UserError, match=r"started with other settings.*tuning\.trials"):
        Study.create(study_config(tmp_path, tuning__trials=8))
    Study.create(study_config(tmp_path, tuning__descent={"trials": 50, "factor": 2.0}))


def test_nothing_is_said_where_there_is_none(tmp_path: Path) -> None:
    """A record, a plan and what decides a study are as they were before this stage was there."""
    config = study_config(tmp_path, tuning__descent={})
    said = json.dumps([choose(config, lead(config)).as_json(), budget.plan(config, 300, 1).as_json(), _decided(config)])
    assert "descent" not in said
    assert "varies" not in said


def _decided(config: Config) -> dict[str, Any]:
    return Study(config)._storage.decided() or {}


def test_what_the_record_says(whole: tuple[Config, list[Trial]]) -> None:
    config, trials = whole
    study = choose(config, trials).as_json()
    moves = study["descent"]["moves"]
    assert set(moves[0]) == {"name", "before", "after", "loss_before", "loss_after", "slot"}
    read = StudyRecord.model_validate(json.loads(json.dumps(study)))
    said = [line for line in remarks(read, []) if line.startswith("coordinate descent")]
    assert len(said) == len(moves)
    first = moves[0]
    assert said[0] == (
        f"coordinate descent, {study['descent']['count']} runs: {first['name']} from {first['before']:.3g} to "
        f"{first['after']:.3g} (×{first['after'] / first['before']:.3g}), loss {first['loss_before']:.4f} to "
        f"{first['loss_after']:.4f}"
    )
    assert with_name(study, LOSS) == study
    translated = with_name(study, BLEU)["descent"]["moves"][0]
    assert translated["bleu_after"] == 100 - first["loss_after"]
    assert outcome.descent_of(config, trials).ended == "rounds"


def test_the_plan_counts_it(tmp_path: Path) -> None:
    """Forty whole trials more: 16 steps each, of 4 that are halved and 4 repetitions."""
    with_it, without = (budget.plan(study_config(tmp_path, tuning__descent=s), 300, 1) for s in ({"trials": 40}, {}))
    assert with_it.tuning.tokens - without.tuning.tokens == 40 * 16 * 8 * 32
    assert with_it.most.tokens - without.most.tokens == 40 * 16 * 8 * 32
    line = budget.lines(study_config(tmp_path), with_it)[0]
    assert line.endswith("repetitions of the best with other seeds; then at most 40 of coordinate descent")


@pytest.mark.slow
def test_a_real_study(tmp_path: Path) -> None:
    """Two joint trials, two repetitions, at most five moves; killed by nobody, read by `transfer`."""
    space = {"lr": {"log_uniform": [1e-4, 1e-1]}, EMBEDDING: {"log_uniform": [0.25, 16.0]}}
    keys = {"tuning__search": space, "tuning__trials": 2, "tuning__descent": {"trials": 5}, "tuning__repeat_seeds": 2}
    path = pipeline_file(tmp_path, **keys, tuning__max_compute_share=100.0)
    result = mup("tune", path)
    assert result.returncode == 0, result.stderr
    assert "; then at most 5 of coordinate descent" in result.stdout
    record = json.loads((tmp_path / "run" / "transfer.json").read_text())
    study = record["study"]
    moved = [trial for trial in study["trials"] if trial["varies"]]
    assert 2 <= len(moved) == study["descent"]["count"] <= 5
    assert moved[0]["varies"] == EMBEDDING
    assert all(trial["state"] == "complete" for trial in moved)
    assert record["budget"]["descent"] == 5
    final = {**next(t["values"] for t in study["trials"] if t["slot"] == study["descent"]["start"])}
    for move in study["descent"]["moves"]:
        final[move["name"]] = move["after"]
    assert {name: record["values"][name] for name in final} == final
    assert "coordinate descent, " in mup("transfer", path).stdout
