"""evaluate: transformers, on an export of the same checkpoint, is the oracle; each way to count wrongly is seen."""

from __future__ import annotations

import json
import math
import re
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from mup_megatron import cli
from mup_megatron.convert.export import export_hugging_face, open_source
from mup_megatron.evaluate import likelihood
from mup_megatron.evaluate.evaluation import Evaluation, Task, evaluate
from mup_megatron.evaluate.likelihood import Scorer
from mup_megatron.evaluate.requests import Request
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.ranks import Rank
from tests.checkpoints.test_checkpoint import seal
from tests.convert.sources import config_of, train
from tests.helpers import bodies
from tests.helpers.configs import MIXED, MOE, make
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = (Path(sysconfig.get_paths()["stdlib"]) / "ast.py").read_text()
WINDOW = 32
DOCUMENTS = [TEXT[200:900], "x", TEXT[5000:5300], "import os\n", "naïve — 日本語 🙂"]
LAST = ["import sys, os, sys, os, sys,     os", *(TEXT[start : start + 90] for start in range(1000, 2600, 200))]
CHOICES: list[dict[str, Any]] = [
    {"context": "for name in", "endings": ["names:", "range(3):\n    print(name)", "x"], "label": 0},
    {"context": "", "endings": ["import os", "import sys, os, re"], "label": 1},
    {"context": "def main(", "endings": ["self):", "x, y, z):"], "label": 0},
    {"context": "class Node:\n    ", "endings": ["pass", "def visit(self, node):"], "label": 1},
]
CLOZES: list[dict[str, Any]] = [
    {"text": "for ___ in names:\n    print(name)", "options": ["name", "x"], "label": 0},
    {"text": "____ os\nimport sys", "options": ["import", "return", "a much longer thing"], "label": 0},
    {"text": "return self.___", "options": ["value", "visit(node)"], "label": 1},
]
FILES: dict[str, list[dict[str, Any]]] = {
    "perplexity": [{"text": text} for text in DOCUMENTS],
    "last_word": [{"text": text} for text in LAST],
    "choice": CHOICES,
    "cloze": CLOZES,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("tasks")
    for kind, lines in FILES.items():
        (folder / f"{kind}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [Task(kind=kind, path=folder / f"{kind}.jsonl") for kind in FILES]


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of an architecture, trained for three steps at TP 2 when it is first asked for."""
    upstream.prepare_process()
    made: dict[str, Path] = {}

    def run(architecture: str) -> Path:
        if architecture not in made:
            config = config_of(architecture, architecture == "gpt3")
            made[architecture] = train(ranks, tmp_path_factory.mktemp("evaluated"), config, "TP 2")
        return made[architecture]

    return run


def figures(run: Path, tasks: list[Task], **given: Any) -> dict[str, dict[str, Any]]:
    try:
        found = evaluate(Evaluation(checkpoint=run, rank=Rank(), **given), tasks, window=WINDOW)
    finally:
        runtime.stop_distributed()
    return {result["task"]: result["metrics"] for result in found["results"]}


# --- the oracle: plain transformers on the exported folder, one sequence at a time, nothing padded ---


class Oracle:
    """transformers' model and tokenizer of an exported folder."""

    def __init__(self, run: Path, folder: Path) -> None:
        export_hugging_face(open_source(run), folder)
        loader: Any = transformers.AutoModelForCausalLM
        self.model = loader.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def scores(self, tokens: list[int]) -> tuple[list[float], list[bool]]:
        """Log-probability of every token but the first, and whether it is the most likely."""
        logits = self.model(torch.tensor([tokens])).logits[0, :-1].double()
        after = torch.tensor(tokens[1:])
        found = logits.log_softmax(-1).gather(-1, after[:, None])[:, 0]
        return found.tolist(), (logits.argmax(-1) == after).tolist()

    def continuation(self, context: str, text: str) -> tuple[float, int, bool]:
        """Log-likelihood of what follows a context, how many tokens it is, whether all are the most likely."""
        whole, before = self.ids(context + text), len(self.ids(context.rstrip()))
        likelihoods, likeliest = self.scores(whole if before else [self.tokenizer.eos_token_id, *whole])
        count = len(whole) - before
        return sum(likelihoods[-count:]), count, all(likeliest[-count:])

    def document(self, text: str) -> tuple[float, int]:
        """A document after the end of another, in pieces; before each as much text as fits the window."""
        tokens, total = [self.tokenizer.eos_token_id, *self.ids(text)], 0.0
        for start in range(1, len(tokens), WINDOW):
            end = min(start + WINDOW, len(tokens))
            total += sum(self.scores(tokens[max(0, end - WINDOW - 1) : end])[0][start - end :])
        return total, len(tokens) - 1

    def perplexity(self) -> dict[str, float]:
        found = [self.document(text) for text in DOCUMENTS]
        total, tokens = sum(one for one, _ in found), sum(count for _, count in found)
        words = sum(len(re.findall(r"\S+", text)) for text in DOCUMENTS)
        size = sum(len(bytes(text, "utf-8")) for text in DOCUMENTS)
        return {
            "tokens": tokens,
            "words": words,
            "bytes": size,
            "log_likelihood": total,
            "token_perplexity": math.exp(-total / tokens),
            "word_perplexity": math.exp(-total / words),
            "byte_perplexity": math.exp(-total / size),
            "bits_per_byte": -total / size / math.log(2),
        }

    def last_word(self) -> dict[str, float]:
        found = [self.continuation(*(re.split(r"(?=\s+\S+\s*$)", text.rstrip(), maxsplit=1))) for text in LAST]
        return {
            "accuracy": sum(greedy for *_, greedy in found) / len(found),
            "word_perplexity": math.exp(-sum(total for total, *_ in found) / len(found)),
        }

    def choice(self) -> dict[str, float]:
        apart = [" ", "", " ", ""]  # none where nothing is before it, or white space
        pairs = [
            [(line["context"], sign + ending) for ending in line["endings"]]
            for line, sign in zip(CHOICES, apart, strict=True)
        ]
        return self.chosen(pairs, [line["endings"] for line in CHOICES], [line["label"] for line in CHOICES])

    def cloze(self) -> dict[str, float]:
        parts = [re.split("_+", line["text"]) for line in CLOZES]
        pairs = [
            [(before, option + after) for option in line["options"]]
            for line, (before, after) in zip(CLOZES, parts, strict=True)
        ]
        return self.chosen(pairs, [line["options"] for line in CLOZES], [line["label"] for line in CLOZES])

    def chosen(self, pairs: list[list[tuple[str, str]]], texts: list[list[str]], labels: list[int]) -> dict[str, float]:
        right = torch.zeros(3)
        for of_one, answers, label in zip(pairs, texts, labels, strict=True):
            found = [self.continuation(*pair) for pair in of_one]
            total, count = torch.tensor([one for one, *_ in found]), torch.tensor([number for _, number, _ in found])
            lengths = torch.tensor([len(answer) for answer in answers])
            right += torch.stack([total, total / lengths, total / count]).argmax(-1) == label
        names = ("accuracy", "accuracy_per_character", "accuracy_per_token")
        return dict(zip(names, (right / len(labels)).tolist(), strict=True))

    def all(self) -> dict[str, dict[str, float]]:
        return {kind: getattr(self, kind)() for kind in FILES}


def differing(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, float]]) -> set[str]:
    """Figures that differ by more than 1e-5 of themselves."""
    return {
        f"{kind}.{name}"
        for kind, metrics in expected.items()
        for name, value in metrics.items()
        if found[kind][name] != pytest.approx(value, rel=1e-5, abs=0)
    }


