"""The benchmarks run, and compare what they say they compare; what they measure is never tested."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks import families, harness, table, tuning_cost
from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning.record import BudgetRecord, StudyRecord, TransferRecord
from tests.helpers.commands import environment
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.helpers.records import BUDGET, study_of

VOCABULARY = 300
native = pytest.mark.skipif("native" in harness.absent(), reason=harness.absent().get("native", ""))


@pytest.mark.slow
def test_gpu_checks_run_on_a_cpu_too(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--quick"]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert len(result["checks"]) == 11
    assert all(check["passed"] for check in result["checks"].values())


def test_what_the_page_says_of_the_gpu_is_its_record(repository: Path) -> None:
    result = json.loads((harness.RESULTS / "gpu" / "checks-3.12.json").read_text())
    assert [check["passed"] for check in result["checks"].values()] == [True] * 9
    text = (repository / "docs" / "verification.md").read_text()
    assert f"On {result['provenance']['date']} an H100 ran the first nine" in text
    assert "H100" in result["provenance"]["gpus"][0]


def test_what_the_page_says_of_trials_is_its_record(repository: Path) -> None:
    """Two at a time against one, each the mean of two measurements that took turns."""
    rows = json.loads((repository / "benchmarks/results/trials/trials.json").read_text())["rows"]
    assert [row["at_once"] for row in rows] == [1, 2, 1, 2]
    one, two = (rows[first]["trials_per_hour"] + rows[first + 2]["trials_per_hour"] for first in (0, 1))
    said = " ".join((repository / "docs/tuning.md").read_text().split())
    assert "are about one and a half times as many an hour as one of two." in said
    assert 1.4 < two / one < 1.6


@pytest.mark.slow
def test_benchmarks_run(repository: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"], cwd=repository, check=True, capture_output=True, text=True
    )
    for what in ("gpt3, megatron, TP 2", "peak of tensors", "first step's end", "init", "explain"):
        assert what in result.stdout


@pytest.mark.slow
@needs_training
def test_a_script_runs_with_ours_and_without() -> None:
    """`measure` raises where a run logs another number of steps."""
    from benchmarks import script

    found = script.measure(1, steps=8)
    assert {name: each["runs"] for name, each in found["seconds_per_step"].items()} == {"ours": 1, "plain": 1}
    for name in ("ours", "plain"):
        assert 0 < 8 * found["seconds_per_step"][name]["min"] < found["seconds_per_process"][name]["min"]


@pytest.mark.slow
def test_the_loader_reads_from_the_disk(repository: Path) -> None:
    """Where pages were dropped each batch is read anew. In a process of its own, which starts the process groups."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tempfile.gettempdir()], capture_output=True, text=True, check=True)
    if kind.stdout.strip() == "tmpfs":
        pytest.skip("the temporary folder is in memory")
    code = "import json; from benchmarks.loader import measure; print(json.dumps(measure(2**18, 6, tiny=True)))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, check=True, capture_output=True, text=True, env=environment()
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    for each in found["disk_bytes_per_batch"].values():
        assert each["min"] >= 2 * found["batch_tokens"]
    # A page of 4 KiB or two a sample, and no reading ahead.
    assert found["disk_bytes_per_batch"]["disk"]["median"] <= 3 * 4096 * found["micro_batch_size"]
    assert found["seconds"]["disk"]["runs"] == 6


@pytest.mark.slow
def test_a_study_is_loaded_by_processes() -> None:
    """What they wrote down is what the study holds, and each trial has its operations timed."""
    from benchmarks.journal import compare

    (found,) = compare(["journal"], [3], 4.0)
    assert (found["storage"], found["processes"]) == ("journal", 3)
    assert found["trials"] > 0
    runs = {name: each["runs"] for name, each in found["seconds"].items()}
    assert runs == {"claim": found["trials"], "report": 4 * found["trials"], "end": found["trials"]}
    assert found["trials_per_second"] == pytest.approx(found["trials"] / 4, rel=0.5)


def test_native_is_absent_only_where_upstream_has_none() -> None:
    has = "use_mup" in {field.name for field in dataclasses.fields(TransformerConfig)}
    assert has == ("native" not in harness.absent())


def _range(least: float, most: float) -> dict[str, float]:
    return {"min": least, "max": most, "low": least, "high": most}


