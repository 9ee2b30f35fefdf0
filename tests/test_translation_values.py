"""benchmarks/translation.py: which values it takes, how it trains with them, and what is said of the scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import translation
from benchmarks.evidence import overview, searches
from benchmarks.translation import OWN, PROXY, TUNED
from mup_megatron.config import derive, load_config, parse_overrides


def point(lr: float, loss: float) -> dict[str, Any]:
    return {"lr": lr, "output_multiplier": 2.0, "losses": {"100": 9 - loss, "400": loss}}


def test_the_values_are_the_best_of_either_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loss at the last step, which the one before orders the other way round."""
    path = tmp_path / translation.TABLES
    path.parent.mkdir()
    tables = [[point(0.1, 4.0), point(0.2, 3.5), point(0.4, 5.0)], [point(0.1, 3.0), point(0.2, 3.25)]]
    path.write_text(json.dumps({"tables": tables}))
    monkeypatch.setattr(translation, "FOLDER", tmp_path)
    assert translation.found_in_tables() == {
        PROXY: {"lr": 0.2, "output_multiplier": 2.0},
        OWN: {"lr": 0.1, "output_multiplier": 2.0},
    }


def test_a_model_is_trained_once_and_judged_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def mup_megatron(*words: str) -> None:
        asked.append(words)
        (folder,) = (Path(word.removeprefix("run.dir=")) for word in words if word.startswith("run.dir="))
        folder.mkdir()
        lines = [{"step": 600, "eval_loss": 3.0, "bleu": 2.0}, {"step": 2400, "loss": 1.0}]
        lines.append({"step": 2400, "eval_loss": 2.5, "bleu": 20.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(translation, "RUNS", tmp_path)
    monkeypatch.setattr(translation, "mup_megatron", mup_megatron)
    for model, name in ((TUNED, "standard"), (PROXY, "mup")):
        for _ in range(2):
            found = translation.judge(model, {"lr": 0.25}, seed=2)
            assert (found["seed"], found["loss"], found["bleu"]) == (2, 2.5, 20.0)
        config = derive(load_config(translation.CONFIG), parse_overrides([w for w in asked[-1] if "=" in w]))
        assert (config.hparams.lr, config.run.seed, config.parametrization.name) == (0.25, 2, name)
        assert (config.training.train_steps, config.model.hidden_size) == (2400, 128)
        assert config.hparams.init_method_std == (0.02 if model == TUNED else 0.05)
    assert len(asked) == 2


def test_the_rate_is_searched_on_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def mup_megatron(*words: str) -> None:
        asked.append(words)
        (tmp_path / "rates").mkdir()
        (tmp_path / "rates" / "transfer.json").write_text('{"values": {"lr": 0.5}}')

    monkeypatch.setattr(translation, "RUNS", tmp_path)
    monkeypatch.setattr(translation, "mup_megatron", mup_megatron)
    assert translation.tuned_rate(1) == translation.tuned_rate(1) == {"values": {"lr": 0.5}}
    (words,) = asked
    config = derive(load_config(translation.CONFIG), parse_overrides([word for word in words if "=" in word]))
    assert config.proxy_model.hidden_size == config.model.hidden_size == 128
    assert config.proxy_model.ffn_hidden_size == config.model.ffn_hidden_size == 512
    assert (config.parametrization.name, config.training.train_steps) == ("standard", 400)
    assert list(config.tuning.search) == ["lr"]
    assert config.tuning.trials == len(translation.RATES)


def test_the_scores_are_compared_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of 1, 2 and 3: 2 ± 4.303 / sqrt(3) by Student's t; and of -1, 0 and 1, which decide nothing."""
    scores = {PROXY: (20.0, 21.0, 22.0), TUNED: (19.0, 19.0, 19.0), OWN: (21.0, 21.0, 21.0)}
    runs: list[dict[str, Any]] = [
        {"model": model, "seed": seed, "bleu": score, "loss": 3.0, "values": {"hparams.lr": 0.004}}
        for model, each in scores.items()
        for seed, score in reversed(list(enumerate(each)))
    ]
    record = searches.record
    held = {"runs": runs, "rates": {"0.001": 4.0, "0.002": 5.0}}
    monkeypatch.setattr(searches, "record", lambda path: held if path == searches.BLEU else record(path))
    tuned = searches.in_bleu(TUNED)
    assert (tuned.mean, tuned.half) == (pytest.approx(2.0), pytest.approx(2.484, abs=1e-3))
    assert searches.said_of_bleu().startswith("In BLEU the proxy's values end not told apart from the tuned standard")
    for run in runs:
        run["bleu"] += 2.0 * (run["model"] == PROXY)
    assert overview._translates_better(TUNED) == "**passed**: +4.000 ± 2.484 BLEU"
    assert overview._translates_better(OWN) == "**undecided**: +2.000 ± 2.484 BLEU"
    for run in runs:
        run["bleu"] += 10.0 * (run["model"] == OWN)
    assert overview._translates_better(OWN).startswith("**failed**: -8.000")
    head, proxy, own, standard = searches.bleu()
    assert proxy == [PROXY, "6.5", "0.004", "3.000 ± 0.000", "23.0 ± 0.6"]
    assert (own[1], standard[1]) == ("60", "2")
    assert head[-1] == "BLEU"
