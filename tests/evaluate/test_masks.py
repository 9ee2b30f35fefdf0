"""generate and evaluate with BERT: masks are filled, texts are scored a masked token at a time; every bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from mup_megatron import cli
from mup_megatron.convert.saved_run import open_run
from mup_megatron.evaluate.evaluation import Evaluation, Task, evaluate
from mup_megatron.evaluate.generate import load_model
from mup_megatron.evaluate.likelihood import MaskedScorer
from mup_megatron.evaluate.masks import fill, masked_tokens
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.ranks import Rank
from mup_megatron.report.summary import summarize
from mup_megatron.util.errors import UserError
from tests.helpers import bodies
from tests.helpers.commands import next_commands
from tests.helpers.configs import HEAD_SIZE, VOCABULARY, make
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "def [MASK](self, [MASK]):"
WORDS = SimpleNamespace(
    vocab_size=6, eod=5, tokenize=lambda text: [int(word) for word in text.split()], detokenize=lambda ids: str(ids)
)


def trained(ranks: Ranks, folder: Path, **keys: Any) -> Path:
    config = make(
        HEAD_SIZE,
        "bert",
        hparams__init_method_std=0.5,
        training__train_steps=3,
        training__checkpoint_interval=3,
        run__dir=str(folder / "run"),
        **keys,
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    upstream.prepare_process()
    ranks.run(1, bodies.train_file, path=folder / "run.yaml")
    return folder / "run"


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(ranks, tmp_path_factory.mktemp("masks"), model__bert_binary_head=True)


def test_tokens_of_a_text_with_masks() -> None:
    """Between two ends; spaces before a mask are its own, those after it are not."""
    assert masked_tokens(WORDS, "1 2 [MASK] 3[MASK]", "PROMPT") == [5, 1, 2, 6, 3, 6, 5]
    assert masked_tokens(WORDS, "[MASK]", "PROMPT") == [5, 6, 5]
    spaces = SimpleNamespace(**{**vars(WORDS), "tokenize": lambda text: [len(text)]})
    assert masked_tokens(spaces, "a  [MASK]  b ", "PROMPT") == [5, 1, 6, 4, 5]


def test_masks_are_filled_by_the_models_own_logits(run: Path) -> None:
    saved = open_run(run)
    tokenizer = saved.tokenizer
    try:
        model = load_model(saved, torch.device("cpu"))
        found = fill(model, tokenizer, TEXT, candidates=3)
        fed = torch.tensor([masked_tokens(tokenizer, TEXT, "PROMPT")])
        with torch.no_grad():
            logits, _ = model(fed, torch.ones_like(fed), tokentype_ids=torch.zeros_like(fed))
            # Negative control: of a segment that is a second one, or with the ends left out, the answer is another.
            second, _ = model(fed, torch.ones_like(fed), tokentype_ids=torch.ones_like(fed))
    finally:
        runtime.stop_distributed()
    places = (fed[0] == VOCABULARY).nonzero()[:, 0].tolist()
    assert len(places) == len(found.masks) == 2
    likely = logits[0, :, :VOCABULARY].double().softmax(-1)
    for place, candidates in zip(places, found.masks, strict=True):
        best = likely[place].topk(3)
        assert [each.id for each in candidates] == best.indices.tolist()
        assert [each.probability for each in candidates] == pytest.approx(best.values.tolist(), rel=1e-6)
        assert "".join(each.text for each in candidates)
    assert not torch.allclose(second[0, places], logits[0, places], rtol=1e-2)
    filled = fed[0].tolist()
    for place, candidates in zip(places, found.masks, strict=True):
        filled[place] = candidates[0].id
    assert found.text == tokenizer.detokenize(filled[1:-1])


def test_the_command(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(run), TEXT, "--json", "--top-k", "2"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [len(candidates) for candidates in found["masks"]] == [2, 2]
    assert cli.run(["generate", str(run), TEXT]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "\n".join(lines[:-2]) == found["text"]
    assert lines[-2].startswith("mask 1: ")
    assert lines[-1].count("%") == 5


def test_what_a_run_says_comes_next(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As it is printed: a page of the run, and masks that are filled."""
    summarize(run, Console(width=60))
    report, generate = next_commands(capfd.readouterr().out)
    for words in (report, generate):
        assert cli.run(words) == 0
    assert "mask 1: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["def main("], r"PROMPT: expected [MASK] in each place that is to be filled"),
        ([TEXT, "--temperature", "1"], "--temperature: bert draws no tokens, it fills masks; remove it"),
        ([TEXT, "--max-new-tokens", "4"], "--max-new-tokens: bert draws no tokens"),
        ([f"{TEXT} {'x ' * 90}"], "tokens with both ends, but the model learned "),
    ],
)
def test_bad_input(run: Path, arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(run), *arguments]) == 2
    assert sentence in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


def test_logits_that_are_no_numbers(run: Path) -> None:
    saved = open_run(run)
    try:
        model = load_model(saved, torch.device("cpu"))
        torch.nn.init.constant_(model.lm_head.dense.weight, float("nan"))
        with pytest.raises(UserError, match="diverged"):
            fill(model, saved.tokenizer, TEXT)
    finally:
        runtime.stop_distributed()