@pytest.fixture(scope="module")
def oracles(runs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, dict[str, dict[str, float]]] = {}

    def expected(architecture: str) -> dict[str, dict[str, float]]:
        if architecture not in made:
            made[architecture] = Oracle(runs(architecture), tmp_path_factory.mktemp("oracle") / "hf").all()
        return made[architecture]

    return expected


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt3", marks=pytest.mark.slow)])
def test_transformers_computes_the_same(
    runs: Callable[[str], Path], oracles: Callable[[str], Any], tasks: list[Task], architecture: str
) -> None:
    expected = oracles(architecture)
    assert differing(figures(runs(architecture), tasks, batch_size=3), expected) == set()


@pytest.mark.slow
def test_gelu_as_the_run_computed_it(
    runs: Callable[[str], Path], oracles: Callable[[str], Any], tasks: list[Task], tmp_path: Path
) -> None:
    """Of a run whose GELU was fused, on GPUs, it is the tanh approximation here too, as in an export (`gelu_new`)."""
    copy = tmp_path / "run"
    shutil.copytree(runs("gpt3"), copy)
    path = copy / "checkpoints" / "step_00000003" / "mup.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fused_activation": True}))
    seal(path.parent)
    found = figures(copy, tasks, batch_size=64)
    assert differing(found, Oracle(copy, tmp_path / "hf").all()) == set()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["activation_function"] == "gelu_new"
    assert "perplexity.token_perplexity" in differing(found, oracles("gpt3"))


