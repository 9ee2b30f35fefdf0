"""The evidence of one GPU: a search of the target beside one of its proxy, and what the pages say of the records."""

from __future__ import annotations

import copy
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import direct, trials
from benchmarks.evidence import wide
from mup_megatron.config import Config, derive
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.grid import Grid
from mup_megatron.util.errors import ConfigError
from tests.helpers.configs import make

SIZES = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2}
PROPORTIONAL = {"model": {"num_layers": 2, **{name: 2 * size for name, size in SIZES.items()}}, "base": SIZES}


def searched(**keys: Any) -> Config:
    search = {"lr": {"log_uniform": [1e-4, 1e-2]}, "output_multiplier": {"log_uniform": [0.5, 8.0]}}
    return make(PROPORTIONAL, proxy=SIZES, tuning__search=search, data__split="60,40,0", **keys)


def test_draws_are_log_uniform_and_their_seeds_own() -> None:
    config = searched()
    drawn = direct.draws_of(config, 400, seed=3)
    assert direct.draws_of(config, 4, seed=3) == drawn[:4]  # what 16 draws begin with is what 4 are
    assert direct.draws_of(config, 4, seed=4) != drawn[:4]
    assert all(1e-4 <= each["lr"] <= 1e-2 and 0.5 <= each["output_multiplier"] <= 8 for each in drawn)
    assert statistics.median(math.log10(each["lr"]) for each in drawn) == pytest.approx(-3, abs=0.15)
    with pytest.raises(ConfigError, match="not log_uniform"):
        direct.draws_of(derive(config, {"tuning.search": {"lr": {"choice": [1e-3]}}}), 1, seed=0)


def test_budgets_are_compared_by_hand() -> None:
    """Two repetitions; the target's first draw of the second diverged. A proxy's run costs an eighth."""
    result = {
        "budgets": [1, 2],
        "cost_of_a_proxy_run": 0.125,
        "repetitions": [
            {"direct": [5.0, 4.5], "transferred": [4.0, 4.0]},
            {"direct": [None, 4.0], "transferred": [4.5, 3.75]},
        ],
    }
    one, two = direct.compared(result)
    assert (one["direct"], one["mup"]) == ([5.0, math.inf], [4.0, 4.5])
    assert (two["direct"], two["mup"], two["difference"]) == ([4.5, 4.0], [4.0, 3.75], -0.375)
    assert [(row["mup_cost"], row["direct_cost"]) for row in (one, two)] == [(1.125, 1), (1.25, 2)]


@pytest.mark.slow
def test_a_small_search_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs: the draw that is best on the proxy trains the target, and the same command trains nothing again."""
    monkeypatch.setattr(direct, "BUDGETS", (1, 2))
    config = searched(training__train_steps=4, run__dir=str(tmp_path / "run"))
    said: list[str] = []
    grid = Grid(directory=tmp_path / "grid", rank=Rank(), workers=2, say=said.append)
    found = direct.measure(config, 2, "standard", 1, grid)
    (only,) = found["repetitions"]
    assert only["chosen"] == [0, min((0, 1), key=lambda draw: only["proxy"][draw])]
    assert only["transferred"][0] != only["direct"][0]
    runs = {path.stem: json.loads(path.read_text())["loss"] for path in (tmp_path / "grid" / "runs").glob("*.json")}
    assert only["transferred"] == [runs[f"mup-0-{draw}"] for draw in only["chosen"]]
    assert only["direct"] == [runs["standard-0-0"], runs["standard-0-1"]]
    again = direct.measure(config, 2, "standard", 1, grid)
    assert again["repetitions"] == found["repetitions"]
    assert said[-1].endswith("runs are there already")


@pytest.mark.slow
def test_trials_at_a_time(tmp_path: Path) -> None:
    config = searched(training__train_steps=4, tuning__train_steps=4, run__dir=str(tmp_path / "run"))
    found = trials.measure(config, 2, 1, tmp_path)
    assert (found["at_once"], found["trials"], len(found["losses"])) == (2, 2, 1)
    least = 3600 / max(found["seconds_of_a_trial"]["max"], 1e-9)
    assert found["trials_per_hour"] >= least


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    held = {path: copy.deepcopy(wide.record(path)) for path in (wide.RIVALS, wide.PER_LAYER, wide.DIRECT)}
    monkeypatch.setattr(wide, "record", held.__getitem__)
    return held


def test_five_repetitions_decide() -> None:
    """By hand: -0.193, -0.093, -0.233, -0.029 and -0.081 have mean -0.126, deviation 0.084; 2.776 · 0.084 / sqrt(5)."""
    said = wide.transfers_and_loses(wide.DIRECT_128)
    assert said.startswith("**passed**: with 16 draws a difference of -0.126 ± 0.105 nats, for 2.5 runs of the target")
    assert said.endswith("lower in every repetition with 16 draws")


def test_verdicts_follow_the_records(records: dict[str, Any]) -> None:
    """Each verdict turns where its record does: a rival that ends lower, one not told apart, a search that wins.

    Of the search by hand: differences of -0.33, -0.07 and -0.58 have an interval of 0.64, which holds 0.
    """
    assert [wide.ends_lower(name)[:8] for name in ("standard", "per_layer")] == ["**failed", "**undeci"]
    said = wide.transfers_and_loses(wide.DIRECT)
    assert said.startswith("**undecided**: with 16 draws a difference of -0.328 ± 0.639 nats")
    assert said.endswith("lower in every repetition with 1, 4, 16 draws")
    row = records[wide.PER_LAYER]["lines"]["per_layer"]["rows"][-1]
    place = records[wide.PER_LAYER]["values"].index(row["minimum"]["tried"])
    row["losses"][place] = [each - 0.5 for each in row["losses"][place]]
    assert wide.ends_lower("per_layer").startswith("**passed**")
    row["losses"][place] = [each + 1.0 for each in row["losses"][place]]
    assert wide.ends_lower("per_layer").startswith("**failed**")
    for each, word in ((0.5, "passed"), (-0.5, "failed")):
        for number, repetition in enumerate(records[wide.DIRECT]["repetitions"]):
            repetition["transferred"][2] = min(repetition["direct"]) - each - 0.01 * number
        assert wide.transfers_and_loses(wide.DIRECT).startswith(f"**{word}**")
    assert wide.transfers_and_loses(wide.DIRECT).endswith("lower in every repetition with 1, 4 draws")
