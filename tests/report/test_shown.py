"""What is shown is what was trained: summaries, pictures, pages, remarks; and what is there stays what it is."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from rich.console import Console

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import check_folder
from mup_megatron.config import Config, load_config, parse_overrides
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import explain, shown_init
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.report import pictures
from mup_megatron.report.page import _search, write_page
from mup_megatron.report.pictures import draw_search, extent_of
from mup_megatron.report.run_data import read_run
from mup_megatron.report.summary import summarize, summary
from mup_megatron.tuning import budget
from mup_megatron.tuning.decide import apply_record
from mup_megatron.tuning.family import digest
from mup_megatron.tuning.objective import BLEU, with_name
from mup_megatron.tuning.outcome import Range, open_sides
from mup_megatron.tuning.record import StudyRecord, TransferRecord, write_record
from mup_megatron.tuning.recording import extrapolated
from mup_megatron.tuning.remarks import remarks, to_check
from mup_megatron.tuning.space import check_overrides
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers import bodies
from tests.helpers.commands import metrics, mup, next_commands
from tests.helpers.configs import HEAD_SIZE, MIXED, make
from tests.helpers.distributed import Ranks
from tests.helpers.records import study_of

ALONE = "parallel.tensor_model_parallel_size=1"


@pytest.fixture(scope="module")
def finished(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder, not to be changed."""
    return shutil.copytree(whole / "run", tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A finished run's folder of one's own."""
    return shutil.copytree(whole / "run", tmp_path / "run")


def tree(folder: Path) -> dict[str, str]:
    """Every file's content, but for locks, and pictures and pages, which are drawn anew."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".lock", ".png", ".html") and "data" not in path.parts
    }


def edited(folder: Path, edit: Callable[[dict[str, Any]], None], name: str = "explain.json") -> None:
    data = json.loads((folder / name).read_text())
    edit(data)
    (folder / name).write_text(json.dumps(data))


