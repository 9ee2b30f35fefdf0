"""evaluate --translation: loss and BLEU of a checkpoint in its own layout and another, and every bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from sacrebleu import corpus_bleu

from mup_megatron import cli
from mup_megatron.convert.saved_model import load_saved
from mup_megatron.convert.saved_run import open_run
from mup_megatron.data.t5 import pair_masks
from mup_megatron.evaluate.evaluation import Evaluation, evaluate_translations
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.report.summary import summarize
from tests.helpers import bodies
from tests.helpers.commands import next_commands
from tests.helpers.configs import MIXED, make, make_t5, pairs_file
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = [pair for pair in map(json.loads, pairs_file().read_text().splitlines()) if len(pair["line"]) < 18][-7:]


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of TP 2, trained for three steps, from initial values so large that its translations are of many tokens."""
    upstream.prepare_process()
    folder = tmp_path_factory.mktemp("translated")
    keys = {"training__train_steps": 3, "training__checkpoint_interval": 3, "hparams__init_method_std": 0.3}
    config = make_t5(run__dir=str(folder / "run"), parallel__tensor_model_parallel_size=2, **keys)
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    ranks.run(2, bodies.train_file, path=folder / "run.yaml")
    return folder / "run"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The same pairs as JSON lines with the run's keys, and as two text files."""
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    for key in ("line", "turned"):
        (tmp_path / key).write_text("".join(f"{pair[key]}\n" for pair in PAIRS))
    return str(tmp_path / "pairs.jsonl"), f"{tmp_path / 'line'}:{tmp_path / 'turned'}"


def found(run: Path, files: Any, **given: Any) -> dict[str, Any]:
    try:
        return on_ranks(Rank(), run=run, files=files, given=given)
    finally:
        runtime.stop_distributed()


def on_ranks(rank: Rank, *, run: Path, files: Any, given: dict[str, Any]) -> dict[str, Any]:
    where = {key: value for key, value in given.items() if key in ("batch_size", "overrides")}
    how = {key: value for key, value in given.items() if key not in where}
    return evaluate_translations(Evaluation(checkpoint=run, rank=rank, **where), files, **how)


def references_loss(run: Path) -> tuple[float, int]:
    """Of the targets and their ends, one after the other, in float64, by the whole model."""
    saved = open_run(run)
    layout = resolve_layout(saved.config, 1)
    device = runtime.start_distributed(layout, Rank(), 0)
    (model,) = load_saved(saved, layout, 0, device)
    end, total, count = int(saved.tokenizer.eod), 0.0, 0
    for pair in PAIRS:
        source, target = ([*saved.tokenizer.tokenize(pair[key]), end] for key in ("line", "turned"))
        masks = pair_masks(torch.ones(1, len(source), dtype=torch.bool), len(target))
        with torch.no_grad():
            logits = model(torch.tensor([source]), torch.tensor([[end, *target[:-1]]]), *masks)[0].double()
        likely = logits[:, : saved.tokenizer.vocab_size].log_softmax(-1)
        total -= sum(float(likely[place, token]) for place, token in enumerate(target))
        count += len(target)
    runtime.stop_distributed()
    return total, count


def test_loss_and_bleu(run: Path, files: tuple[str, str]) -> None:
    result = found(run, files, batch_size=3)
    first, second = result["results"]
    assert first["metrics"] == second["metrics"]
    total, count = references_loss(run)
    assert first["metrics"]["tokens"] == count
    assert first["metrics"]["token_loss"] == pytest.approx(total / count, rel=1e-5)
    expected = corpus_bleu(first["translations"], [[pair["turned"] for pair in PAIRS]])
    assert first["metrics"]["bleu"] == expected.score
    assert "tok:13a" in first["signature"]
    assert result["search"] == {"beams": 1, "length_penalty": 1.0, "max_length": 32}
    assert len(set(first["translations"])) > 1