def test_where_a_median_lies() -> None:
    """Of nine: fewer than two heads in nine throws have a chance of 10/512, fewer than three one of 46/512."""
    assert harness.interval([9.0, 1.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0, 5.0]) == (2.0, 8.0)
    assert harness.interval([float(number) for number in range(harness.LEAST)]) == (0.0, 5.0)  # 1/64
    ratio = {"runs": 9, "low": 0.99, "high": 1.0}
    assert table.verdict(ratio) == "yes"
    assert table.verdict({**ratio, "runs": 5}) == "too few rounds"
    assert table.verdict({**ratio, "high": 1.02}) == "not told from the noise"
    assert table.verdict({**ratio, "low": 1.011, "high": 1.02}) == "no"


def test_quiet_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a hundred ticks 30, then 6, then 4 are taken."""
    times = iter([(0, 0), (30, 100), (30, 100), (36, 200), (36, 200), (40, 300)])
    monkeypatch.setattr(harness, "_processor_times", lambda: next(times))
    monkeypatch.setattr(harness, "_LOOK_SECONDS", 0.0)
    assert harness.wait_for_quiet() == 0.04
    assert [line.split(";")[0] for line in capsys.readouterr().out.splitlines()] == [
        "others take 30% of the processors",
        "others take 6% of the processors",
    ]


def test_ratios_are_taken_pair_by_pair() -> None:
    """A machine that slows down tenfold in the second round changes no ratio; medians over medians would say 2."""
    seconds = {"ours": [2.0, 20.0, 2.0], "plain": [1.0, 10.0, 1.0], "native": [1.0, 10.0, 100.0]}
    assert harness.ratios(seconds, "ours", "plain") == {"median": 2.0, **_range(2.0, 2.0), "runs": 3}
    assert harness.over(seconds)["native"] == {"median": 2.0, **_range(0.02, 2.0), "runs": 3}
    with pytest.raises(ValueError, match="shorter"):
        harness.ratios({"ours": [1.0, 1.0], "plain": [1.0]}, "ours", "plain")


def test_rounds_alternate_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    seconds = harness.alternate({name: lambda name=name: order.append(name) for name in "abc"}, runs=6, warmup=1)  # type: ignore[misc]
    rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert rounds == ["abc", "acb", "cab", "cba", "bca", "bac", "abc"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 6, "b": 6, "c": 6}


def compared(rank: Rank, *, engine: str, architecture: str) -> dict[str, Any]:
    from benchmarks import contenders, steps

    bench = contenders.start(VOCABULARY, engine, architecture, rank=rank, tiny=True)
    losses = {name: contenders.build(name, bench).step() for name in ("ours", "plain")}
    return {**steps.compare(bench, runs=2), "losses": losses}


@pytest.mark.parametrize(
    ("engine", "architecture", "tensor"),
    [
        ("megatron", "gpt3", 2),
        *[pytest.param("deepspeed", *cell, marks=pytest.mark.slow) for cell in (("gpt3", 1), ("llama", 2))],
        *([pytest.param("megatron", "moe", 1, marks=pytest.mark.slow)] if harness.has_plain_experts() else []),
    ],
)
def test_contenders_step_side_by_side(ranks: Ranks, engine: str, architecture: str, tensor: int) -> None:
    """Each at the loss of an even guess among 384 padded tokens, ln 384 = 5.95, or near it."""
    result = ranks.run(tensor, compared, engine=engine, architecture=architecture)[0]
    names = {"ours", "plain", "native"} - set(harness.absent())
    if (engine, architecture, tensor) != ("deepspeed", "gpt3", 1):
        names -= {"native"}
    assert (result["engine"], result["architecture"]) == (engine, architecture)
    assert all(5.5 < loss < 6.5 for loss in result["losses"].values())
    assert set(result["seconds_per_step"]) == names
    assert set(result["ours_over"]) == names - {"ours"}
    assert result["logits_multiplied_by"] == {
        "ours": 1.0,
        "plain": 1.0,
        **({"native": 0.25} if "native" in names else {}),
    }


def checkpoints_measured(_rank: Rank) -> dict[str, Any]:
    from benchmarks import checkpoints

    return checkpoints.measure(VOCABULARY, runs=2, tiny=True)


def test_checkpoints_are_written_in_both_ways(ranks: Ranks) -> None:
    """A run that waits stands still for all of it; the parts of the other way are those that it is said to have."""
    seconds = ranks.run(1, checkpoints_measured)[0]["seconds"]
    assert seconds["waiting"]["min"] > seconds["writing"]["min"] > 0
    parts = seconds["copying"]["min"] + seconds["finishing"]["min"]
    assert 0 < parts <= seconds["standing still"]["min"]
    assert {each["runs"] for each in seconds.values()} == {2}


def broken_native(_rank: Rank) -> tuple[float, float, list[str]]:
    """The native contender's multiplier, that of one whose multiplication was taken out, and what the check says."""
    from benchmarks import contenders
    from benchmarks.native import logits_multiplier
    from benchmarks.steps import check_logits

    contender = contenders.build("native", bench := contenders.start(VOCABULARY, tiny=True))
    whole = logits_multiplier(contender.model, contender.step)
    contender.model._scale_logits = lambda logits: logits
    broken = logits_multiplier(contender.model, contender.step)
    said = []
    for multiplier in (whole, broken):
        try:
            check_logits({"native": multiplier}, bench.width)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return whole, broken, said


