"""The coordinate check of an encoder-decoder: µP passes, the standard parametrization and single wrong rules fail."""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.data.prepare import prepare
from mup_megatron.proof.coord_check import _few_tokens
from mup_megatron.proof.told import lines
from tests.helpers import proof_bodies
from tests.helpers.configs import MIXED, make, make_t5
from tests.helpers.distributed import Ranks

# Everything grows but the head size; hidden size 32 to 512.
SIZES = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
GROWTH = {"model": {"num_layers": 2, "encoder_num_layers": 2, "kv_channels": 16, **SIZES}, "base": SIZES}
FACTORS = (1, 2, 4, 8, 16)


def config_of(lr: float = 8e-4) -> Config:
    config = make_t5(GROWTH, hparams__lr=lr, hparams__weight_decay=0.0)
    prepare(config)
    return config


def check(ranks: Ranks, config: Config, **options: Any) -> dict[str, Any]:
    defaults = {"factors": FACTORS, "steps": 3, "seeds": 4, "compare": False}
    return ranks.run(1, proof_bodies.check, config=config, options={**defaults, **options})[0]


def outside(result: dict[str, Any], which: str) -> set[str]:
    return {name for name, each in result["verdicts"][which].items() if each["verdict"] == "out of bounds"}


def test_both_sides_are_of_few_tokens() -> None:
    """The decoder's sequence is no longer than the encoder's: what pads would be measured as well."""
    config = make_t5(GROWTH, training__decoder_seq_length=24)
    assert _few_tokens(config, 1, growing=False) == {
        "training.micro_batch_size": 1,
        "training.global_batch_size": 2,
        "training.seq_length": 16,
        "training.decoder_seq_length": 16,
    }
    assert "training.decoder_seq_length" not in _few_tokens(make(MIXED), 1, growing=False)


@pytest.mark.slow
def test_mup_passes_and_standard_fails(ranks: Ranks) -> None:
    """At a rate with which the loss falls by half a nat in three steps.

    At 2e-3 the encoder's later gradients are what a few labels leave after their common part was learned: noise.
    """
    result = check(ranks, config_of(), compare=True)
    assert result["verdict"] == "passed", lines(result)
    assert not result["silent"]
    assert not result["not_finite"]
    attention = {f"{stack}.layers.1.self_attention" for stack in ("encoder", "decoder")}
    assert {*attention, "decoder.layers.1.cross_attention", "lm_head"} <= outside(result, "standard")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["hidden_rate", "readout_multiplier"])
def test_a_broken_rule_fails(ranks: Ranks, rule: str) -> None:
    result = check(ranks, config_of(), broken=rule)
    assert result["verdict"] == "failed", lines(result)