# --- each way to count wrongly, planted ---


@pytest.fixture
def batch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Plants a fault in what is fed."""

    def plant(fault: Callable[[Any], Any]) -> None:
        right = Scorer._micro_batch
        monkeypatch.setattr(Scorer, "_micro_batch", lambda *given: fault(right(*given)))

    return plant


def asked_again(runs: Callable[[str], Path], oracles: Callable[[str], Any], tasks: list[Task]) -> set[str]:
    """Which figures of the perplexities and the last words are not the oracle's."""
    expected = {kind: metrics for kind, metrics in oracles("llama").items() if kind in ("perplexity", "last_word")}
    return differing(figures(runs("llama"), tasks[:2], batch_size=64), expected)


LIKELIHOODS = {
    *(f"perplexity.{name}" for name in ("log_likelihood", "token_perplexity", "word_perplexity", "byte_perplexity")),
    *("perplexity.bits_per_byte", "last_word.word_perplexity"),
}


def test_a_shifted_label_is_seen(
    runs: Callable[[str], Path], oracles: Callable[[str], Any], tasks: list[Task], batch_of: Any
) -> None:
    """Each token is compared with the one that was fed."""
    batch_of(lambda batch: replace(batch, targets=batch.tokens))
    assert asked_again(runs, oracles, tasks) >= LIKELIHOODS


@pytest.mark.slow
def test_a_dropped_last_token_is_seen(
    runs: Callable[[str], Path], oracles: Callable[[str], Any], tasks: list[Task], batch_of: Any
) -> None:
    def fault(batch: Any) -> Any:
        last = batch.scored & ~torch.nn.functional.pad(batch.scored, (0, 1))[:, 1:]
        return replace(batch, scored=batch.scored & ~last)

    batch_of(fault)
    assert asked_again(runs, oracles, tasks) >= LIKELIHOODS


