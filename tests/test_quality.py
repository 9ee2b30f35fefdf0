"""benchmarks/quality.py: held-out text is not trained on, tasks have the answers that they say, and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality
from mup_megatron.config import derive, load_config, parse_overrides


def _passage(number: int) -> list[str]:
    letters = "abcdefghijklmnopqrst"
    return [f"w{letters[number]}" + letters[at % 20] * (1 + at // 20) for at in range(39)] + ["end"]


def test_no_held_out_document_is_trained_on(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(31)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "english.jsonl").write_text(lines)
    quality.make_text(tmp_path, tasks=0)
    read = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "held_out")}
    texts = {name: [json.loads(line)["text"] for line in found] for name, found in read.items()}
    assert texts["held_out"] == ["document 0", "document 15", "document 30"]
    assert texts["train"] == [text for text in documents if text not in texts["held_out"]]


def test_a_choice_has_its_own_ending_at_its_label_and_three_of_other_passages() -> None:
    found = [_passage(number) for number in range(20)]
    lines = quality.choices(found)
    for number, line in enumerate(lines):
        assert line["context"] == " ".join(found[number][:32])
        assert line["endings"][line["label"]] == " ".join(found[number][32:])
        assert len(set(line["endings"])) == 4
    assert {line["label"] for line in lines} == {0, 1, 2, 3}


def test_a_last_word_is_of_letters_and_what_follows_it_is_cut() -> None:
    words = [f"w{at}" for at in range(40)]
    words[30] = "answer"
    assert quality.last_words([words]) == [{"text": " ".join([*words[:30], "answer"])}]
    words[30], words[3] = "w30", "early"  # too little context
    assert quality.last_words([words]) == []


def _runs(**bits: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Of the smaller size; the larger one ends 0.1 lower everywhere."""
    return [
        {
            "model": f"{kind}{size}",
            "seed": seed,
            "figures": {"results": [{"task": "perplexity", "metrics": {"bits_per_byte": value - 0.1 * bool(size)}}]},
        }
        for kind, values in bits.items()
        for size in quality.SIZES
        for seed, value in reversed(list(enumerate(values)))  # seeds are paired by number, not by place
    ]


def test_the_verdict_is_by_the_interval_of_the_seeds_differences() -> None:
    """Of three differences -0.1, -0.12, -0.14: -0.12 ± 4.303 * 0.02 / sqrt(3), by hand."""
    runs = _runs(transferred=(2.0, 2.1, 2.2), tuned=(2.1, 2.22, 2.34), defaults=(2.5, 2.6, 2.7))
    apart = quality.ahead(runs, "transferred", "tuned")
    assert apart.mean == pytest.approx(-0.12)
    assert apart.half == pytest.approx(0.04969, abs=1e-4)
    assert quality.judged(runs) == {"reasons": [], "open": []}
    worse = quality.judged(_runs(transferred=(2.1, 2.22, 2.34), tuned=(2.0, 2.1, 2.2), defaults=(2.5, 2.6, 2.7)))
    assert worse["open"] == []
    assert worse["reasons"][0] == "transferred against tuned: +0.120 ± 0.050 bits per byte"
    assert worse["reasons"][1].startswith("transferred, twice the parameters against tuned: ")
    undecided = quality.judged(_runs(transferred=(2.0, 2.1, 2.2), tuned=(2.1, 2.22, 2.1), defaults=(2.5, 2.6, 2.7)))
    assert undecided["reasons"] == []
    assert [said.partition(":")[0] for said in undecided["open"]] == [
        "transferred against tuned",
        "transferred, twice the parameters against tuned",
    ]


def test_a_model_is_searched_as_it_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tuned model's search is of its own size and parametrization; the proxy's serves both sizes."""
    record = {
        "values": {"lr": 2e-3},
        "tuned": ["lr"],
        "study": {"interior": {"lr": True}},
        "budget": {"trials": 4, "spent": {"flops": 8.0}, "target": {"flops": 4.0}},
    }
    asked: list[tuple[str, ...]] = []

    def mup_megatron(*words: str) -> None:
        asked.append(words)
        (folder,) = (Path(word.removeprefix("run.dir=")) for word in words if word.startswith("run.dir="))
        folder.mkdir()
        (folder / "transfer.json").write_text(json.dumps(record))

    monkeypatch.setattr(quality, "RUNS", tmp_path)
    monkeypatch.setattr(quality, "mup_megatron", mup_megatron)
    found = {model: quality.searched(model, 1) for model in quality.MODELS}
    assert found["defaults"] is None
    assert found["transferred"] == found["transferred, twice the parameters"] == found["tuned"]
    assert len(asked) == 3
    for (hidden, heads), words in zip(quality.SIZES.values(), asked[1:], strict=True):
        given = parse_overrides([word for word in words if "=" in word])
        config = derive(load_config(quality.CONFIG), given)
        assert config.model.hidden_size == config.proxy_model.hidden_size == hidden
        assert config.model.num_attention_heads == config.proxy_model.num_attention_heads == heads
        assert config.parametrization.name == "standard"
        assert list(config.tuning.search) == ["lr"]
