"""generate: cached decoding gives the logits of the full forward pass, and the command does what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mup_megatron import cli
from mup_megatron.config import parse_config
from mup_megatron.convert.saved_run import find_checkpoint
from mup_megatron.engines.setup import resolve
from mup_megatron.evaluate.generate import Reader, Sampling, generate
from mup_megatron.util.errors import ConfigError, UserError
from tests.checkpoints.test_checkpoint import seal
from tests.helpers import bodies
from tests.helpers.commands import mup
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks

POSITIONS = 32
# Attention whose softmax scale is not 1/sqrt(d) by two factors: a head size (24) that is not the base's (16), and α.
GROUPED = {"model": {**HEAD_SIZE["model"], "num_query_groups": 2}, "base": HEAD_SIZE["base"]}
MULTIPLIERS = {
    "hparams__attention_multiplier": 2.0,
    "hparams__output_multiplier": 3.0,
    "hparams__embedding_multiplier": 2.0,
    "hparams__residual_multiplier": 0.5,
}
RELATIVE = {
    "model__position_embedding_type": "relative",
    "model__relative_attention_num_buckets": 8,
    "model__relative_attention_max_distance": 20,
    "hparams__relative_bias_multiplier": 4.0,
}
CELLS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gpt3 MHA": (HEAD_SIZE, "gpt3", {}),
    "gpt3 GQA": (GROUPED, "gpt3", {"model__add_qkv_bias": True}),
    "llama MHA": (HEAD_SIZE, "llama", {}),
    "llama GQA": (GROUPED, "llama", {}),
    "llama part of RoPE": (HEAD_SIZE, "llama", {"model__rotary_percent": 0.5}),
    "llama MQA sdpa": (GROUPED, "llama", {"model__core_attention": "sdpa", "model__num_query_groups": 1}),
    "llama QK-norm": (GROUPED, "llama", {"model__qk_layernorm": True}),
    "llama relative": (GROUPED, "llama", {**RELATIVE, "hparams__init_method_std": 0.2}),
    "llama relative sdpa": (GROUPED, "llama", {**RELATIVE, "model__core_attention": "sdpa"}),
    "llama alibi": (GROUPED, "llama", {"model__position_embedding_type": "alibi"}),
    "llama MLA": (MLA, "llama", {}),
    "llama MLA sdpa": (MLA, "llama", {"model__core_attention": "sdpa"}),
    "llama MoE": (MOE, "llama", {}),
}


WAYS: dict[str, dict[str, Any]] = {
    "from the first token": {},
    "after seven": {"prefill": 7},
    "float64": {"dtype": "float64"},
    "softmax scale lost": {"lost": "softmax_scale"},
    "readout multiplier lost": {"lost": "readout"},
    "embedding multiplier lost": {"lost": "embedding"},
    "positions lost": {"lost": "positions"},
}


QUICK = ("llama relative", "gpt3 GQA", "llama MLA")
each_cell = pytest.mark.parametrize(
    "cell", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CELLS]
)


@pytest.fixture(scope="module")
def deviations(ranks: Ranks) -> Callable[[str], dict[str, float]]:
    """Largest difference of a logit over the largest logit, by way of decoding; of a cell."""

    @cache
    def measure(cell: str) -> dict[str, float]:
        growth, architecture, overrides = CELLS[cell]
        configs = {cell: make(growth, architecture, **MULTIPLIERS, **overrides)}
        arguments = {"configs": configs, "vocabulary": VOCABULARY, "positions": POSITIONS, "ways": WAYS}
        return ranks.run(1, bodies.decode, **arguments)[0][cell]

    return measure


@each_cell
def test_cached_logits_are_the_full_forwards(deviations: Callable[[str], dict[str, float]], cell: str) -> None:
    """At 32 positions."""
    assert deviations(cell)["from the first token"] < 1e-5
    assert deviations(cell)["after seven"] < 1e-5
    assert deviations(cell)["float64"] < 1e-13


@each_cell
def test_what_decoding_loses_is_seen(deviations: Callable[[str], dict[str, float]], cell: str) -> None:
    """Negative controls: with 1/sqrt(d) in the steps, or without a hook, the same comparison fails by far."""
    lost = {way for way, arguments in WAYS.items() if "lost" in arguments}
    if cell.startswith("llama"):
        lost.remove("positions lost")  # RoPE's come from the cache
        assert deviations(cell)["positions lost"] < 1e-5
    assert {way for way in lost if deviations(cell)[way] > 1e-2} == lost


# --- choosing ---


def draws(sampling: Sampling, logits: list[float], count: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(sampling.seed)
    return [sampling.choose(torch.tensor(logits), generator) for _ in range(count)]


LOGITS = [1.0, 3.0, 2.0, 3.0, -50.0]  # probabilities 0.05, 0.38, 0.14, 0.38, 0


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    assert set(draws(Sampling(), LOGITS)) == {1}
    assert set(draws(Sampling(temperature=1.0, top_k=1, seed=1), LOGITS)) == {1}


def test_a_seed_gives_the_same_draws() -> None:
    assert draws(Sampling(temperature=1.0, seed=5), LOGITS) == draws(Sampling(temperature=1.0, seed=5), LOGITS)
    assert draws(Sampling(temperature=1.0, seed=5), LOGITS) != draws(Sampling(temperature=1.0, seed=6), LOGITS)
    assert Sampling().seed != Sampling().seed


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.8}, {1, 2, 3}),
        ({"top_p": 0.8, "top_k": 2}, {1, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"temperature": 1e-300}, {1, 3}),
        ({"temperature": 1e4}, {0, 1, 2, 3, 4}),
    ],
)
def test_what_can_be_drawn(options: dict[str, Any], drawn: set[int]) -> None:
    assert set(draws(Sampling(**{"temperature": 1.0, "seed": 3, **options}), LOGITS)) == drawn


def test_draws_follow_the_probabilities() -> None:
    drawn = draws(Sampling(temperature=2.0, seed=3), [0.0, 2.0], 4000)
    assert sum(drawn) / 4000 == pytest.approx(1 / (1 + torch.tensor(-1.0).exp().item()), abs=0.03)


@pytest.mark.parametrize("option", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 1.1}])
def test_numbers_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--"):
        Sampling(**option)


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(UserError, match="diverged"):
        draws(Sampling(), [0.0, float("nan")])


# --- text as it comes ---


class Bytes:
    """Tokens are bytes."""

    def detokenize(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_characters_come_whole() -> None:
    text = "naïve — 日本語 🙂 " * 3
    reader = Reader(Bytes(), list(b"caf"))
    pieces = [reader.read([byte], last=False) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert reader.read([0xE6], last=False) == ""
    assert reader.read([], last=True) == "\N{REPLACEMENT CHARACTER}"


# --- a model that is not one: what is fed, what is never said ---


class Script(torch.nn.Module):
    """Gives the logits that it is told, and keeps what it was fed. Entries of the vocabulary from 6 on are padding."""

    def __init__(self, best: list[int], positions: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.position_embedding_type = "rope" if positions is None else "learned_absolute"
        self.max_sequence_length = positions
        self.best = best
        self.fed: list[tuple[int, int]] = []
        self.eval()

    def forward(self, ids: Any, positions: Any, mask: Any, **_: Any) -> torch.Tensor:
        self.fed += zip(ids[0].tolist(), positions[0].tolist(), strict=True)
        logits = torch.zeros(1, 1, 8)
        logits[..., 6:] = 100.0
        logits[..., self.best.pop(0) if self.best else NUMBERS.eod] = 10.0
        return logits


NUMBERS = SimpleNamespace(
    vocab_size=6,
    eod=5,
    tokenize=lambda text: [int(word) for word in text.split()],
    detokenize=lambda ids: "".join(f"{i} " for i in ids),
)


def test_generation_ends_with_the_document() -> None:
    model = Script([1, 2, 5, 3])
    tokens = list(generate(model, NUMBERS, "4 4"))
    assert [(token.id, token.text) for token in tokens] == [(1, "1 "), (2, "2 "), (5, "")]
    assert model.fed == [(4, 0), (4, 1), (1, 2), (2, 3)]


def test_an_empty_prompt_begins_a_document() -> None:
    model = Script([1, 2])
    assert [token.id for token in generate(model, NUMBERS, "", max_new_tokens=2)] == [1, 2]
    assert model.fed == [(5, 0), (1, 1)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1e6, seed=1)])
def test_padding_of_the_vocabulary_is_never_chosen(sampling: Sampling) -> None:
    """Though it is far the most likely here, greedily and among near-equals."""
    tokens = list(generate(Script([4] * 200), NUMBERS, "0", sampling=sampling, max_new_tokens=200))
    assert {token.id for token in tokens} <= set(range(6))


def test_learned_positions_end() -> None:
    assert len(list(generate(Script([1] * 3, positions=4), NUMBERS, "1 1"))) == 3  # the last one is never fed
    assert len(list(generate(Script([1], positions=4), NUMBERS, "1 1 1 1"))) == 1
    with pytest.raises(UserError, match=r"--max-new-tokens: 4 after a prompt of 2 tokens .* expected at most 3"):
        generate(Script([], positions=4), NUMBERS, "1 1", max_new_tokens=4)
    with pytest.raises(UserError, match="PROMPT: 5 tokens, but the model learned 4 positions"):
        generate(Script([], positions=4), NUMBERS, "1 1 1 1 1")


@pytest.mark.parametrize("prompt", ["one", "\udcff"])
def test_a_prompt_that_cannot_be_read(prompt: str) -> None:
    with pytest.raises(UserError, match="PROMPT: the tokenizer cannot read it"):
        generate(Script([]), NUMBERS, prompt)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match="evaluation mode"):
        list(generate(Script([1]).train(), NUMBERS, "1"))


# --- the command ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, with data of its own, on one rank."""
    folder = tmp_path_factory.mktemp("generate")
    config = make(
        MIXED,
        "gpt3",
        **MULTIPLIERS,
        run__dir=str(folder / "run"),
        data__dir=None,
        training__train_steps=6,
        training__checkpoint_interval=3,
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump()))
    assert cli.run(["train", str(folder / "run.yaml")]) == 0
    assert not torch.distributed.is_initialized()
    return folder / "run"