@native
def test_native_multiplies_its_logits_and_the_check_would_notice_if_not(ranks: Ranks) -> None:
    whole, broken, said = ranks.run(1, broken_native)[0]
    assert whole == pytest.approx(0.25)
    assert broken == pytest.approx(1.0)
    assert said[0] == ""
    assert "logits are multiplied by" in said[1]


def groups_of_native(_rank: Rank) -> dict[str, tuple[float, float, float]]:
    from benchmarks import contenders
    from benchmarks.native import native_groups, native_model

    bench = contenders.start(VOCABULARY, tiny=True)
    model = native_model(bench.config, bench.vocabulary, bench.layout, bench.device)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = native_groups(model, bench.config)
    return {names[p]: (group["lr"], group["eps"], group["weight_decay"]) for group in groups for p in group["params"]}


@native
def test_native_has_its_own_rates(ranks: Ranks) -> None:
    """Width ratio 4, rate 1e-3, epsilon 1e-8, decay 0.1."""
    groups = ranks.run(1, groups_of_native)[0]
    assert groups["decoder.layers.1.mlp.linear_fc2.weight"] == pytest.approx((1e-3 / 4, 1e-8 / 4, 0.1))
    assert groups["embedding.word_embeddings.weight"] == pytest.approx((1e-3, 1e-8, 0.1))
    assert groups["decoder.layers.1.mlp.linear_fc2.bias"] == pytest.approx((1e-3, 1e-8, 0.0))


def tensor_peaks(_rank: Rank) -> list[float]:
    from benchmarks.memory import tensor_peak

    mebibyte = torch.zeros(2**18)

    def two_at_once() -> None:
        first = mebibyte + 1
        second = first + 1
        del first, second

    def one_at_a_time() -> None:
        for _ in range(2):
            made = mebibyte + 1
            del made

    return [tensor_peak(two_at_once), tensor_peak(one_at_a_time)]


