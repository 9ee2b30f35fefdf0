"""docs/evidence: the settings in every record are those of a command that the pages print."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence import records
from mup_megatron import cli
from mup_megatron.cli.proof import _growth
from mup_megatron.config import Config, load_config, parse_overrides
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.proof.controls import control
from mup_megatron.proof.question import question
from tests.helpers.doc_commands import commands
from tests.helpers.links import ROOT

# Where a run lies is no setting of it, nor how a proxy would be tuned. configs/proof/experts.yaml has fitted itself to
# the processes since its records were made (`sequence_parallel: true`, which is off on one process).
_ELSEWHERE = {"run.dir", "run.name", "data.dir", "parallel.sequence_parallel"}
KINDS = ("stability", "coord-check", "ladder", "reverse")
RECORDS = {
    path: found
    for path, found in records.records()
    if "config" in found and not {"kernels", "repetitions"} & found.keys()
}


def flat(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A config's keys, dotted."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        inner = flat(value, f"{above}{key}.") if isinstance(value, dict) and value else {f"{above}{key}": value}
        found |= inner
    return found


class Command:
    """A printed command of `mup-megatron`, parsed."""

    def __init__(self, words: list[str]) -> None:
        self.kind = words[0]
        self.options: dict[str, Any] = cli._command().commands[words[0]].make_context(words[0], list(words[1:])).params
        overrides = parse_overrides(list(self.options["overrides"] or []))
        self.config: Config = load_config(ROOT / self.options["config"], overrides)

    def numbers(self, option: str) -> list[float]:
        return [float(word) for word in (self.options[option] or "").split(",") if word]


@cache
def printed() -> list[Command]:
    """Every command of the pages that writes a record with a config."""
    lines = itertools.chain.from_iterable(commands(page) for page in sorted(records.FOLDER.glob("*.md")))
    return [Command(words[1:]) for words in lines if words[0] == "mup-megatron" and words[1] in KINDS]


def kind_of(found: Mapping[str, Any]) -> str:
    keys = {"rungs": "ladder", "curves": "reverse", "lines": "stability"}
    return next((kind for key, kind in keys.items() if key in found), "coord-check")


def asked(command: Command, found: Mapping[str, Any]) -> dict[str, Any]:
    """What the command's options say of what the record holds."""
    options = command.options
    if command.kind == "stability":
        each = question(
            command.config,
            found["over"],
            options["across"],
            values=options["values"],
            factors=[int(factor) for factor in command.numbers("sizes")],
            seeds=options["seeds"],
            least=options["least"],
            others=options["compare"] or (None if options["beside"] else ()),
            growth=_growth(options["growth"] or []),
        )
        growth = {key: [str(by) for by in factors] for key, factors in each.growth.items()}
        size = next((size["size"] for size in found["sizes"] if size["factor"] == each.least), None)
        return {"values": list(each.values), "seeds": each.seeds, "factors": list(each.factors), "from": size,
                "lines": {command.config.parametrization.name, *each.compare_with}, "growth": growth}  # fmt: skip
    if command.kind == "coord-check":
        rate = LearningRateSchedule(command.config.training, command.config.hparams.lr)(options["steps"])
        factors = options["widths"] or options["growth"][0].partition("=")[2]
        return {"steps": options["steps"], "seeds": options["seeds"], "lr": pytest.approx(rate),
                "factors": [int(factor) for factor in factors.split(",")],
                "without": control(options["broken"]).taken_out if options["broken"] else ""}  # fmt: skip
    if command.kind == "ladder":
        axes = {axis: {int(factor) for factor in command.numbers(axis)} or {1} for axis in ("batch", "tokens", "width")}
        return {**axes, "seeds": options["seeds"], "steps": True, "over": options["over"]}
    return {"rates": command.numbers("rates"), "seeds": options["seeds"]}