@pytest.mark.parametrize(("architecture", "said"), [("gpt3", "time"), ("t5", "time"), ("bert", "a [MASK]")])
def test_what_comes_next_takes_such_a_model(
    copied: Path, architecture: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(copied, lambda data: data["config"]["model"].update(architecture=architecture))
    summarize(copied, Console(width=400))
    report, generate = next_commands(capsys.readouterr().out)
    assert report == ["report", str(copied)]
    assert generate[:2] == ["generate", str(copied)]
    assert generate[2].endswith(said)


def test_what_comes_after_tuning(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target, where it has not begun; a run with a target has another next step."""
    then = "mup-megatron pipeline run.yaml 'run.name=a b'"
    summarize(copied, Console(width=400), then)
    assert next_commands(capsys.readouterr().out)[0][0] == "report"
    (copied / "metrics.jsonl").unlink()
    summarize(copied, Console(width=400), then)
    assert next_commands(capsys.readouterr().out)[0] == ["pipeline", "run.yaml", "run.name=a b"]


def rewritten(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """A record changed, its checksum right."""
    data = json.loads((folder / "transfer.json").read_text())
    data.pop("checksum")
    edit(data)
    write_record(folder / "transfer.json", {**data, "checksum": digest(data)})


def cut(folder: Path, steps: int) -> None:
    """As if the run had stopped there."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in kept))


def config_of(whole: Path, folder: Path, *words: str) -> Config:
    return load_config(whole / "run.yaml", parse_overrides([f"run.dir={folder}", *words]))


# What was trained with


def test_a_run_with_the_record_s_values(finished: Path) -> None:
    record = json.loads((finished / "transfer.json").read_text())
    data = summary(read_run(finished))
    assert data["columns"] == ["hyperparameter", "trained with", "tuned", "tried from", "to", "range", "interior"]
    rows = {row[0]: dict(zip(data["columns"], row, strict=True)) for row in data["values"]}
    assert rows["lr"]["trained with"] == rows["lr"]["tuned"] == f"{record['values']['lr']:.4g}"
    assert rows["lr"]["range"] == "0.001 to 0.03"
    assert (rows["init_method_std"]["trained with"], rows["init_method_std"]["tuned"]) == ("0.05", "")
    assert "proxy loss" in [row[0] for row in data["results"]]
    assert not any("did not train" in line for line in data["remarks"])


def test_betas_are_shown_where_they_were_tuned(copied: Path) -> None:
    """The target trained with 0.95; a drawn 1 - beta has more digits than a config's beta keeps."""
    assert not any(row[0].startswith("one_minus") for row in summary(read_run(copied))["values"])
    rewritten(copied, lambda data: data["values"].update(one_minus_beta2=0.05 + 1e-15))
    assert read_run(copied).others == {}
    rewritten(copied, lambda data: data["values"].update(one_minus_beta2=0.02, one_minus_momentum=0.1))
    assert read_run(copied).others == {"one_minus_beta2": 0.05}
    rewritten(copied, lambda data: data["values"].update(one_minus_momentum=0.04))
    assert read_run(copied).others == {"one_minus_beta2": 0.05, "one_minus_momentum": 0.1}


def test_a_run_beside_a_record_that_it_did_not_use(copied: Path) -> None:
    """As `train` leaves it: its own values are shown, and the study's losses are said to be of others."""
    edited(copied, lambda data: data["config"]["hparams"].update(lr=0.008))
    tuned = json.loads((copied / "transfer.json").read_text())["values"]["lr"]
    data = summary(read_run(copied))
    row = dict(zip(data["columns"], data["values"][0], strict=True))
    assert (row["hyperparameter"], row["trained with"], row["tuned"]) == ("lr", "0.008", f"{tuned:.4g}")
    results = dict(data["results"])
    assert "proxy loss of the tuned values" in results
    assert "proxy loss" not in results
    assert "tuning / target compute" not in results
    assert results["time"].startswith("tuning of the tuned values ")
    said = f"the target did not train with the values of the transfer record: lr 0.008 instead of {tuned:.4g}"
    assert said in data["remarks"]
    assert said in write_page(copied).read_text()
    # The control trained with the record's: the two are not compared.
    assert not any("nats lower" in line for line in data["remarks"])


@pytest.mark.parametrize("file", ["plan.json", "explain.json"])
def test_a_ladders_part_is_told(copied: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction beside what was reached, values before and after, and remarks: in the summary and on the page.

    Of `pipeline` they are in plan.json, of `train` in explain.json.
    """
    if file == "explain.json":
        (copied / "plan.json").unlink()
    reached = json.loads((copied / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    assert not any(row[0].startswith(("predicted", "lr over")) for row in summary(read_run(copied))["results"])
    told = {"predicted": {"loss": reached / 1.01, "error": 0.001}, "ladder": ["batch: a remark"]}
    assert mark_of(copied, monkeypatch) is None
    edited(copied, lambda data: data.update(told), file)
    edited(copied, lambda data: data.update(moved={"lr": [0.004, 0.002]}))
    data = summary(read_run(copied))
    results = dict(data["results"])
    assert results["predicted by the ladder"].endswith(f"; {reached:.4f} measured, +1.00 %, outside that interval")
    assert results["lr over batch and tokens"] == "0.004 → 0.002 (× 0.5)"
    assert "batch: a remark" in data["remarks"]
    page = write_page(copied).read_text()
    label = f"predicted by the ladder: {reached / 1.01:.4f} ± 0.0020"
    figures = json.loads(page.split("const figures = ")[1].split(";\n")[0])
    mark = figures["curves"]["data"][-1]
    assert (mark["name"], mark["x"], mark["y"], mark["error_y"]["array"]) == (label, [8], [reached / 1.01], [0.002])
    assert mark_of(copied, monkeypatch) == (label, 8, pytest.approx([reached / 1.01 - 0.002, reached / 1.01 + 0.002]))
    # A target that is not done is not held against it.
    cut(copied, 4)
    assert "measured" not in dict(summary(read_run(copied))["results"])["predicted by the ladder"]
    assert mark_of(copied, monkeypatch)[1] == 8  # where it will end
    edited(copied, lambda data: data.update(predicted={"why_not": "another text"}), file)
    assert mark_of(copied, monkeypatch) is None
    edited(copied, lambda data: data.update(predicted={"loss": "low"}), file)
    with pytest.raises(UserError, match=rf"{file}: damaged \(predicted\.loss"):
        read_run(copied)


def mark_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What loss.png shows of a prediction: label, step, both ends of the bar; None where it shows none."""
    found: list[Any] = []

    def look(figure: Any, path: Path) -> None:
        for drawn in figure.axes[0].containers:
            _, _, (bar,) = drawn
            (ends,) = bar.get_segments()
            found.append((drawn.get_label(), ends[0][0], [ends[0][1], ends[1][1]]))

    with monkeypatch.context() as patched:
        patched.setattr(pictures, "save_figure", look)
        pictures.draw_curves(read_run(folder))
    return found[0] if found else None


def test_a_run_without_a_record(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "transfer.json").unlink()
    data = summary(read_run(copied))
    assert data["columns"] == ["hyperparameter", "trained with"]
    assert ["init_method_std", "0.05"] in data["values"]
    assert data["results"][0][0] == "target loss"
    assert "trained with" in write_page(copied).read_text()


def test_values_on_the_command_line(whole: Path, finished: Path, tmp_path: Path) -> None:
    """An override of what the record says is refused, whether tuned or tuned with; one that says the same is none."""
    record = f"tuning.record={finished / 'transfer.json'}"
    tuned = json.loads((finished / "transfer.json").read_text())["values"]
    for key, value, how in (("lr", 1e-3, "tuned"), ("weight_decay", 0.0, "tuned with")):
        with pytest.raises(ConfigError) as error:
            apply_record(config_of(whole, tmp_path, record, f"hparams.{key}={value}"))
        said = str(error.value)
        assert f"hparams.{key}: {value} is given, and {finished / 'transfer.json'} says {tuned[key]} ({how})" in said
        assert "or `train tuning.run=never`, which trains with the values of hparams:" in said
        assert f"--allow-change hparams.{key}" in said
    same, _ = apply_record(config_of(whole, tmp_path, record, f"hparams.lr={tuned['lr']!r}"))
    assert same.hparams.lr == tuned["lr"]
    # What the file says is where tuning began, no override.
    assert apply_record(config_of(whole, tmp_path, record))[0].hparams.lr == tuned["lr"]
    with pytest.raises(ConfigError, match=r"hparams\.lr: 0\.001 is given, but tuning would take its place"):
        check_overrides(config_of(whole, tmp_path, "hparams={lr: 1e-3}"))
    check_overrides(config_of(whole, tmp_path, "hparams.weight_decay=0"))
    check_overrides(config_of(whole, tmp_path, "hparams.lr=1e-3"), ("hparams.lr",))


@pytest.mark.slow
def test_the_commands(whole: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`pipeline` refuses an override; allowed, it trains with it and with the rest of the record, and shows both."""
    record = f"tuning.record={finished / 'transfer.json'}"
    words = [str(whole / "run.yaml"), f"run.dir={tmp_path / 'run'}", record, ALONE, "hparams.lr=1e-3"]
    assert cli.run(["pipeline", *words]) == 2
    assert "hparams.lr: 0.001 is given, and" in capfd.readouterr().err
    assert not (tmp_path / "run" / "plan.json").exists()

    result = mup("pipeline", *words, "--allow-change", "hparams.lr")
    assert result.returncode == 0, result.stderr
    out = result.stdout
    tuned = json.loads((finished / "transfer.json").read_text())["values"]
    explained = json.loads((tmp_path / "run" / "explain.json").read_text())["config"]["hparams"]
    assert explained == {**tuned, "lr": 1e-3, "per_tensor": {}}
    assert f"hparams.lr: 0.001 as given, not {tuned['lr']} of the record (--allow-change)" in out
    assert "the target did not train with the values of the transfer record: lr 0.001 instead of" in " ".join(
        out.split()
    )


@pytest.mark.slow
def test_a_value_that_changed_on_the_way(whole: Path, copied: Path, ranks: Ranks) -> None:
    """--allow-change on a resume: who reads the page learns of it, at the step where it was."""
    words = [str(whole / "run.yaml"), f"run.dir={copied}", ALONE, "training.train_steps=9", "training.lr_decay_steps=8"]
    words += [
        f"hparams.{key}={value}"
        for key, value in json.loads((copied / "transfer.json").read_text())["values"].items()
        if value is not None and key != "lr"
    ]
    words += ["hparams.lr=1e-3", "--allow-change", "hparams.lr"]
    ((status, out, err),) = ranks.run(1, bodies.command, arguments=["train", *words])
    ranks.stop()
    assert status == 0, err
    lr = json.loads((copied / "transfer.json").read_text())["values"]["lr"]
    assert f"µP: hparams.lr changed from {lr} to 0.001 at step 8" in " ".join(out.split())
    newest = json.loads((copied / "checkpoints" / "step_00000009" / "mup.json").read_text())
    assert newest["changes"] == [{"step": 8, "key": "hparams.lr", "before": lr, "now": 1e-3}]


# What is there stays


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["training.global_batch_size=16"], "training.global_batch_size  8           16"),
        (["training.train_steps=6", "training.lr_decay_steps=8"], "training.train_steps: 6, but"),
        (["data.split='50,50,0'"], "data.split"),
        (["tuning.record=none.json"], "holds a target that trained with the values of hparams:"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_other_settings_in_a_finished_folder(
    whole: Path, copied: Path, capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    before = tree(copied)
    assert cli.run(["pipeline", str(whole / "run.yaml"), f"run.dir={copied}", ALONE, *words]) == 2
    err = capfd.readouterr().err
    assert sentence in err
    assert "Traceback" not in err
    assert tree(copied) == before


def test_a_study_that_was_copied(whole: Path, copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its journal came along, under the old folder's name: nothing is trained again, and the values are the same."""
    values = json.loads((copied / "transfer.json").read_text())["values"]
    (copied / "transfer.json").unlink()
    before = tree(copied / "tuning")
    assert cli.run(["tune", str(whole / "run.yaml"), f"run.dir={copied}", ALONE]) == 0
    assert "going on with a study of which" in capfd.readouterr().out
    assert json.loads((copied / "transfer.json").read_text())["values"] == values
    trials = {name: sum_ for name, sum_ in before.items() if name.startswith("trial-")}
    assert trials
    assert trials.items() <= tree(copied / "tuning").items()


def test_a_study_without_its_journal(whole: Path, copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its trials are not run over."""
    (copied / "transfer.json").unlink()
    for path in (copied / "tuning").glob("journal*"):
        path.unlink()
    before = tree(copied)
    assert cli.run(["tune", str(whole / "run.yaml"), f"run.dir={copied}", ALONE]) == 2
    assert "tuning: holds trials of a study that is not in tuning.storage under this name" in capfd.readouterr().err
    assert {name: sum_ for name, sum_ in tree(copied).items() if "journal" not in name} == before


def test_a_target_without_checkpoints(copied: Path) -> None:
    """Finished, it is as if it had one; unfinished, it starts again. With other settings neither is written over."""
    shutil.rmtree(copied / "checkpoints")
    settings = json.loads((copied / "explain.json").read_text())["config"]
    path = copied / "again.yaml"

    def again(lr: float) -> Config:
        path.write_text(yaml.safe_dump({**settings, "hparams": {**settings["hparams"], "lr": lr}}))
        return load_config(path, {"run.dir": str(copied)})

    for _ in range(2):
        assert check_folder(again(settings["hparams"]["lr"]))
        with pytest.raises(UserError, match=r"metrics\.jsonl: the checkpoint does not belong to this config"):
            check_folder(again(0.5))
        cut(copied, 5)
    assert check_folder(again(0.5), ["hparams.lr"])
    (copied / "metrics.jsonl").unlink()
    assert not check_folder(again(0.5))


# Half a run


def test_a_run_that_stopped_half_way(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(copied, 5)
    data = summary(read_run(copied))
    loss = next(line["eval_loss"] for line in metrics(copied) if "eval_loss" in line)
    assert ["target loss", f"{loss:.4f} at step 4, unfinished, 5 of 8 steps"] in data["results"]
    assert not any("nats lower" in line for line in data["remarks"])
    labels: list[str] = []

    def look(figure: Any, path: Path) -> None:
        labels.extend(text.get_text() for axis in figure.axes if axis.get_legend() for text in axis.get_legend().texts)

    monkeypatch.setattr(pictures, "save_figure", look)
    pictures.draw_curves(read_run(copied))
    assert labels[0] == f"µP: evaluation, last {loss:.4f} at step 4, unfinished, 5 of 8 steps"
    cut(copied, 2)
    assert dict(summary(read_run(copied))["results"])["target loss"].startswith("never evaluated, training loss ")
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text(
        "\n".join([*lines, json.dumps({**json.loads(lines[-1]), "loss": math.nan})]) + "\n"
    )
    assert dict(summary(read_run(copied))["results"])["target loss"].endswith(", diverged at step 2")


# Remarks

LOG = Range(low=1e-4, high=1e-1, log=True)


@pytest.mark.parametrize(
    ("value", "tried", "range_", "found"),
    [
        # Decades: 1e-4 ... 1e-1. From 1e-3 up 1.5 decades were tried, half a decade was not; below 1 of 1.
        (1e-3, [1e-4, 1e-3, 3.1623e-2], LOG, []),
        # Next to the highest that was tried; the range goes on 15 times further.
        (5e-3, [1e-4, 5e-3, 6.6e-3], LOG, ["above"]),
        (1e-3, [9e-4, 1e-3, 1e-1], LOG, ["below"]),
        (1e-3, [1e-3], LOG, ["below", "above"]),
        (0.2, [0.0, 0.2, 0.5], Range(low=0.0, high=1.0, log=False), ["above"]),
        (0.2, [0.0, 0.2, 0.7], Range(low=0.0, high=1.0, log=False), []),
    ],
)
def test_sides_that_are_open(value: float, tried: list[float], range_: Range, found: list[str]) -> None:
    assert ["above" if side.above else "below" for side in open_sides(value, tried, range_)] == found


TRIAL = study_of()["trials"][0]


def study(
    values: list[float],
    losses: list[float],
    repeated: dict[int, list[float]],
    noise: float | None,
    states: Mapping[int, str] = MappingProxyType({}),
) -> StudyRecord:
    """A record's study with one trial per value, some of them repeated; the first is the chosen one."""
    trials = [
        {**TRIAL, "slot": slot, "values": {"lr": value}, "loss": loss, "state": states.get(slot, "complete")}
        for slot, (value, loss) in enumerate(zip(values, losses, strict=True))
    ]
    candidates = [
        {
            "slot": slot,
            "losses": [losses[slot], *more],
            "mean": (losses[slot] + sum(more)) / (1 + len(more)),
            "within_noise": False,
        }
        for slot, more in repeated.items()
    ]
    parts = {"ranges": {"lr": LOG.model_dump()}, "trials": trials, "candidates": candidates, "noise": noise}
    return StudyRecord.model_validate(study_of({"lr": values[0]}, **parts))


def test_what_is_to_be_checked() -> None:
    """Of a choice in the middle of its range, repeated, nothing; of the same at an end, once, both."""
    losses: list[float] = [3.0, 4.0, 4.0]
    assert to_check(study([5e-3, 1e-4, 9e-2], losses, {0: [3.1]}, 0.1), []) == []
    found = to_check(study([5e-3, 1e-4, 1e-3], losses, {0: []}, None), ["tokens 10 times those of a trial"])
    assert [line.partition(":")[0].partition(",")[0] for line in found] == [
        "lr",
        "no repetition with other seeds",
        "extrapolated",
    ]


def test_what_is_said_of_a_range() -> None:
    losses: list[float] = [3.0, 4.0, 4.0]
    repeated: dict[int, list[float]] = {0: []}
    assert remarks(study([5e-3, 1e-4, 6.6e-3], losses, repeated, None), [])[0] == (
        "lr: 0.005 is next to the largest that was tried, 0.0066, and the range goes on to 0.1, where nothing was tried"
    )
    assert remarks(study([5e-3, 1e-4, 1e-3], losses, repeated, None), [])[0] == (
        "lr: 0.005 is the largest that was tried, and the range goes on to 0.1, where nothing was tried"
    )
    assert remarks(study([9e-2, 1e-4, 1e-3], losses, repeated, None), [])[0] == (
        "lr: 0.09 is at the upper end of the range that was searched; a wider one may hold better ones"
    )
    assert len(remarks(study([1e-3, 1e-4, 1e-1], losses, repeated, None), [])) == 1


def test_what_is_said_of_noise() -> None:
    """Only the chosen one was repeated, three runs in all: two standard errors are 2 · 0.05 · sqrt(1 + 1/3) = 0.115."""
    values, repeats = [1e-3, 1e-4, 1e-1], {0: [3.05, 2.95]}
    (said,) = remarks(study(values, [3.0, 3.11, 3.5], repeats, 0.05), [])
    assert said == (
        "within noise of the chosen trial "
        "(±0.0500 per run, from 2 repetitions; 2 of those compared ran once): trial-001"
    )
    (said,) = remarks(study(values, [3.0, 3.12, 3.5], repeats, 0.05), [])
    assert said == (
        "of the trials that ran to their end no other is within noise of the chosen one "
        "(±0.0500 per run, from 2 repetitions; 2 of those compared ran once)"
    )
    alone = study(values, [3.0, 3.12, 3.5], repeats, 0.05, {1: "stopped", 2: "stopped"})
    assert remarks(alone, []) == [
        "no other trial ran to its end, so none can be told from noise (±0.0500 per run, from 2 repetitions)"
    ]
    assert remarks(study(values, [3.0, 3.12, 3.5], {0: []}, None), []) == [
        "no repetition with other seeds: how much of a difference is noise is not known"
    ]


def test_a_hundred_times_the_tokens(
    whole: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`transfer` says how far the target leaves what was tuned on, and that is the record's word, not the config's."""
    words = [f"run.dir={tmp_path}", f"tuning.record={finished / 'transfer.json'}", ALONE, "training.train_steps=800"]
    # This config would tune at other lengths and batches; the record was tuned at 8 steps of 8 sequences of 32 tokens.
    words += ["tuning.train_steps=80", "tuning.global_batch_size=16"]
    assert cli.run(["transfer", str(whole / "run.yaml"), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "extrapolated, optimizer steps: tuned at 8, target at 800 (100 times)" in said
    assert "extrapolated, tokens: tuned at 2,048, target at 204,800 (100 times)" in said
    assert "batch" not in said
    assert cli.run(["transfer", str(whole / "run.yaml"), *words, "--json", "training.seq_length=64"]) == 0
    shown = json.loads(capsys.readouterr().out)["remarks"]
    assert "extrapolated, tokens per sequence: tuned at 32, target at 64 (2 times)" in shown
    found = TransferRecord.read(finished / "transfer.json", None)
    assert extrapolated(config_of(whole, tmp_path), found) == []


def test_a_guess_is_no_bound(tmp_path: Path) -> None:
    config = make(MIXED, "gpt3", run__dir=str(tmp_path), training__train_steps=64)
    said = budget.lines(config, budget.plan(config, 375, 1, measure=True))
    assert not any("at least" in line for line in said)
    assert said[1].endswith("  time, about")
    assert any(line.startswith("time: a guess from matrix products timed on this machine") for line in said)


def test_a_range_of_times_does_not_run_into_the_share(tmp_path: Path) -> None:
    """By hand: of 48 to 120 hours the one is 2 days and the other 5."""
    config = make(MIXED, "gpt3", run__dir=str(tmp_path))
    plan = budget.plan(config, 375, 1)
    target = replace(plan.target, hours=72.0, least=48.0, most=120.0)
    row = budget.lines(config, replace(plan, target=target))[3]
    assert re.split(" {2,}", row)[-2:] == ["1", "2 days to 5 days"]


def test_norms_that_start_from_ones(whole: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make(HEAD_SIZE, "llama")
    explained = explain(parametrize(config, 375), resolve_layout(config, 1))
    found = {parameter["name"]: parameter for parameter in explained["parameters"]}
    norm = found["decoder.final_layernorm.weight"]
    assert (norm["init"], shown_init(norm)) == ("ones", "ones")
    weight = found["decoder.layers.0.mlp.linear_fc2.weight"]
    assert weight["init"] == "normal"
    assert float(shown_init(weight)) == pytest.approx(weight["init_std"], rel=1e-3)
    bias = make(MIXED, "gpt3")
    tensors = {p["name"]: p for p in explain(parametrize(bias, 375), resolve_layout(bias, 1))["parameters"]}
    assert shown_init(tensors["decoder.final_layernorm.bias"]) == "zeros"
    assert shown_init(tensors["decoder.layers.0.self_attention.linear_qkv.bias"]) == "zeros"

    assert cli.run(["transfer", str(whole / "run.yaml"), f"run.dir={finished}", ALONE]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[2] for row in rows if row and row[0].startswith("decoder.final_layernorm")}
    assert shown == {"decoder.final_layernorm.weight": "ones", "decoder.final_layernorm.bias": "zeros"}
    page = write_page(finished).read_text()
    assert '<td class="number">ones</td>' in page


# Pictures


def test_bleu_is_shown_as_bleu(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 - 3.5 is 96.5; the best trial, whose number is the smallest, stands highest. Nothing is called a loss."""
    rewritten(copied, lambda data: data.update(study=with_name({**data["study"], "loss": 3.5}, BLEU)))
    run = read_run(copied)
    (row,) = (row for row in summary(run)["results"] if row[0].startswith("proxy"))
    assert row[0] == "proxy BLEU"
    assert row[1].startswith("96.50 ± ")
    shown: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> None:
        axis = figure.axes[0]
        drawn = [float(height) for line in axis.get_lines() if line.get_marker() == "o" for height in line.get_ydata()]
        shown.update(label=axis.get_ylabel(), limits=axis.get_ylim(), drawn=drawn)

    monkeypatch.setattr(pictures, "save_figure", keep)
    draw_search(run)
    assert shown["label"] == "proxy BLEU (higher is better)"
    trials = json.loads((copied / "transfer.json").read_text())["study"]["trials"]
    best = min(trial["loss"] for trial in trials if trial["state"] == "complete")
    assert max(shown["drawn"]) == pytest.approx(100 - best)
    assert shown["limits"][0] < 100 - best < shown["limits"][1]
    page = write_page(copied).read_text()
    assert "The proxy's BLEU over each hyperparameter" in html.unescape(page)
    assert "<th>BLEU</th>" in page
    assert f"BLEU {100 - best:.2f}" in page
    assert "proxy loss" not in page


def test_a_loss_beyond_the_picture_is_marked(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that is far off, and one without a number, stand at the edge with a ring about them, and no other has."""

    def off(data: Any) -> None:
        first, second = [trial for trial in data["study"]["trials"] if trial["state"] == "complete"][-2:]
        first.update(loss=50.0)
        second.update(loss=None, state="diverged")

    rewritten(copied, off)
    drawn: dict[str, int] = {}
    edges: list[float] = []

    def keep(figure: Any, path: Path) -> None:
        for line in figure.axes[0].get_lines():
            drawn[str(line.get_label())] = len(line.get_xdata())
            if line.get_label() == "worse than is shown":
                assert line.get_markerfacecolor() == "none"
                edges.extend([*map(float, line.get_ydata()), figure.axes[0].get_ylim()[1]])

    monkeypatch.setattr(pictures, "save_figure", keep)
    draw_search(read_run(copied))
    assert drawn["worse than is shown"] == 2
    assert drawn["diverged"] == 1
    assert edges[0] == edges[1] < edges[2] < 50


def test_pictures_draw_the_range(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 0.001 to 0.03 all is in the picture, however little of it was tried."""
    record = TransferRecord.expect(copied / "transfer.json", None)
    tried = [float(trial.values["lr"]) for trial in record.study.trials]
    extent = extent_of(record.study, "lr")
    assert extent is not None
    assert (extent.low, extent.high, extent.log) == (1e-3, 3e-2, True)
    assert extent.untried == [(1e-3, min(tried)), (max(tried), 3e-2)]
    limits: list[tuple[float, float]] = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: limits.extend(a.get_xlim() for a in figure.axes))
    draw_search(read_run(copied))
    assert limits[0][0] < 1e-3 < 3e-2 < limits[0][1]
    layout = _search(record.study, "lr")["layout"]
    low, high = layout["xaxis"]["range"]
    assert (layout["xaxis"]["type"], low < math.log10(1e-3), high > math.log10(3e-2)) == ("log", True, True)
    assert [(s["x0"], s["x1"]) for s in layout["shapes"] if s["type"] == "rect"] == extent.untried