# --- evaluate ---

DOCUMENTS = ["def a(self):\n    return self.b\n", "import sys, os\n" * 12]
CLOZE = {"text": "def ___(self):", "options": ["name", "of course"], "label": 0}


def pseudo(model: Any, tokens: list[int], place: int) -> float:
    """Log-probability of one token with all others around it, in float64, by one call of the model."""
    fed = torch.tensor([tokens])
    fed[0, place] = VOCABULARY
    with torch.no_grad():
        logits, _ = model(fed, torch.ones_like(fed), tokentype_ids=torch.zeros_like(fed))
    return float(logits[0, place, :VOCABULARY].double().log_softmax(-1)[tokens[place]])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    corpus, cloze = tmp_path / "corpus.jsonl", tmp_path / "cloze.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    cloze.write_text(json.dumps(CLOZE) + "\n")
    return {"perplexity": corpus, "cloze": cloze}


def expected(run: Path, window: int) -> tuple[float, int, list[float]]:
    """Pseudo-log-likelihood of the documents and its tokens, and that of each option, one token at a time."""
    saved = open_run(run)
    end, total, count, options = int(saved.tokenizer.eod), 0.0, 0, []
    try:
        model = load_model(saved, torch.device("cpu"))
        for text in DOCUMENTS:
            tokens = saved.tokenizer.tokenize(text)
            for start in range(0, len(tokens), window - 2):
                stop = min(start + window - 2, len(tokens))
                fed = [end, *tokens[:stop]] if start == 0 else tokens[max(0, stop - window + 1) : stop]
                fed = [*fed, end] if stop == len(tokens) else fed
                assert len(fed) <= window
                last = len(fed) - (stop == len(tokens))
                total += sum(pseudo(model, fed, place) for place in range(last - (stop - start), last))
            count += len(tokens)
        before, after = CLOZE["text"].split("___")
        for option in CLOZE["options"]:
            context = saved.tokenizer.tokenize(before.rstrip())
            tokens = [end, *saved.tokenizer.tokenize(before + option + after), end]
            options.append(sum(pseudo(model, tokens, place) for place in range(len(context) + 1, len(tokens) - 1)))
    finally:
        runtime.stop_distributed()
    return total, count, options


def test_pseudo_likelihoods(run: Path, files: dict[str, Path], ranks: Ranks) -> None:
    """Figures are those of one token at a time; two replicas, and two tensor-parallel ranks, give the same."""
    total, count, options = expected(run, 20)
    asked = {"run": run, "files": files, "window": 20}
    (alone,) = ranks.run(1, scored, **asked)
    first, second = alone["results"]
    assert alone["likelihood"].startswith("pseudo-log-likelihood")
    assert first["metrics"]["tokens"] == count > 40
    assert first["metrics"]["log_likelihood"] == pytest.approx(total, rel=1e-5)
    assert second["metrics"]["accuracy"] == float(options[0] > options[1])
    for overrides in ({}, {"parallel.tensor_model_parallel_size": 2}):
        for found in ranks.run(2, scored, **asked, overrides=overrides):
            assert found["results"][0]["metrics"]["log_likelihood"] == pytest.approx(total, rel=1e-5)
            assert found["results"][1]["metrics"] == second["metrics"]


@pytest.mark.slow
def test_pseudo_likelihoods_of_a_pipeline(run: Path, files: dict[str, Path], ranks: Ranks) -> None:
    total, _, _ = expected(run, 20)
    overrides = {"parallel.engine": "megatron", "parallel.pipeline_model_parallel_size": 2}
    for found in ranks.run(2, scored, run=run, files=files, window=20, overrides=overrides):
        assert found["results"][0]["metrics"]["log_likelihood"] == pytest.approx(total, rel=1e-5)


def scored(rank: Rank, *, run: Path, files: dict[str, Path], window: int, overrides: Any = None) -> dict[str, Any]:
    asked = Evaluation(checkpoint=run, rank=rank, overrides=overrides or {}, batch_size=7)
    return evaluate(asked, [Task(kind=kind, path=path) for kind, path in files.items()], window)


def test_seeing_its_own_token_is_seen(run: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with nothing masked, the same text has another likelihood."""
    total, _, _ = expected(run, 20)
    right = MaskedScorer._row

    def unmasked(scorer: MaskedScorer, request: Any, place: int) -> Any:
        row = right(scorer, request, place)
        return dataclasses.replace(row, fed=row.targets)

    monkeypatch.setattr(MaskedScorer, "_row", unmasked)
    try:
        found = scored(Rank(), run=run, files=files, window=20)
    finally:
        runtime.stop_distributed()
    assert found["results"][0]["metrics"]["log_likelihood"] != pytest.approx(total, rel=1e-2)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--last-word", "corpus"], "--last-word asks for what comes next, and bert predicts masked tokens"),
        (["--perplexity", "corpus", "--window", "2"], "--window: 2 has no room for a token between two ends"),
    ],
)
def test_what_cannot_be_asked(
    run: Path, files: dict[str, Path], option: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [str(files["perplexity"]) if word == "corpus" else word for word in option]
    assert cli.run(["evaluate", str(run), *given]) == 2
    assert sentence in capfd.readouterr().err