def held(command: Command, found: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the record."""
    if command.kind == "stability":
        return {"values": found["values"], "seeds": found["seeds"],
                "factors": [size["factor"] for size in found["sizes"]],
                "from": found.get("from", found["sizes"][0]["size"]), "lines": set(found["lines"]),
                "growth": found.get("growth", {})}  # fmt: skip
    if command.kind == "coord-check":
        return {"steps": found["steps"], "seeds": found["seeds"], "lr": found["lr"],
                "factors": [size["factor"] for size in found["sizes"]],
                "without": found["judged"].partition(" without ")[2]}  # fmt: skip
    if command.kind == "ladder":
        axes = {axis: {rung[axis] for rung in found["rungs"]} for axis in ("batch", "tokens", "width")}
        enough = min(found["steps"].values()) >= command.options["min_steps"]
        return {**axes, "seeds": found["seeds"], "steps": enough, "over": found.get("over", "lr")}
    curves = found["curves"]
    return {"rates": sorted({curve["lr"] for curve in curves}), "seeds": len({curve["seed"] for curve in curves})}


def differences(command: Command, found: Mapping[str, Any]) -> dict[str, Any]:
    """What of the record the command would have made otherwise."""
    ours, theirs = flat(command.config.model_dump()), flat(found["config"])
    wrong = {
        key: (ours[key], value)
        for key, value in theirs.items()
        if key in ours and ours[key] != value and not _is_elsewhere(key) and not _same_files(key, ours[key], value)
    }
    one, other = asked(command, found), held(command, found)
    return wrong | {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def _is_elsewhere(key: str) -> bool:
    return key in _ELSEWHERE or key.startswith("tuning.")


def _same_files(key: str, patterns: Any, files: Any) -> bool:
    """Whether the files of a record are those that the command's patterns name."""
    return key == "data.files" and bool(files) and all(any(fnmatch(file, each) for each in patterns) for file in files)


def nearest(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of the command that comes nearest, what differs."""
    return min((differences(command, found) for command in printed() if asks_it(command, found)), key=len)


def asks_it(command: Command, found: Mapping[str, Any]) -> bool:
    """Whether a command asks what the record tells."""
    if command.kind != "stability" or kind_of(found) != "stability":
        return command.kind == kind_of(found)
    return found["over"] in command.options["over"].split(",") and found["across"] == command.options["across"]


@pytest.mark.parametrize("path", RECORDS)
def test_a_printed_command_made_the_record(path: str) -> None:
    assert nearest(RECORDS[path]) == {}


@pytest.mark.parametrize(
    ("path", "change", "key"),
    [
        ("optimizers/muon.json", {"values": [0.005, 0.01, 0.02]}, "values"),
        ("coord-check-gpt3/mup.json", {"lr": 0.002}, "lr"),
        ("reverse/reverse.json", {"config": {"training": {"train_steps": 200}}}, "training.train_steps"),
        ("coord-check-t5/mup-without-attention-scale.json", {"judged": "mup without epsilon"}, "without"),
        ("ladder/ladder.json", {"seeds": 2}, "seeds"),
        ("stability-lr-width/lr-width.json", {"lines": ["mup"]}, "lines"),
    ],
)
def test_another_setting_is_seen(path: str, change: dict[str, Any], key: str) -> None:
    found = json.loads(json.dumps(RECORDS[path]))
    for name, value in change.items():
        if name == "config":
            found["config"]["training"] |= value["training"]
        else:
            found[name] = value
    assert list(nearest(found)) == [key]


@pytest.mark.parametrize(("folder", "page"), [
    ("tuning-cost", "tuning-cost.md"), ("tuning-cost-target", "tuning-cost.md"), ("translation-cost", "translation.md"),
])  # fmt: skip
def test_printed_searches_made_the_tables(folder: str, page: str) -> None:
    """The points and the last step of each table are those of a printed `tune`, the target's of the second one."""
    words = [each[1:] for each in commands(records.FOLDER / page) if each[:2] == ["mup-megatron", "tune"]]
    tunes = [Command(each) for each in words]
    for table, tune in zip(records.record(f"{folder}/cost.json")["tables"], tunes, strict=False):
        space = {name: set(values.choice or ()) for name, values in tune.config.tuning.search.items()}
        assert {name: {point[name] for point in table} for name in space} == space
        steps = tune.config.tuning.train_steps or tune.config.training.train_steps
        assert {list(point["losses"])[-1] for point in table} == {str(steps)}


@pytest.mark.parametrize(
    ("record", "runs", "seeds"),
    [
        ("tuning-cost-llama", "tuning-cost-llama", [1, 2, 1]),
        ("tuning-cost-moe", "tuning-cost-moe", [1, 2, 1]),
        ("tuning-cost-sixteen", "sixteen/", [1, 2, 3, 1, 2, 2, 3, 3, 1, 1]),
    ],
)
def test_printed_searches_made_a_family_s_tables(record: str, runs: str, seeds: list[int]) -> None:
    """Those of the proxy, then the target's, then those between; and the replays have the printed seeds and budget."""
    found, page = records.record(f"{record}/cost.json"), commands(records.FOLDER / "tuning-cost.md")
    tunes = [Command(words[1:]) for words in page if words[:2] == ["mup-megatron", "tune"]]
    tunes = [tune for tune in tunes if runs in str(tune.config.run.dir)]
    assert [tune.config.run.seed for tune in tunes] == seeds
    for table, tune in zip(itertools.chain(*found["tables"].values()), tunes, strict=True):
        space = {name: set(values.choice or ()) for name, values in tune.config.tuning.search.items()}
        assert {name: {point[name] for point in table} for name in space} == space
        assert {list(point["losses"])[-1] for point in table} == {str(tune.config.training.train_steps)}
    (replayed,) = [words for words in page if "benchmarks.families" in words and words[-1].endswith(record)]
    assert replayed[replayed.index("--seeds") + 1] == str(found["seeds"])
    assert float(replayed[replayed.index("--budget") + 1]) == found["budget"]


def test_the_printed_command_made_the_limit() -> None:
    found = records.record("limit/limit.json")
    (words,) = [each for each in commands(records.FOLDER / "limit.md") if "benchmarks.limit" in each]
    path, *overrides = words[words.index("benchmarks.limit") + 1 : words.index("--sizes")]
    config = flat(load_config(ROOT / path, parse_overrides(overrides)).model_dump())
    # What the command resolves and sets itself.
    own = _ELSEWHERE | {"training.eval_interval"} | {key for key, value in config.items() if value == "auto"}
    held = flat(found["config"])  # a key that it lacks is younger than the record
    assert {key: held[key] for key, value in config.items() if key in held.keys() - own and held[key] != value} == {}
    assert words[words.index("--sizes") + 1] == ",".join(str(size["factor"]) for size in found["sizes"])
    assert words[words.index("--seeds") + 1] == str(found["seeds"])


def test_printed_options_made_the_replays() -> None:
    replays = {
        Path(words[words.index("--output") + 1]).name: int(words[words.index("--seeds") + 1])
        for page in ("tuning-cost.md", "translation.md")
        for words in commands(records.FOLDER / page)
        if "benchmarks.tuning_cost" in words
    }
    assert {name: records.record(f"{name}/cost.json")["seeds"] for name in replays} == replays
    assert len(replays) == 4