def kept_bytes(_rank: Rank) -> dict[str, int]:
    """What autograd keeps of a step for the backward pass, views counted once."""
    from benchmarks import contenders

    bench, kept = contenders.start(VOCABULARY, tiny=True), {}
    for name in ("ours", "plain"):
        contender = contenders.build(name, bench)
        storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

        def keep(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            contender.step()
        kept[name] = sum(storage.nbytes() for storage in storages.values())
    return kept


def test_a_step_keeps_no_more_than_plain(ranks: Ranks) -> None:
    kept = ranks.run(1, kept_bytes)[0]
    assert kept["ours"] <= kept["plain"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts tensors on the CPU")
def test_tensors_are_counted_exactly(ranks: Ranks) -> None:
    assert ranks.run(1, tensor_peaks)[0] == pytest.approx([2.0, 1.0], abs=0.001)  # and the scalar's few bytes


def test_resident_peak_starts_anew() -> None:
    """In a process of its own, which had 200 MiB before: they do not count."""
    program = (
        "from benchmarks.memory import *; x = bytearray(200 * 2**20); x[:] = b'1' * len(x); del x;"
        "before = clear_resident_peak(); y = b'1' * (50 * 2**20); print(resident_peak() - before)"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert 45 < float(said) < 70


def _spread(median: float, runs: int = 3) -> dict[str, float]:
    return {"median": median, "min": median / 2, "max": median * 2, "runs": runs}


def _ratio(median: float, half: float) -> dict[str, float]:
    return {**_spread(median, 9), "low": median - half, "high": median + half}


def test_table_says_what_the_json_says(tmp_path: Path) -> None:
    names = ("ours", "plain")
    phases = ("upstream_imports", "our_imports", "build", "first_step", "total")
    result: dict[str, Any] = {
        "machine": {"date": "2030-01-02", "cores": 2, "processor": "P", "gpus": [], "python": "3.11.7", "versions": {}},
        "busy": {"before": 0.04, "after": 0.25},
        "absent": {"native": "too old"},
        "steps": [
            {
                "vocabulary": 7,
                "architecture": "gpt3",
                "engine": "deepspeed",
                "layout": "TP 1",
                "precision": "fp32",
                "num_layers": 1,
                "hidden_size": 8,
                "base_hidden_size": 2,
                "seq_length": 4,
                "micro_batch_size": 3,
                "seconds_per_step": {"ours": _spread(0.25), "plain": _spread(0.125)},
                "ours_over": {"plain": _ratio(2.0, 0.5)},
                "cpu_ours_over": {"plain": _ratio(1.5, 0.25)},
                "plain_again_over_plain": _ratio(1.0, 0.125),
            }
        ],
        "first_steps": [
            {
                "vocabulary": 7,
                "seconds": {name: {phase: _spread(4.0) for phase in phases} for name in names},
                "seconds_ours_over": {"plain": _spread(1.5)},
                "peak_mebibytes": {kind: {name: _spread(64, 1) for name in names} for kind in ("tensors", "resident")},
                "peak_ours_over": {kind: {"plain": _spread(1.25, 1)} for kind in ("tensors", "resident")},
            }
        ],
        "init": {
            "weight": "w",
            "seconds_per_billion": {"ours": _spread(6.0), "torch": _spread(3.0)},
            "ours_over": {"torch": _spread(2.0)},
        },
        "explain": {
            "c.yaml": {
                "processes": 128,
                "seconds": _spread(5.0, 1),
                "cpu_seconds": _spread(4.0, 1),
                "peak_mebibytes": _spread(400.0, 1),
            }
        },
        "imports": {
            "seconds": _spread(3.5, 1),
            "cpu_seconds": _spread(2.5, 1),
            "peak_mebibytes": _spread(300.0, 1),
        },
    }
    assert harness.write(result, tmp_path) == tmp_path / "cpu-3.11.json"
    text = table.write(tmp_path).read_text()
    rows = text.splitlines()
    assert "No native: too old." in rows
    assert (
        "| gpt3, deepspeed, TP 1, vocabulary 7 | 9 | 0.125 | 2.000 [1.500, 2.500] | 1.500 [1.250, 1.750] "
        "| 1.000 [0.875, 1.125] | no |"
    ) in rows
    assert "| peak of tensors, MiB, vocabulary 7 | 64 | 64 | 1.250 |" in rows
    assert "| c.yaml | 128 | 5.00 | 4.00 | 400 |" in rows
    assert [row.split("; the goal")[0] for row in rows[rows.index("Goals that are missed:") + 2 :] if row] == [
        "- A step of gpt3, deepspeed, TP 1, vocabulary 7: 2.000 [1.500, 2.500] of plain's",
        "- Start-up with vocabulary 7: 1.500 (0.750 to 3.000) of plain's",
        "- `explain` takes up to 4.00 s of CPU",
    ]
    assert text.rstrip().endswith("importing what builds it takes 2.50 s by itself.")
    met = copy.deepcopy(result)
    met["steps"][0]["ours_over"]["plain"] = _ratio(0.5, 0.125)
    met["first_steps"][0]["seconds_ours_over"]["plain"] = _spread(1.0)
    met["explain"]["c.yaml"]["cpu_seconds"] = _spread(2.0, 1)
    assert table.one(met).rstrip().endswith("No goal is missed.")
    assert "2030-01-02" in text
    columns = {row.count("|") for row in rows if "MiB, vocabulary" in row or row.startswith("| — build")}
    assert columns == {5}


def test_a_script_has_a_table_of_its_own(tmp_path: Path) -> None:
    """Behind the others; a step has a goal, and the whole process none."""
    ratios = {"step": _ratio(1.0, 0.005), "process": _ratio(1.25, 0.25)}
    result = {
        "machine": {"date": "2030-01-02", "python": "3.12.1", "versions": {"torch": "9.9"}},
        "busy": 0.04,
        "num_layers": 1,
        "hidden_size": 8,
        "vocabulary": 7,
        "steps": 40,
        **{f"seconds_per_{kind}": {"plain": _spread(0.125)} for kind in ratios},
        "ours_over": ratios,
        "plain_again_over_plain": ratios,
    }
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "3.12.json").write_text(json.dumps(result))
    rows = table.page(tmp_path).splitlines()
    assert "## A script under `mup-megatron run`, Python 3.12.1" in rows
    assert "| a step | 9 | 0.125 | 1.000 [0.995, 1.005] | 1.000 [0.995, 1.005] | yes |" in rows
    assert "| from start to end | 9 | 0.125 | 1.250 [1.000, 1.500] | 1.250 [1.000, 1.500] |  |" in rows


def test_committed_table_is_made_from_the_committed_results(repository: Path) -> None:
    folder = repository / "benchmarks" / "results"
    assert (folder / "README.md").read_text() == table.page(folder), "run ./dev bench --table"


def test_committed_results_say_where_they_come_from(repository: Path) -> None:
    for path in (repository / "benchmarks" / "results").glob("*.json"):
        assert {"date", "cores", "versions"} <= set(json.loads(path.read_text())["machine"]), path


def grid_record(*also: str) -> TransferRecord:
    """Of a study that went through a grid: the loss is the distance to lr 1e-2, and falls with the steps.

    Args:
        also: hyperparameters that had the rate's values.
    """
    trial = study_of()["trials"][0]
    trials = [
        {
            **trial,
            "values": dict.fromkeys(("lr", *also), lr),
            "reports": {str(step): loss(lr, step) for step in (4, 8, 12, 16)},
        }
        for lr in LR
    ]
    study = StudyRecord.model_validate(study_of(dict.fromkeys(("lr", *also), 0.01), trials=trials))
    budget = BudgetRecord.model_validate({"spent": {**BUDGET["spent"], "flops": 17e9}})
    return TransferRecord.model_construct(tuned=["lr", *also], study=study, budget=budget)


LR = [10 ** (-3 + power / 8) for power in range(17)]


def loss(lr: float, step: int) -> float:
    return 5 + abs(math.log(lr / 0.01)) - 0.01 * step


def test_a_table_of_runs_is_looked_up_at_its_nearest_point() -> None:
    table = tuning_cost.Table.of(grid_record())
    assert (table.flops, table.best, list(table.steps)) == (1e9, loss(0.01, 16), [4, 8, 12, 16])
    assert table.loss({"lr": LR[3] * 1.1}, 8) == loss(LR[3], 8)
    assert table.loss({"lr": LR[3] * 1.2}, 8) == loss(LR[4], 8)
    with pytest.raises(SystemExit, match="lacks 272 of its points"):
        tuning_cost.Table.of(grid_record("output_multiplier"))


def test_a_replayed_search_pays_for_the_steps_it_ran() -> None:
    """Only the best of 17 rates is within half a percent; halving finds the same trial for less."""
    table = tuning_cost.Table.of(grid_record())
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__train_steps=16, tuning__search={})
    whole, halved = (
        tuning_cost.until_arrived(config, table, table, tuning_cost.METHODS[name], 1, 400)
        for name in ("random", "random, halving")
    )
    assert whole[-1][1] == halved[-1][1] == table.best
    assert whole[-1][0] == int(whole[-1][0])
    assert halved[-1][0] < 0.8 * whole[-1][0]
    assert [loss for _, loss in whole] == sorted((loss for _, loss in whole), reverse=True)


Grid = dict[tuple[float, ...], Sequence[float]]


def test_a_search_has_arrived_where_its_values_stay_good() -> None:
    """It was within the bound at a cost of 2, left at 3, came back at 5; one that leaves last has not arrived."""
    search = [(1.0, 6.0), (2.0, 5.0), (3.0, 5.2), (5.0, 5.05), (7.0, 5.0)]
    assert families.stays(search, 5.1) == 5.0
    assert families.stays(search[:3], 5.1) is None
    assert families.stays(search, 7.0) == 1.0


def test_a_search_sees_one_seed_and_is_judged_by_the_mean() -> None:
    """The second seed's best rate is a grid step higher; what it finds is told with the mean loss of both seeds."""
    first = tuning_cost.Table.of(grid_record())
    moved: Grid = {(LR[(place + 1) % 17],): first.losses[(LR[place],)] for place in range(17)}
    second = tuning_cost.Table(first.values, first.steps, moved, first.flops)
    mean = tuning_cost.Table.mean([first, second])
    assert mean.losses[(LR[8],)][-1] == pytest.approx((loss(LR[8], 16) + loss(LR[7], 16)) / 2)
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__train_steps=16, tuning__search={})
    method = tuning_cost.Method("random")
    stage = families.Stage([first, second], unit=1.0, budget=60)
    (search,) = families.judged(config, [stage], {"mean": mean}, method, seed=1).values()
    assert search[-1][1] == mean.losses[(LR[9],)][-1] != second.best
    assert search[-1][0] <= 60


