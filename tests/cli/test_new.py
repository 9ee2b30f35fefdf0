"""`mup-megatron new`: the folder that it writes, with sizes worked out by hand, runs as it is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from mup_megatron import cli
from mup_megatron.cli import start
from mup_megatron.config import Config, load_config
from mup_megatron.config.model import FAMILIES
from mup_megatron.config.reference import START
from mup_megatron.data.corpus import Corpus
from mup_megatron.tuning.space import tuning_steps
from tests.helpers.commands import BIN, losses, run


def new(folder: Path, *words: str) -> Config:
    assert cli.run(["new", str(folder), *words]) == 0
    return load_config(folder / "config.yaml")


@pytest.mark.parametrize(
    ("words", "target", "proxy"),
    [
        # Llama 3 8B: heads of 128, four query heads per KV head, so four heads at least; 14336 / 4096 = 1792 / 512.
        (
            "--hidden-size 4096 --num-layers 32 --heads 32 --kv-heads 8 --ffn-hidden-size 14336 --train-steps 100000",
            {"hidden_size": 4096, "num_attention_heads": 32, "head_size": 128, "ffn_hidden_size": 14336},
            {"hidden_size": 512, "num_attention_heads": 4, "num_query_groups": 1, "ffn_hidden_size": 1792},
        ),
        # GPT-3 6.7B: heads of 128; two of them make the paper's width of 256.
        (
            "--architecture gpt3 --hidden-size 4096 --num-layers 32",
            {"hidden_size": 4096, "num_attention_heads": 32, "head_size": 128, "ffn_hidden_size": 16384},
            {"hidden_size": 256, "num_attention_heads": 2, "ffn_hidden_size": 1024},
        ),
        # A Llama of width 1024: 16 heads of 64; its FFN is 8/3 of the width, 2731, to a multiple of 64: 43 * 64.
        (
            "",
            {"hidden_size": 1024, "num_attention_heads": 16, "head_size": 64, "ffn_hidden_size": 2752},
            {"hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 688},
        ),
        # As narrow as the paper's proxy itself: a quarter of it, one head of 64.
        (
            "--hidden-size 256 --architecture gpt3",
            {"hidden_size": 256, "num_attention_heads": 4, "head_size": 64, "ffn_hidden_size": 1024},
            {"hidden_size": 64, "num_attention_heads": 1, "ffn_hidden_size": 256},
        ),
    ],
    ids=["llama-8b", "gpt3-6.7b", "default", "narrow"],
)
def test_sizes(tmp_path: Path, words: str, target: dict[str, int], proxy: dict[str, int]) -> None:
    config = new(tmp_path / "run", *words.split())
    assert {key: getattr(config.model, key) for key in target} == target
    for sizes in (config.base, config.proxy):
        assert {key: value for key, value in sizes.model_dump().items() if value is not None} == proxy


def commented(text: str) -> dict[str, str]:
    """Keys with a comment behind them, by dotted path, with the comment."""
    found, above = {}, [""] * 3
    for line in text.splitlines():
        if key := re.match(r"(?P<indent> *)(?P<name>\w+):(?P<value>.*?)(?: +# (?P<said>.*))?$", line):
            depth = len(key["indent"]) // 2
            above[depth:] = [key["name"]] * (3 - depth)
            if key["said"]:
                found[".".join(above[: depth + 1])] = key["said"]
    return found


def test_no_key_says_its_default(tmp_path: Path) -> None:
    """Of a large batch a trial's is smaller, and the others are left out."""
    for batch, named in ((32, set()), (1024, {"global_batch_size", "micro_batch_size"})):
        config = new(tmp_path / str(batch), "--batch", str(batch), "--train-steps", "1000")
        said = yaml.safe_load((tmp_path / str(batch) / "config.yaml").read_text())
        assert named == said["tuning"].keys() & {"train_steps", "global_batch_size", "micro_batch_size"}
        for section in ("model", "training", "tuning", "hparams"):
            kind = type(getattr(config, section))
            defaults = {key: field.get_default(call_default_factory=True) for key, field in kind.model_fields.items()}
            assert not [
                key
                for key, value in said[section].items()
                if value == defaults[key] and f"{section}.{key}" not in START
            ]


def test_ten_keys_are_commented(tmp_path: Path) -> None:
    """Those that `config --start` shows, in its words; without text of one's own `data.corpus` is in the place."""
    (tmp_path / "my.txt").write_text("Words.\n")
    new(tmp_path / "own", "--text", str(tmp_path / "my.txt"))
    text = (tmp_path / "own" / "config.yaml").read_text()
    assert commented(text) == START
    assert max(map(len, text.splitlines())) <= 120
    new(tmp_path / "stdlib", "--architecture", "gpt3")
    others = commented((tmp_path / "stdlib" / "config.yaml").read_text())
    assert list(others) == ["data.corpus" if key == "data.files" else key for key in START]


