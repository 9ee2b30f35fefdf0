"""run.samples: what the model writes at evaluations is what `generate` writes from the checkpoint of the same step."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mup_megatron.config import parse_config
from mup_megatron.convert.saved_run import open_run
from mup_megatron.engines.setup import resolve
from mup_megatron.evaluate.generate import generate, load_model
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.check import Check
from mup_megatron.proof.coord_check import _asked
from mup_megatron.report.page import page
from mup_megatron.report.run_data import read_run
from mup_megatron.train.run import train
from mup_megatron.train.samples import NEW_TOKENS
from mup_megatron.tuning.space import proxy_config, values_of
from mup_megatron.util.errors import ConfigError, UserError
from tests.helpers import bodies
from tests.helpers.configs import MIXED, MOE, SIZES, make
from tests.helpers.distributed import Ranks

PROMPTS = ["def main(", "", "import os, sys; "]
KEYS: dict[str, Any] = {
    "data__split": "80,20,0",
    "training__train_steps": 4,
    "training__eval_interval": 2,
    "training__eval_steps": 1,
    "training__checkpoint_interval": 2,
    "training__checkpoints_kept": 9,
    # Hardly trained: after a few steps at a high rate every model writes spaces alone.
    "hparams__lr": 1e-3,
    "hparams__init_method_std": 0.3,
    "run__samples": PROMPTS,
}
MEGATRON = {"parallel__engine": "megatron"}
DEEPER = {"model": {**MIXED["model"], "num_layers": 4}, "base": MIXED["base"]}
CELLS: dict[str, tuple[int, dict[str, Any], str, dict[str, Any]]] = {
    "one process": (1, MIXED, "gpt3", {}),
    "TP 2 with sequence parallelism, ZeRO 3": (
        2,
        MIXED,
        "gpt3",
        {
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
            "parallel__zero_stage": 3,
        },
    ),
    "an interleaved pipeline, heads that predict further": (
        2,
        DEEPER,
        "llama",
        {
            **MEGATRON,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__virtual_pipeline_model_parallel_size": 2,
            "model__mtp_num_layers": 1,
        },
    ),
    "CP 2": (2, MIXED, "gpt3", {**MEGATRON, "parallel__context_parallel_size": 2}),
    "EP 2": (2, MOE, "llama", {"parallel__expert_model_parallel_size": 2}),
}


def trained(ranks: Ranks, folder: Path, world: int, *given: Any, **overrides: Any) -> Path:
    config = make(*given, **{**KEYS, "run__dir": str(folder / "run"), **overrides})
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    ranks.run(world, bodies.train_file, path=folder / "run.yaml")
    return folder / "run"


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def generated(_rank: Rank, *, checkpoint: Path) -> list[str]:
    """The most likely text from a checkpoint, by the decoder that keeps keys and values."""
    run = open_run(checkpoint)
    model, tokenizer = load_model(run, torch.device("cpu")), run.tokenizer
    room = [run.config.training.seq_length - max(1, len(tokenizer.tokenize(prompt))) for prompt in PROMPTS]
    return [
        "".join(token.text for token in generate(model, tokenizer, prompt, max_new_tokens=min(NEW_TOKENS, most)))
        for prompt, most in zip(PROMPTS, room, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS)
def test_they_are_what_generate_writes(ranks: Ranks, tmp_path: Path, cell: str) -> None:
    world, growth, architecture, overrides = CELLS[cell]
    run = trained(ranks, tmp_path, world, growth, architecture, **overrides)
    found = samples(run)
    assert [(line["step"], line["prompt"]) for line in found] == [(step, p) for step in (2, 4) for p in PROMPTS]
    for step in (2, 4):
        (expected,) = ranks.run(1, generated, checkpoint=run / "checkpoints" / f"step_{step:08}")
        assert [line["text"] for line in found if line["step"] == step] == expected
    assert len({line["text"] for line in found}) > 3
    assert all(len(set(line["text"])) > 5 for line in found)


@pytest.mark.slow
def test_training_is_the_same_without_them(ranks: Ranks, tmp_path: Path) -> None:
    """To the last bit, dropout and all."""
    losses = []
    for name, prompts in (("with", PROMPTS), ("without", [])):
        (tmp_path / name).mkdir()
        run = trained(ranks, tmp_path / name, 1, MIXED, model__hidden_dropout=0.1, run__samples=prompts)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([line.get("loss", line.get("eval_loss")) for line in lines])
        assert (run / "samples.jsonl").exists() == bool(prompts)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_a_resumed_run_writes_each_once(ranks: Ranks, tmp_path: Path) -> None:
    run = trained(ranks, tmp_path, 1, MIXED)
    whole = samples(run)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    ranks.run(1, bodies.train_file, path=tmp_path / "run.yaml")
    assert samples(run) == whole
    assert read_run(run).samples == whole
    shown = page(read_run(run), "")
    assert "What it wrote at step 4" in shown
    assert html.escape(whole[-1]["text"]) in shown


def test_a_prompt_that_leaves_no_room(tmp_path: Path) -> None:
    config = make(MIXED, **{**KEYS, "run__dir": str(tmp_path / "run"), "run__samples": ["short", "x = 1; " * 40]})
    message = r"run\.samples\.1: \d+ tokens leave no room for an answer; expected fewer than training\.seq_length, \d+"
    try:
        with pytest.raises(UserError, match=message):
            train(resolve(config, 1), Rank())
    finally:
        runtime.stop_distributed()


def test_without_evaluations_there_are_none() -> None:
    data = make(MIXED, **KEYS).model_dump()
    data["training"]["eval_interval"] = None
    with pytest.raises(ConfigError, match=r"run\.samples: are written at evaluations; expected training"):
        parse_config(data, "x.yaml")


def test_neither_a_trial_nor_a_check_writes_any(tmp_path: Path) -> None:
    config = make(MIXED, **KEYS, proxy=SIZES)
    assert proxy_config(config, values_of(config), seed=1, directory=tmp_path).run.samples == []
    _, family = _asked(config, Rank(), Check(factors=(1, 2), steps=3))
    assert [member.config.run.samples for member in family] == [[], []]