def test_a_telescoping_search_stays_about_what_the_narrower_width_gave() -> None:
    """At the wider one, a run of which costs 3, the best rate of all is ten times off, where it does not look."""
    narrow = tuning_cost.Table.of(grid_record())
    far: Grid = {**narrow.losses, (LR[0],): [1.0] * 4}
    wide = tuning_cost.Table(narrow.values, narrow.steps, far, 3 * narrow.flops)
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__train_steps=16, tuning__search={})
    stages = [families.Stage([narrow], unit=1.0, budget=20), families.Stage([wide], unit=3.0, budget=120)]
    found = list(families.searched(config, stages, tuning_cost.Method("random"), 1))
    assert [cost for cost, _ in found] == [*range(1, 21), *range(23, 141, 3)]
    assert found[19][1] == found[20][1]  # the wider one begins there
    assert min(abs(math.log(values["lr"] / LR[0])) for _, values in found[20:]) > math.log(2)
    assert wide.loss(found[-1][1], 16) == narrow.best
    alone = list(families.searched(config, stages[1:], tuning_cost.Method("random"), 1))
    assert wide.loss(alone[-1][1], 16) == 1.0


def test_a_search_on_the_target_costs_what_the_target_does() -> None:
    table = tuning_cost.Table.of(grid_record())
    tables = {"proxy": [table], "target": [table], "wider": [table, table]}
    known = families.jobs(tables, {"target": [16.0], "wider": [2.0, 4.0]}, budget=30)
    assert known["TPE, on the target"][0] == [families.Stage([table], 16.0, 480.0)]
    assert known["TPE"][0] == [families.Stage([table], 1.0, 30.0)]
    assert [(stage.unit, stage.budget) for stage in known["TPE, halving, telescoping"][0]] == [
        (1, 10),
        (2, 10),
        (4, 10),
    ]
    assert not [
        name
        for name in families.jobs({"proxy": [table], "target": [table]}, {}, budget=30)
        if name.endswith("on the target")
    ]