def test_padding_that_counts_is_seen(
    runs: Callable[[str], Path], oracles: Callable[[str], Any], tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter texts end in what fills them up, and the vocabulary in what pads it: 375 entries to 384."""
    right = Scorer.__call__
    assert asked_again(runs, oracles, tasks) == set()

    def padded(scorer: Scorer, requests: list[Request]) -> Any:
        longest = max(len(request.tokens) for request in requests)
        fill = [longest - len(request.tokens) for request in requests]
        return right(
            scorer,
            [
                Request(tokens=[*request.tokens, *[scorer._pad] * count], scored=request.scored + count)
                for request, count in zip(requests, fill, strict=True)
            ],
        )

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "__call__", padded)
        assert asked_again(runs, oracles, tasks) >= {*LIKELIHOODS, "perplexity.tokens"}
    scores = likelihood.target_scores
    with monkeypatch.context() as patch:
        patch.setattr(likelihood, "target_scores", lambda logits, targets, _vocabulary: scores(logits, targets, 384))
        assert asked_again(runs, oracles, tasks) >= LIKELIHOODS


# --- the most likely token, and one that is not ---


def test_which_token_is_the_most_likely(ranks: Ranks) -> None:
    """Two ranks hold three entries each, of which the last pads. Numbers by hand: ln of 1/8, 2/8, 4/8, 1/8."""
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0, 1e-30, 9.0]] * 4 + [[2.0, 2.0, 1.0, 2.0, 1.0, 9.0]] * 2).log()
    found = ranks.run(2, target_scores, logits=logits, targets=[0, 1, 2, 3, 0, 1])
    expected = [[1 / 8, 0], [2 / 8, 0], [4 / 8, 1], [1 / 8, 0], [2 / 8, 1], [2 / 8, 0]]
    for scores in found:  # the first of equals is the most likely
        assert [[math.exp(one), likeliest] for one, likeliest in scores] == [pytest.approx(row) for row in expected]


def target_scores(rank: Rank, *, logits: torch.Tensor, targets: list[int]) -> list[list[float]]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    own = logits.chunk(2, dim=-1)[rank.rank]
    return likelihood.target_scores(own, torch.tensor(targets), 5).tolist()


# --- every layout ---

MEGATRON = {"parallel.engine": "megatron"}
DEEPER = {"model": {**MIXED["model"], "num_layers": 4}, "base": MIXED["base"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "DP 2": (2, MIXED, {"parallel.tensor_model_parallel_size": 1}),
    "TP 2 with sequence parallelism, DP 2": (
        4,
        MIXED,
        {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
    ),
    "PP 2, TP 2": (4, MIXED, {**MEGATRON, "parallel.pipeline_model_parallel_size": 2}),
    "PP 2": (
        2,
        MIXED,
        {**MEGATRON, "parallel.tensor_model_parallel_size": 1, "parallel.pipeline_model_parallel_size": 2},
    ),
    "an interleaved pipeline": (
        2,
        DEEPER,
        {
            **MEGATRON,
            "parallel.tensor_model_parallel_size": 1,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.virtual_pipeline_model_parallel_size": 2,
        },
    ),
    "CP 2": (
        2,
        MIXED,
        {
            **MEGATRON,
            "parallel.tensor_model_parallel_size": 1,
            "parallel.context_parallel_size": 2,
            "model.core_attention": "sdpa",
        },
    ),
    "EP 2": (2, MOE, {"parallel.tensor_model_parallel_size": 1, "parallel.expert_model_parallel_size": 2}),
}
QUICK = ("PP 2",)


def command(rank: Rank, *, arguments: list[str]) -> dict[str, Any]:
    status, out, err = bodies.command(rank, arguments=arguments)
    assert status == 0, err
    return json.loads(out) if rank.is_first else {}


@pytest.mark.parametrize("cell", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in LAYOUTS])
def test_every_layout_gives_the_same(ranks: Ranks, tmp_path: Path, tasks: list[Task], cell: str) -> None:
    """Of a checkpoint of one process; within 1e-5 of what one process finds, which transformers confirms above."""
    count, growth, overrides = LAYOUTS[cell]
    config = make(
        growth,
        "llama" if growth is MOE else "gpt3",
        run__dir=str(tmp_path / "run"),
        hparams__init_method_std=0.3,
        training__train_steps=2,
        training__lr_warmup_steps=1,
        training__checkpoint_interval=2,
        parallel__tensor_model_parallel_size=2 if cell == "PP 2, TP 2" else 1,
        training__seq_length=128,
    )
    if cell == "PP 2, TP 2":  # the run's own tensor-parallel size, since nothing else is said
        ranks.run(2, bodies.train_file, path=written(tmp_path, config))
    else:
        ranks.run(1, bodies.train_file, path=written(tmp_path, config))
    words = ["evaluate", str(tmp_path / "run"), "--json", "--batch-size", "3", "--window", "31"]
    words += [word for task in tasks for word in (f"--{task.kind.replace('_', '-')}", str(task.path))]
    alone = ranks.run(1, command, arguments=words)[0]
    split = ranks.run(count, command, arguments=[*words, *(f"{key}={value}" for key, value in overrides.items())])[0]
    for one, other in zip(alone["results"], split["results"], strict=True):
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert alone["layout"] == "TP 1, DP 1, ZeRO 1"
    assert split["layout"] != alone["layout"]


def written(folder: Path, config: Any) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    return folder / "run.yaml"


# --- the command ---


@pytest.fixture
def say(runs: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `evaluate` on the GPT's run in this process."""

    def run(*words: str | Path, checkpoint: Path | None = None) -> tuple[int, str, str]:
        status = cli.run(["evaluate", str(checkpoint or runs("gpt3")), *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_a_table_and_a_file(
    say: Callable[..., tuple[int, str, str]], tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(likelihood, "_SAY_SECONDS", 0.0)
    status, out, err = say("--perplexity", tasks[0].path, "--cloze", tasks[3].path, "--output", path)
    assert status == 0
    found = json.loads(path.read_text())
    assert [result["task"] for result in found["results"]] == ["perplexity", "cloze"]
    assert (found["step"], found["layout"], found["window"]) == (3, "TP 1, DP 1, ZeRO 1", 32)
    assert f"{found['results'][0]['metrics']['byte_perplexity']:,.4f}" in out
    assert "accuracy per character" in out
    # 7 options in one batch; 823 tokens of 5 documents, in windows of 32: 29 windows, eight at a time.
    assert err.splitlines()[-5:] == [
        *(f"{done} of 29 sequences, the longest first" for done in (8, 16, 24, 29)),
        "7 of 7 sequences, the longest first",
    ]
    status, _, err = say("--perplexity", tasks[0].path, "--output", path)
    assert (status, err.count("\n")) == (2, 1)
    assert "is there already" in err


BAD: list[tuple[list[str], str]] = [
    ([], "no task; expected --perplexity, --last-word, --choice, --cloze or --translation with a FILE"),
    (["--choice", "none.jsonl"], "--choice: no such file: none.jsonl in "),
    (["--perplexity", "{perplexity}", "--window", "129"], "--window: 129 tokens, but the model learned 128 positions"),
    (["--perplexity", "{perplexity}", "hparams.lr=1"], "hparams.lr: an evaluation takes the checkpoint's; expected a"),
    (["--last-word", "{long}"], "line 2: 340 tokens, but the model learned 128 positions (model.max_position_embeddin"),
    (["--cloze", "{choice}"], "choice.jsonl, line 1: text is missing; found ['context', 'endings', 'label']"),
    (["--perplexity", "{perplexity}", "parallel.tensor_model_parallel_size=2"], "2 does not divide the 1 processes"),
    (["--perplexity", "{perplexity}", "--tokenizer", "byte-level:"], "another tokenizer than the one that"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input(
    say: Callable[..., tuple[int, str, str]], tasks: list[Task], tmp_path: Path, words: list[str], sentence: str
) -> None:
    (tmp_path / "long").write_text("".join(json.dumps({"text": "x = 1; " * n}) + "\n" for n in (2, 57)))
    named = {"{long}": str(tmp_path / "long"), **{f"{{{task.kind}}}": str(task.path) for task in tasks}}
    status, _, err = say(*(named.get(word, word) for word in words))
    assert status == 2
    assert sentence in err
    assert err.count("\n") == 1


def test_another_tokenizer_is_refused(
    runs: Callable[[str], Path], say: Callable[..., tuple[int, str, str]], tasks: list[Task], tmp_path: Path
) -> None:
    """A copy of the checkpoint's own is taken; one of as many entries that was trained on other text is not."""
    from mup_megatron.convert.saved_run import open_run
    from mup_megatron.data.tokenizer import train_sentencepiece

    own = open_run(runs("gpt3"))
    copy, other = tmp_path / "copy.model", tmp_path / "other.model"
    shutil.copyfile(Path(own.config.data.dir or "") / "tokenizer.model", copy)
    train_sentencepiece([TEXT], 375, other)
    perplexity = ["--perplexity", tasks[0].path, "--json"]
    before = json.loads(say(*perplexity)[1])["results"]
    assert json.loads(say(*perplexity, "--tokenizer", f"sentencepiece:{copy}")[1])["results"] == before
    status, _, err = say(*perplexity, "--tokenizer", f"sentencepiece:{other}")
    assert status == 2
    assert re.search(r"other\.model: another tokenizer than the one that .*step_00000003 was trained with", err)


def test_a_run_that_diverged(
    runs: Callable[[str], Path], tasks: list[Task], monkeypatch: pytest.MonkeyPatch, say: Any
) -> None:
    scores = likelihood.target_scores
    monkeypatch.setattr(likelihood, "target_scores", lambda logits, *given: scores(logits * float("nan"), *given))
    status, _, err = say("--perplexity", tasks[0].path)
    assert (status, err.count("\n")) == (2, 1)
    assert "the model's logits are not finite numbers" in err
