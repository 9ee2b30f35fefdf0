"""`ntk`, in which features do not move at infinite width (docs/parametrization.md, 8; Yang & Littwin, 2308.01814)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.proof.reverse import small_model
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies, proof_bodies
from tests.helpers.configs import HEAD_SIZE, MIXED, VOCABULARY, make
from tests.helpers.distributed import Ranks

LAYER = "decoder.layers.1."
SIZES = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
M = 3 / 2
"""Hidden size of MIXED over its base's."""
TWICE = {"model": {"num_layers": 2, **{name: 2 * size for name, size in SIZES.items()}}, "base": SIZES}
"""Of which every matrix has one rate under SGD."""


def named(growth: dict[str, Any], name: str, architecture: str = "gpt3", **more: Any) -> Config:
    return make(growth, architecture, parametrization__name=name, parallel__zero_stage=1, **more)


def test_by_hand() -> None:
    """gpt3 with a tied head, hidden ×3/2, FFN ×5/2, heads ×2: µP's rates times (3/2)^-1/2, its epsilon times the root.

    By hand: the logits' multiplier is 1/sqrt(3/2). A hidden matrix of fan-in ×3/2 has the rate m^-3/2.
    """
    found = parametrize(named(MIXED, "ntk", hparams__lr=1.0, optimizer__eps=1.0), VOCABULARY)
    assert found.forward.readout == pytest.approx(1 / math.sqrt(M))
    rates = {
        "embedding.word_embeddings.weight": M**-0.5,
        LAYER + "mlp.linear_fc1.weight": M**-1.5,
        LAYER + "mlp.linear_fc2.weight": (2 / 5) * M**-0.5,
        LAYER + "self_attention.linear_proj.weight": (1 / 2) * M**-0.5,
        LAYER + "mlp.linear_fc1.bias": M**-0.5,
        LAYER + "input_layernorm.weight": M**-0.5,
    }
    assert {name: found.tensors[name].lr_multiplier for name in rates} == pytest.approx(rates)
    epsilons = {
        "embedding.word_embeddings.weight": M**-0.5,  # µP's 1/m, times m^1/2
        LAYER + "mlp.linear_fc1.weight": (2 / 5) * M**0.5,
        LAYER + "mlp.linear_fc2.weight": M**-0.5,
    }
    assert {name: found.tensors[name].eps_multiplier for name in epsilons} == pytest.approx(epsilons)
    stds = {"embedding.word_embeddings.weight": 0.05, LAYER + "mlp.linear_fc1.weight": 0.05 / math.sqrt(M)}
    assert {name: found.tensors[name].init_std[None] for name in stds} == pytest.approx(stds)


def test_an_untied_head_starts_at_one_size() -> None:
    """llama, hidden ×2: the head's values keep their deviation, and its output is multiplied with 1/sqrt(2)."""
    found = parametrize(named(HEAD_SIZE, "ntk", "llama", hparams__lr=1.0), VOCABULARY)
    head = found.tensors["output_layer.weight"]
    assert (head.forward_multiplier, head.lr_multiplier) == pytest.approx((2**-0.5, 2**-0.5))
    assert head.init_std[None] == pytest.approx(0.05)
    model = HEAD_SIZE["model"]
    assert found.forward.softmax_scale == pytest.approx(1 / math.sqrt(model["kv_channels"]))


def test_sgd_takes_the_rate_by_1_over_m() -> None:
    both = {
        name: parametrize(named(TWICE, name, optimizer__name="sgd", hparams__lr=1.0), VOCABULARY).tensors
        for name in ("mup", "ntk")
    }
    for name, tensor in both["ntk"].items():
        assert tensor.lr_multiplier == pytest.approx(both["mup"][name].lr_multiplier / 2), name
        for block, weight in tensor.gradient_norm.items():
            assert weight == pytest.approx(both["mup"][name].gradient_norm[block] / 2), name


def losses(ranks: Ranks, config: Config) -> list[float]:
    prepare(config)
    found: list[float] = ranks.run(1, bodies.train, config=config, steps=4)[0]["losses"]
    return found


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_it_is_mup_with_three_other_values(ranks: Ranks, optimizer: str) -> None:
    """Of one width it is µP with a smaller rate, larger logits and epsilon; control: without one of these it is not."""
    power = 1.0 if optimizer == "sgd" else 0.5
    keys = {"optimizer.name": optimizer, "hparams.weight_decay": 0.0, "training.clip_grad": 0.0}
    mup = derive(named(TWICE, "mup"), keys)
    changed = {
        "hparams.lr": mup.hparams.lr * 2**-power,
        "hparams.output_multiplier": mup.hparams.output_multiplier * 2**0.5,
        "optimizer.eps": mup.optimizer.eps * 2**0.5,
    }
    found = losses(ranks, derive(mup, {"parametrization.name": "ntk"}))
    assert found == pytest.approx(losses(ranks, derive(mup, changed)), rel=1e-6)
    for left_out in ("hparams.lr", "hparams.output_multiplier"):
        without = {key: value for key, value in changed.items() if key != left_out}
        assert losses(ranks, derive(mup, without)) != pytest.approx(found, rel=1e-6), left_out


@pytest.mark.slow
def test_features_do_not_move(ranks: Ranks) -> None:
    """Over widths 32 to 512 features change as width^-1/2, in µP they keep their change; logits change as in µP.

    The check judges ntk by µP's sizes, so it names what is out of its bounds.
    """
    config = make(
        {"model": {"num_layers": 2, **SIZES}, "base": SIZES}, "gpt3", hparams__lr=1e-3, hparams__weight_decay=0.0
    )
    slopes = {}
    for point in ("mup", "ntk"):
        options = {"factors": (1, 4, 16), "steps": 2, "seeds": 2, "compare": False, "point": point}
        result = ranks.run(1, proof_bodies.check, config=config, options=options)[0]
        assert (point == "mup") or result["out_of_bounds"]
        for each in result["slopes"][point]:
            slopes[point, each["name"], each["quantity"], each["step"]] = each["slope"]
    feature = "decoder.final_layernorm"
    assert slopes["mup", feature, "change", 1] == pytest.approx(0, abs=0.15)
    assert slopes["ntk", feature, "change", 1] == pytest.approx(-0.5, abs=0.15)
    logits = "output_layer"
    assert slopes["ntk", logits, "output", 0] == pytest.approx(0, abs=0.15)
    assert slopes["mup", logits, "output", 0] == pytest.approx(-0.5, abs=0.15)
    for step in (1, 2):
        in_mup = slopes["mup", logits, "change", step]
        assert slopes["ntk", logits, "change", step] == pytest.approx(in_mup, abs=0.1)


def test_it_cannot_be_reversed() -> None:
    with pytest.raises(ConfigError, match=r"parametrization\.name: ntk gives every tensor"):
        small_model(named(MIXED, "ntk"))
