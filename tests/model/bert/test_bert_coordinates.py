"""The coordinate check of BERT: µP passes, the standard parametrization and a head without its multiplier fail."""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.proof.told import lines
from tests.helpers import proof_bodies
from tests.helpers.configs import make
from tests.helpers.distributed import Ranks

SIZES = {"hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4}
PLAIN = {"model": {"num_layers": 2, **SIZES}, "base": SIZES}
OPTIONS = {"factors": (1, 2, 4), "steps": 3, "seeds": 6, "compare": False}


def check(ranks: Ranks, *, keys: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    config = make(PLAIN, "bert", hparams__lr=2e-3, hparams__weight_decay=0.0, **(keys or {}))
    return ranks.run(1, proof_bodies.check, config=config, options={**OPTIONS, **options})[0]


def out_of_bounds(result: dict[str, Any], point: str) -> set[str]:
    return {name for name, each in result["verdicts"][point].items() if each["verdict"] == "out of bounds"}


@pytest.mark.slow
def test_mup_passes_and_standard_fails(ranks: Ranks) -> None:
    """Widths 64 to 256; next-sentence prediction adds a loss of eight samples, so it has a test of its own."""
    result = check(ranks, compare=True)
    assert not out_of_bounds(result, "mup"), lines(result)
    assert not result["silent"]
    assert not result["not_finite"]
    assert {"output_layer", "lm_head.dense", "encoder.layers.1.mlp"} <= out_of_bounds(result, "standard")


@pytest.mark.slow
def test_pooler_and_binary_head_are_within_bounds(ranks: Ranks) -> None:
    result = check(ranks, keys={"model__bert_binary_head": True})
    assert not out_of_bounds(result, "mup"), lines(result)
    assert {"pooler.dense", "binary_head", "embedding.tokentype_embeddings.weight"} <= set(result["verdicts"]["mup"])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["readout_multiplier", "hidden_rate"])
def test_a_broken_rule_fails(ranks: Ranks, rule: str) -> None:
    result = check(ranks, broken=rule)
    assert result["verdict"] == "failed", lines(result)
    named = {"readout_multiplier": "output_layer", "hidden_rate": "lm_head.dense.weight"}[rule]
    assert named in {name for each in result["verdicts"].values() for name in each if each[name]["verdict"] != "ok"}