def test_trials_are_shorter_than_a_long_run(tmp_path: Path) -> None:
    """Tensor Programs V: 5000 steps at least; ours is a tenth of the target's where that is more."""
    for steps, expected in ((1000, 1000), (20_000, 5000), (100_000, 10_000)):
        config = new(tmp_path / str(steps), "--train-steps", str(steps), "--hidden-size", "2048")
        assert tuning_steps(config) == expected
        assert (config.tuning.train_steps is None) == (steps == expected)
        assert config.training.lr_warmup_steps == steps // 50


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hidden-size 100 --heads 3", "--heads: 3 does not divide --hidden-size 100"),
        ("--heads 16 --kv-heads 3", "--kv-heads: 3 does not divide --heads 16"),
        ("--heads 1", "--heads: no proxy is narrower than 1024 with heads of 1024 elements"),
        ("--text missing.txt", "--text: no such file: missing.txt"),
        ("--hidden-size 0", "Invalid value for '--hidden-size'"),
        ("--hidden-size 100000000000", "Invalid value for '--hidden-size'"),
        ("--architecture bert", "Invalid value for '--architecture'"),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    folder = tmp_path / "run"
    assert cli.run(["new", str(folder), *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not folder.exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    assert cli.run(["new", str(tmp_path)]) == 2
    assert "is there already; expected a new or an empty folder" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


def test_it_knows_every_architecture_of_gpt_models() -> None:
    """The command line names them again: it must not load the schema to show its help."""
    offered = get_args(get_type_hints(start.new)["architecture"])
    assert offered == tuple(name for name, family in FAMILIES.items() if family == "gpt")


def test_a_folder_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named in the config as a folder; an empty one is refused."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    assert cli.run(["new", str(tmp_path / "run"), "--text", str(tmp_path / "texts")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("/texts: holds no text; expected files that end with .txt, .md, .jsonl or .json")
    assert not (tmp_path / "run").exists()
    (tmp_path / "texts" / "more" / "b.txt").write_text("")
    assert cli.run(["new", str(tmp_path / "run"), "--text", str(tmp_path / "texts")]) == 2
    assert capsys.readouterr().err.endswith("/texts: holds no text\n")
    assert not (tmp_path / "run").exists()
    (tmp_path / "texts" / "more" / "b.txt").write_text("Words.\n")
    (tmp_path / "texts" / "a.md").write_text("More words.\n")
    config = new(tmp_path / "run", "--text", str(tmp_path / "texts"))
    assert config.data.files == ["../texts"]
    monkeypatch.chdir(tmp_path / "run")
    assert [path.read_text() for path in Corpus(config).files] == ["More words.\n", "Words.\n"]


def test_own_text_is_found_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "it's mine: all.txt"
    text.write_text("Words.\n")
    config = new(tmp_path / "a" / "run", "--text", str(text))
    monkeypatch.chdir(tmp_path / "a" / "run")
    assert [Path(file).read_text() for file in config.data.files] == ["Words.\n"]


def test_what_comes_next_is_typed_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a shell, from the folder where it was printed, with a blank in the folder's name; but not the training."""
    assert cli.run(["new", str(tmp_path / "my run")]) == 0
    lines = capsys.readouterr().out.partition("Next:\n")[2].splitlines()
    assert [line.split("#")[0].split()[1:] for line in lines[1:]] == [
        [command, "config.yaml"] for command in ("plan", "explain", "pipeline")
    ]
    typed = "\n".join(["set -e", lines[0], lines[2].replace("explain", "explain --json")])
    ran = run("bash", "-c", typed)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["config"]["model"]["hidden_size"] == 1024


@pytest.mark.slow
def test_the_folder_runs(tmp_path: Path) -> None:
    """Its own launch script takes its config, from another folder too, tunes, transfers and trains."""
    text = tmp_path / "my.txt"
    text.write_text("\n\n".join(f"Paragraph {n} of a text on the number {n * n}, and on {n + 7}." for n in range(4000)))
    folder = tmp_path / "run"
    sizes = "--hidden-size 64 --heads 4 --num-layers 1 --vocab-size 320 --seq-length 32 --batch 4 --train-steps 4"
    new(folder, *sizes.split(), "--text", str(text))
    small = ["tuning.trials=2", "tuning.train_steps=2", "tuning.repeat_best=0", "tuning.max_compute_share=100"]
    result = run("bash", "launch/pretrain_gpt.sh", *small, cwd=folder)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert len(losses(folder / "runs" / "run")) == 4
    assert (folder / "runs" / "run" / "transfer.json").is_file()


def test_scripts_can_be_executed(tmp_path: Path) -> None:
    new(tmp_path / "run")
    scripts = sorted((tmp_path / "run" / "launch").rglob("*.s*"))
    assert [path.name for path in scripts if path.is_file()] == [
        "pretrain_gpt.sh",
        "pipeline.sbatch",
        "pretrain_gpt.sbatch",
        "tune_proxy.sbatch",
        "tune_proxy.sh",
    ]
    assert all(os.access(path, os.X_OK) for path in scripts)


def test_version_and_bare_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"mup-megatron 0\.1\.0(, commit [0-9a-f]{40}(-dirty)?)?\n", capsys.readouterr().out)
    assert cli.run([]) == 0
    assert "─ Start ─" in capsys.readouterr().out


def test_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """What bash asks when the tab key is pressed after `mup-megatron pip`."""
    monkeypatch.setenv("_MUP_MEGATRON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "mup-megatron pip")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(BIN / "mup-megatron").stdout.split() == ["pipeline"]
