"""Ranges of values: shares by hand, over ranks, and what a coordinate check tells of a real model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mup_megatron import cli
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof import sums
from mup_megatron.proof.ranges import range_lines, range_rows
from mup_megatron.report.ranges import draw_ranges
from tests.helpers import proof_bodies
from tests.helpers.configs import make
from tests.helpers.distributed import Ranks

# The largest finite numbers: e4m3 448, e5m2 57344, bf16 3.39e38. The smallest above 0: 2^-9, 2^-16, 2^-133. Half of
# them is a tie, which goes to the even neighbour, 0.
BY_HAND = [
    0.0,  # counts in the mean square alone
    1.0,
    -448.0,  # e4m3's largest
    -480.0,  # beyond it
    57344.0,  # e5m2's largest, beyond e4m3's
    65536.0,  # beyond both
    2.0**-9,  # e4m3's smallest
    -(2.0**-10),  # rounds to 0 in e4m3
    2.0**-17,  # and in e5m2
    2.0**-134,  # and in bf16
    3.4e38,  # beyond all three
]
SHARES = {
    "overflow bf16": 1 / 10,
    "underflow bf16": 1 / 10,
    "overflow e4m3": 4 / 10,
    "underflow e4m3": 3 / 10,
    "overflow e5m2": 2 / 10,
    "underflow e5m2": 2 / 10,
}


def of_numbers(rank: Rank, *, parts: list[list[float]]) -> dict[str, list[float]]:
    found = sums.Ranges()
    for number, part in enumerate(parts):
        if number % rank.world_size == rank.rank:
            found.add("x", torch.tensor(part))
    return found.told()


@pytest.mark.parametrize("parts", [[BY_HAND], [BY_HAND[:4], BY_HAND[4:]]], ids=["whole", "two parts"])
def test_shares_by_hand(ranks: Ranks, parts: list[list[float]]) -> None:
    told = dict(zip(sums.COLUMNS, ranks.run(1, of_numbers, parts=parts)[0]["x"], strict=True))
    assert told.pop("largest") == pytest.approx(3.4e38)
    assert told.pop("rms") == pytest.approx(3.4e38 / math.sqrt(11))
    assert told == {name: pytest.approx(share) for name, share in SHARES.items()}


def test_two_ranks_hold_it(ranks: Ranks) -> None:
    """Each half on a rank of its own, as under tensor parallelism: the numbers of the whole, on both."""
    parts = [BY_HAND[:4], BY_HAND[4:]]
    one, two = ranks.run(1, of_numbers, parts=parts)[0], ranks.run(2, of_numbers, parts=parts)
    assert two == [one, one]
    # Negative control: half of the numbers alone has other shares.
    assert ranks.run(1, of_numbers, parts=parts[:1])[0] != one


def masked(rank: Rank) -> list[float]:
    found = sums.Ranges()
    found.add("x", torch.tensor([3.0, 4.0, 0.0, 0.0]), count=2)
    return found.told()["x"]


def test_masked_numbers_do_not_count(ranks: Ranks) -> None:
    assert ranks.run(1, masked)[0][:2] == [4.0, math.sqrt(12.5)]


def check(ranks: Ranks, **keys: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
    config = make({"model": {"num_layers": 2, **sizes}, "base": sizes}, "gpt3", **keys)
    options = {"factors": (1, 2), "steps": 1, "seeds": 1, "compare": False, "ranges": True}
    return ranks.run(1, proof_bodies.check, config=config, options=options)[0]


def test_of_a_model(ranks: Ranks, tmp_path: Path) -> None:
    """Weights are drawn with a known standard deviation, so the share that e4m3 rounds to 0 is known: erf."""
    result = check(ranks, hparams__init_method_std=2.0**-7)
    rows = {(row.quantity, row.name): row for row in range_rows(result)}
    word = rows["weight", "embedding.word_embeddings.weight"]
    assert word.rms[0] == pytest.approx(2.0**-7, rel=0.02)
    rounded = math.erf(2.0**-10 / (2.0**-7 * math.sqrt(2)))
    assert word.shares["underflow e4m3"] == pytest.approx(rounded, rel=0.1)
    assert word.shares["underflow bf16"] == 0.0
    fc1 = rows["weight", "decoder.layers.*.mlp.linear_fc1.weight"]
    assert fc1.rms[0] == pytest.approx(2.0**-7 / math.sqrt(2), rel=0.02)  # hidden, of twice the base's width
    assert {quantity for quantity, _ in rows} == {"weight", "output", "gradient", "weight_gradient"}
    assert ("weight_gradient", "decoder.layers.*.mlp.linear_fc1.weight") in rows
    assert rows["output", "decoder.layers.*.input_layernorm"].rms == pytest.approx((1.0, 1.0), rel=0.1)
    said = range_lines(result)
    assert "hidden size 64" in said[0]
    assert len(said) == 2 + len(rows)
    assert draw_ranges(result, tmp_path / "ranges.png").stat().st_size > 10_000
    json.dumps(result, allow_nan=False)


def test_thorough_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["coord-check", str(repository / "configs" / "demo.yaml"), "--thorough", "--ranges"]
    assert cli.run(arguments) == 2
    assert "expected no --ranges" in capsys.readouterr().err