def test_a_later_seed_may_have_only_what_is_near_the_best() -> None:
    first = tuning_cost.Table.of(grid_record())
    near: Grid = {(LR[8],): [each + 1 for each in first.losses[(LR[8],)]]}
    later = tuning_cost.Table({"lr": [LR[8]]}, first.steps, near, first.flops)
    mean = tuning_cost.Table.mean([first, later])
    assert mean.losses[(LR[8],)][-1] == pytest.approx(loss(LR[8], 16) + 0.5)
    assert mean.losses[(LR[7],)] == first.losses[(LR[7],)]
    known = families.jobs({"proxy": [first], "target": [first, later]}, {"target": [16.0, 16.0]}, budget=30)
    assert known["TPE, on the target"][0][0].tables == [first]  # a search needs a whole one


def test_a_search_of_the_rate_alone_keeps_the_other_values() -> None:
    table = tuning_cost.Table.of(grid_record())
    both: Grid = {(*point, std): losses for point, losses in table.losses.items() for std in (0.02, 0.08)}
    both |= {(*point, 0.08): [each + 1 for each in losses] for point, losses in table.losses.items()}
    values = {"lr": LR, "init_method_std": [0.02, 0.08]}
    wide = tuning_cost.Table(values, table.steps, both, 1.0)
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__train_steps=16, tuning__search={})
    with pytest.raises(SystemExit, match="says nothing of the fixed init_method_std"):
        next(tuning_cost.replay(config, wide, tuning_cost.Method("random", fixed={"init_method_std": 0.09}), 1))
    method = tuning_cost.Method("random", fixed={"init_method_std": 0.08})
    found = list(tuning_cost.replay(config, wide, method, 1, budget=100))
    assert {tried["init_method_std"] for _, tried in found} == {0.08}
    assert wide.loss(found[-1][1], 16) == table.best + 1
    assert wide.best_point == {"lr": pytest.approx(0.01), "init_method_std": 0.02}


def test_trials_that_began_together_are_paid_for_together() -> None:
    """Eight workers: the search has cost whole rounds of eight when it has found something."""
    table = tuning_cost.Table.of(grid_record())
    config = make(MIXED, "gpt3", proxy={"hidden_size": 64}, tuning__train_steps=16, tuning__search={})
    found = list(tuning_cost.replay(config, table, tuning_cost.Method("random", workers=8), 1, budget=40))
    assert found
    assert all(cost % 8 == 0 for cost, _ in found)
