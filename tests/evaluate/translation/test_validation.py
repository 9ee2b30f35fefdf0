"""training.eval_translations: BLEU while a model trains is that of its checkpoint, and what a trial is compared by."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.config import load_config
from mup_megatron.data.batches import build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.evaluate.evaluation import Evaluation, evaluate_translations
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train.run import train
from mup_megatron.util.errors import ConfigError
from tests.helpers.commands import mup
from tests.helpers.configs import make_t5
from tests.helpers.distributed import Ranks

ALIKE, OTHER = "one two three four five six", "one two three four seven eight"


class Recorder:
    """What a study hears of a trial."""

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}

    def step(self, step: int, loss: float) -> None:
        pass

    def evaluated(self, step: int, value: float) -> bool:
        self.heard[step] = value
        return True


def trained(rank: Rank, *, path: Path, watched: bool) -> tuple[dict[int, float], float | None]:
    recorder = Recorder()
    found = train(resolve(load_config(path), rank.world_size), rank, watcher=recorder if watched else None)
    return recorder.heard, found


def evaluated(rank: Rank, *, run: Path, file: str) -> dict[str, Any]:
    asked = Evaluation(checkpoint=run, rank=rank, batch_size=4)
    return evaluate_translations(asked, [file])["results"][0]["metrics"]


def config_file(folder: Path, **overrides: Any) -> Path:
    """Every source has the same target, but for a quarter of them, of which some are for validation."""
    folder.mkdir(exist_ok=True)
    lines = [{"source": str(i), "target": OTHER if i % 4 == 0 else ALIKE} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = {
        "pairs": {"jsonl": str(folder / "pairs.jsonl")},
        "tokenizer": {"library": "byte-level"},
        "split": "80,20,0",
        "dir": str(folder / "data"),
    }
    keys = {
        "training__train_steps": 30,
        "training__eval_interval": 15,
        "training__eval_steps": 1,
        "training__checkpoint_interval": 30,
        "training__eval_translations": 7,
        "tuning__objective": "bleu",
    }
    config = make_t5(run__dir=str(folder / "run"), data=data, **{**keys, **overrides})
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    return folder / "run.yaml"


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"tensor_model_parallel_size": 1},
    # Where the trained model cannot translate, a copy of it does.
    "ZeRO 3": {"tensor_model_parallel_size": 1, "zero_stage": 3},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "overlapped gather": {
        "tensor_model_parallel_size": 1,
        "engine": "megatron",
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_changes_nothing_else(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Losses with translations and without are the same to the last bit, with dropout."""
    parallel = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    curves = []
    for name, translated in (("with", 7), ("without", 0)):
        keys = {"model__hidden_dropout": 0.1, "training__eval_translations": translated, "tuning__objective": "loss"}
        short = {"training__train_steps": 6, "training__eval_interval": 3, "training__checkpoint_interval": 6}
        path = config_file(tmp_path / name, **parallel, **keys, **short)
        ranks.run(2, trained, path=path, watched=False)
        lines = [json.loads(line) for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
        assert sum("bleu" in line for line in lines) == (2 if translated else 0)
        curves.append([line[key] for line in lines for key in ("loss", "eval_loss") if key in line])
    assert len(curves[0]) == 8
    assert curves[0] == curves[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bleu_while_it_trains_is_the_checkpoints(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Of the validation pairs as text, by way of the checkpoint and `evaluate`; two replicas share them."""
    path = config_file(tmp_path, **{f"parallel__{key}": value for key, value in LAYOUTS[layout].items()})
    heard, found = ranks.run(2, trained, path=path, watched=False)[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [15, 30]
    config = load_config(path)
    valid = build_datasets(config, prepare(config))[1]
    tokenizer = valid.config.tokenizer
    with (tmp_path / "first.jsonl").open("w") as file:
        for sample in (valid[index] for index in range(7)):
            sides = (sample["text_enc"][sample["enc_mask"]], sample["labels"][sample["dec_mask"]])
            texts = [tokenizer.detokenize(side.tolist()[:-1]) for side in sides]
            file.write(json.dumps(dict(zip(("source", "target"), texts, strict=True))) + "\n")
    ((bleu),) = (ranks.run(1, evaluated, run=tmp_path / "run", file=str(tmp_path / "first.jsonl"))[0]["bleu"],)
    assert 20 < bleu < 95
    assert evaluations[-1]["bleu"] == pytest.approx(bleu)
    assert not heard
    assert found == evaluations[-1]["eval_loss"]  # of a run that nobody compares


@pytest.mark.slow
def test_trials_are_compared_by_it(ranks: Ranks, tmp_path: Path) -> None:
    keys = {"training__train_steps": 6, "training__eval_interval": 3, "training__checkpoint_interval": 6}
    for objective in ("bleu", "loss"):
        path = config_file(tmp_path / objective, tuning__objective=objective, **keys)
        ((heard, found),) = ranks.run(1, trained, path=path, watched=True)
        lines = [json.loads(line) for line in (tmp_path / objective / "run" / "metrics.jsonl").read_text().splitlines()]
        said = {line["step"]: line for line in lines if "eval_loss" in line}
        judged = {step: 100 - line["bleu"] if objective == "bleu" else line["eval_loss"] for step, line in said.items()}
        assert heard == judged
        assert found == judged[6]
        # A trial that goes on behind its end is heard of as before.
        assert ranks.run(1, trained, path=path, watched=True) == [(heard, found)]


@pytest.mark.slow
def test_a_study_tells_bleu(ranks: Ranks, tmp_path: Path) -> None:
    """In its lines and its record; the trial with the highest one is chosen."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "kv_channels": 8}
    keys = {"proxy": sizes, "tuning__trials": 3, "tuning__train_steps": 30, "tuning__max_compute_share": 10.0}
    search = {"lr": {"choice": [1e-6, 8e-3, 2e-6]}}
    path = config_file(tmp_path, **keys, tuning__search=search, tuning__sampler="grid", tuning__pruner="none")
    ranks.stop()
    result = mup("tune", path, "--nproc-per-node", "1")
    assert result.returncode == 0, result.stderr
    study = json.loads((tmp_path / "run" / "transfer.json").read_text())["study"]
    by_slot = {trial["slot"]: trial for trial in study["trials"] if not trial["repeats"]}
    for trial in study["trials"]:
        assert trial["bleu"] == pytest.approx(100 - trial["loss"])
        said = rf"trial-{trial['slot']:03d}\S* \(\d+/\d+\): BLEU {trial['bleu']:.2f} "
        assert re.search(said, result.stdout), result.stdout
    assert study["objective"] == "bleu"
    assert study["values"]["lr"] == 8e-3
    assert by_slot[study["slot"]]["bleu"] == max(trial["bleu"] for trial in by_slot.values()) > 20


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"training__eval_translations": 0},
            "tuning.objective: bleu needs pairs to translate; expected",
        ),
    ],
)
def test_what_cannot_be(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_file(tmp_path, **keys)
    assert sentence in str(error.value)