@pytest.fixture
def say(trained: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command in this process, with --json."""

    def run(*arguments: str) -> dict[str, Any]:
        assert cli.run(["generate", *arguments, "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    return run


PROMPT = "def main("


def test_the_command(trained: Path, say: Callable[..., dict[str, Any]]) -> None:
    greedy = mup("generate", trained, PROMPT, "--max-new-tokens", "12")
    assert greedy.returncode == 0, greedy.stderr
    found = say(str(trained), PROMPT, "--max-new-tokens", "12", "--top-k", "1")
    assert greedy.stdout == PROMPT + found["text"] + "\n"
    assert (found["prompt"], found["sampling"]["temperature"], found["sampling"]["top_k"]) == (PROMPT, 1, 1)
    assert found["ended"] == "max_new_tokens"
    assert len(found["tokens"]) == 12

    drawn = [say(str(trained), "", "--seed", "3", "--temperature", "1.5") for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0]["tokens"] != found["tokens"]
    assert max(drawn[0]["tokens"]) < VOCABULARY


def test_which_checkpoint(trained: Path) -> None:
    first, latest = (trained / "checkpoints" / f"step_0000000{step}" for step in (3, 6))
    assert [find_checkpoint(path) for path in (trained, trained / "checkpoints", latest, first)] == [latest] * 3 + [
        first
    ]


def test_a_run_that_was_moved(trained: Path, tmp_path: Path, say: Callable[..., dict[str, Any]]) -> None:
    """Its tokenizer moves with it; and what it says does not depend on where it is."""
    before = say(str(trained), PROMPT, "--max-new-tokens", "5")
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    (trained / "data").rename(trained / "elsewhere")
    try:
        assert say(str(moved), PROMPT, "--max-new-tokens", "5")["tokens"] == before["tokens"]
        assert cli.run(["generate", str(trained), PROMPT]) == 2
    finally:
        (trained / "elsewhere").rename(trained / "data")


def test_a_checkpoint_through_links_and_from_inside(
    trained: Path, tmp_path: Path, say: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is the run's, whose folder is not the link's."""
    checkpoints = trained / "checkpoints"
    latest = checkpoints / "step_00000006"
    expected = say(str(latest), PROMPT, "--max-new-tokens", "3")["tokens"]
    (tmp_path / "one").symlink_to(latest)
    (tmp_path / "all").symlink_to(checkpoints)
    (tmp_path / "checkpoints").symlink_to(checkpoints)
    named = [tmp_path / "one", tmp_path / "all", tmp_path / "checkpoints" / latest.name]
    for folder, word in (*((tmp_path, str(path)) for path in named), (checkpoints, latest.name), (latest, ".")):
        monkeypatch.chdir(folder)
        assert say(word, PROMPT, "--max-new-tokens", "3")["tokens"] == expected, (folder, word)


def test_a_run_in_bf16(trained: Path, tmp_path: Path, say: Callable[..., dict[str, Any]]) -> None:
    """Its model is all bf16, as in training: megatron-core's linear layers take no other input."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    path = copy / "checkpoints" / "step_00000006" / "mup.json"
    record = json.loads(path.read_text())
    record["config"]["training"]["precision"] = "bf16"
    path.write_text(json.dumps(record))
    seal(path.parent)
    assert len(say(str(copy), PROMPT, "--max-new-tokens", "5")["tokens"]) == 5


def test_a_run_that_this_machine_could_not_train(
    trained: Path, tmp_path: Path, say: Callable[..., dict[str, Any]]
) -> None:
    """Trained with Apex on many GPUs, from a DeepSpeed JSON that is elsewhere: its text is the same here."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    path = copy / "checkpoints" / "step_00000006" / "mup.json"
    record = json.loads(path.read_text())
    there = {
        "model": {"norm_implementation": "apex", "core_attention": "sdpa"},
        "optimizer": {"implementation": "apex"},
        "parallel": {"tensor_model_parallel_size": 8, "zero_stage": 3, "deepspeed_config": "elsewhere.json"},
    }
    for section, keys in there.items():
        record["config"][section] |= keys
    path.write_text(json.dumps(record))
    seal(path.parent)
    with pytest.raises(ConfigError, match=r"optimizer\.implementation: apex computes on CUDA alone"):
        resolve(parse_config(record["config"], "there"), 8, trains=False)  # negative control: it is not resolved anew
    words = [PROMPT, "--max-new-tokens", "8", "--top-k", "1"]
    assert say(str(copy), *words)["tokens"] == say(str(trained), *words)["tokens"]


def damage(folder: Path, what: str) -> None:
    """Does something to a copy of a run."""
    checkpoint = folder / "checkpoints" / "step_00000006"
    record = json.loads((checkpoint / "mup.json").read_text())
    if what == "record":
        (checkpoint / "mup.json").write_text("{")
    elif what == "no config":
        (checkpoint / "mup.json").write_text(json.dumps({"format": record["format"]}))
    elif what == "format":
        (checkpoint / "mup.json").write_text(json.dumps({**record, "format": 99}))
    elif what == "tokenizer":
        (folder / "data" / "tokenizer.model").unlink()
    elif what == "other data":
        (folder / "data" / "prepared.json").write_text(json.dumps({"digest": "another"}))
    elif what == "weights":
        for path in checkpoint.glob("*.distcp"):
            path.write_bytes(path.read_bytes()[:1000])
    elif what == "other model":
        record["config"]["model"]["ffn_hidden_size"] *= 2
        (checkpoint / "mup.json").write_text(json.dumps(record))
    elif what == "no checkpoint":
        shutil.rmtree(folder / "checkpoints")
    if what in ("record", "no config", "format", "other model"):
        seal(checkpoint)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("record", "mup.json cannot be read"),
        ("no config", "mup.json: expected a JSON object with format, step and config"),
        ("format", "step_00000006: written in format 99; this version reads format"),
        ("tokenizer", "tokenizer.model: the tokenizer that the run trained"),
        ("other data", "prepared.json: prepared anew for other data"),
        ("weights", "distcp does not match its checksum"),
        ("other model", "linear_fc1.weight is of shape [160, 96]; expected [320, 96]"),
        ("no checkpoint", "no checkpoint is here"),
    ],
)
def test_what_is_damaged_or_gone(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, sentence: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    damage(copy, what)
    refused(capfd, sentence, str(copy), PROMPT)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}/none", PROMPT], "none: no such folder"),
        (["{run}"], "Missing argument 'PROMPT'"),
        (["{run}", PROMPT, "--top-k", "0"], "--top-k"),
        (["{run}", PROMPT, "--top-p", "2"], "--top-p: expected a number > 0 and <= 1, found 2.0"),
        (["{run}", PROMPT, "--temperature", "-1"], "--temperature: expected a number >= 0"),
        (["{run}", PROMPT, "--max-new-tokens", "0"], "--max-new-tokens"),
        (["{run}", PROMPT, "--max-new-tokens", "500"], "32 positions that the model learned"),
    ],
    ids=lambda value: value[-1][:20] if isinstance(value, list) else "",
)
def test_bad_input(trained: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    refused(capfd, sentence, *(argument.replace("{run}", str(trained)) for argument in arguments))


def refused(capfd: pytest.CaptureFixture[str], sentence: str, *arguments: str) -> None:
    """Exit status 2, one sentence, nothing said; and the process is as it was."""
    assert cli.run(["generate", *arguments]) == 2
    captured = capfd.readouterr()
    assert sentence in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
    assert not torch.distributed.is_initialized()


def test_a_launcher_is_refused(
    trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["generate", str(trained), PROMPT]) == 2
    assert "generate runs in one process" in capfd.readouterr().err