@pytest.mark.slow
def test_the_layout_does_not_matter(ranks: Ranks, run: Path, files: tuple[str, str]) -> None:
    """TP 2, the run's own; and two replicas, which share the sentences."""
    given: dict[str, Any] = {"beams": 3, "batch_size": 2, "max_length": 12}
    (alone,) = found(run, files[:1], **given)["results"]
    for layout in ({}, {"parallel.tensor_model_parallel_size": 1}):
        for result in ranks.run(2, on_ranks, run=run, files=files[:1], given={**given, "overrides": layout}):
            (together,) = result["results"]
            assert result["layout"].startswith("TP 1, DP 2" if layout else "TP 2, DP 1")
            assert together["translations"] == alone["translations"]
            assert len(set(alone["translations"])) > 1
            assert together["metrics"]["token_loss"] == pytest.approx(alone["metrics"]["token_loss"], rel=1e-5)
    assert found(run, files[:1], **{**given, "max_length": 1})["results"][0]["translations"] == [""] * len(PAIRS)


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.run(["evaluate", *map(str, arguments)]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(said) == 1
    return said[0].removeprefix("mup-megatron: error: ")


def test_bad_input(run: Path, files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence, status 2, before any model is built."""
    texts = files[1].split(":")[1]
    Path(texts).write_text("one line\n")
    assert "line has 7 lines and " in refused(capfd, run, "--translation", files[1])
    Path(texts).unlink()
    assert refused(capfd, run, "--translation", files[1]).startswith(f"--translation.target: no such file: {texts}")
    assert refused(capfd, run, "--translation", "none.jsonl").startswith(
        "--translation.jsonl: no such file: none.jsonl"
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"line": "x " * 40, "turned": "y"}))
    assert (
        "a.jsonl, line 1: the source has 81 tokens with its end, but the model learned 32 positions "
        "(model.max_position_embeddings); expected a shorter text"
    ) in refused(capfd, run, "--translation", tmp_path / "a.jsonl").replace("has 41", "has 81").replace(
        "has 42", "has 81"
    )
    (tmp_path / "a.jsonl").write_text('{"line": "x", "turned": " "}')
    assert "a.jsonl, line 1: the target is empty" in refused(capfd, run, "--translation", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n")
    assert "a.jsonl holds no pairs" in refused(capfd, run, "--translation", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"source": "x", "target": "y"}')
    assert "expected text under 'line'" in refused(capfd, run, "--translation", tmp_path / "a.jsonl")
    long = refused(capfd, run, "--translation", files[0], "--max-length", "33")
    assert long.startswith("--max-length: 33 tokens, but the model learned 32 positions")
    both = refused(capfd, run, "--translation", files[0], "--perplexity", files[0])
    assert both == "--translation: is of an encoder-decoder alone; expected no other task beside it"
    window = refused(capfd, run, "--translation", files[0], "--window", "5")
    assert window == "--window: is of the tasks of a decoder; expected none beside --translation"
    half = refused(capfd, run, "--translation", "test.de:")
    assert half == "--translation: test.de:; expected a file of pairs, or two text files, SOURCE:TARGET"
    assert "evaluate" in refused(capfd, run, "--perplexity", files[0])


def test_another_tokenizer(
    run: Path, files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the same size, trained on other text."""
    import sentencepiece

    (tmp_path / "other.txt").write_text("\n".join(pair["line"][::-1] for pair in PAIRS * 200))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "other.txt"),
        model_prefix=str(tmp_path / "other"),
        vocab_size=375,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    said = refused(capfd, run, "--translation", files[0], "--tokenizer", f"sentencepiece:{tmp_path / 'other.model'}")
    assert "another tokenizer than the one that" in said or "its embedding has 384 rows" in said


@pytest.mark.slow
def test_a_model_of_the_next_token(ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys: dict[str, Any] = {
        "training__train_steps": 3,
        "training__lr_warmup_steps": 0,
        "training__checkpoint_interval": 3,
    }
    config = make(MIXED, run__dir=str(tmp_path / "run"), **keys)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    ranks.run(1, bodies.train_file, path=tmp_path / "run.yaml")
    said = refused(capfd, tmp_path / "run", "--translation", tmp_path / "none")
    assert said.startswith("--translation: needs an encoder-decoder, and ")
    assert said.endswith("is gpt3; expected --perplexity, --last-word, --choice or --cloze")
    shutil.rmtree(tmp_path / "run")


def test_generate_writes_a_target(run: Path, files: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """Greedy text is the translation that one beam finds; the prompt is not part of it. Draws are of its seed."""
    (result,) = found(run, files[:1], max_length=9)["results"]
    translations = {pair["line"]: text for pair, text in zip(PAIRS, result["translations"], strict=True) if text}
    source = max(translations, key=lambda line: len(translations[line]))
    assert cli.run(["generate", str(run), source, "--max-new-tokens", "8", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["text"] == translations[source]
    assert cli.run(["generate", str(run), source, "--max-new-tokens", "8"]) == 0
    assert capfd.readouterr().out == f"{said['text']}\n"
    drawn = []
    for seed in ("1", "1", "2"):
        assert cli.run(["generate", str(run), source, "--temperature", "5", "--seed", seed, "--json"]) == 0
        drawn.append(json.loads(capfd.readouterr().out)["tokens"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_a_run_says_comes_next(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As it is printed: a page of the run, and the target of a source."""
    summarize(run, Console(width=60))
    report, generate = next_commands(capfd.readouterr().out)
    for words in (report, generate):
        assert cli.run(words) == 0
    assert len(capfd.readouterr().out.splitlines()) >= 2


def test_a_source_or_a_target_beyond_the_positions(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(run), "x " * 40]) == 2
    assert "tokens, but the model learned 32 positions" in capfd.readouterr().err
    assert cli.run(["generate", str(run), "x", "--max-new-tokens", "40"]) == 2
    sentence = "--max-new-tokens: 40 need more than the 32 positions that the model learned"
    assert sentence in capfd.readouterr().err
