"""`interpolate:INIT,LR`, a point between standard (0, 0) and µP (1, 1) (docs/parametrization.md, 8)."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.model.build import parametrize
from mup_megatron.rules.interpolation import Plane, multipliers_between
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import ConfigError
from tests.helpers.configs import HEAD_SIZE, MIXED, VOCABULARY, make

LAYER = "decoder.layers.1."
KEYS = {"hparams__lr": 1.0, "hparams__weight_decay": 1.0, "optimizer__eps": 1.0}


def table(growth: dict[str, Any], name: str, architecture: str = "gpt3", **more: Any) -> Parametrization:
    return parametrize(make(growth, architecture, parametrization__name=name, **{**KEYS, **more}), VOCABULARY)


def numbers(found: Parametrization) -> dict[str, Any]:
    """All that a run takes of a table."""
    return {
        "forward": found.forward,
        **{
            name: (row.init_std, row.lr, row.eps, row.weight_decay, row.theta, row.gradient_norm)
            for name, row in found.tensors.items()
        },
    }


def test_by_hand() -> None:
    """gpt3 with a tied head, hidden ×3/2, FFN ×5/2: µP's initial values to the power 1/2, its rates to 1/4."""
    found = table(MIXED, "interpolate:0.5,0.25", hparams__output_multiplier=3.0)
    fc1, words = found.tensors[LAYER + "mlp.linear_fc1.weight"], found.tensors["embedding.word_embeddings.weight"]
    assert fc1.init_std[None] == pytest.approx(0.05 * (3 / 2) ** -0.25)
    assert (fc1.lr, fc1.weight_decay) == pytest.approx(((3 / 2) ** -0.25, (3 / 2) ** 0.25))
    assert fc1.eps == pytest.approx((2 / 5) ** 0.25)
    assert (words.init_std[None], words.lr, words.eps) == pytest.approx((0.05, 1.0, (2 / 3) ** 0.25))
    assert found.forward.readout == pytest.approx(3.0 * (2 / 3) ** 0.5)


def test_an_untied_head_and_a_growing_head_size() -> None:
    """llama, hidden ×2, head size 16 to 24. The head's A = 1/2 is in its initial values and its rate."""
    found = table(HEAD_SIZE, "interpolate:0.5,0.25", "llama")
    head = found.tensors["output_layer.weight"]
    assert (head.init_std[None], head.lr, head.weight_decay) == pytest.approx((0.05 * 2**-0.5, 2**-0.25, 2**0.25))
    assert (head.forward_multiplier, found.forward.readout) == (1.0, 1.0)
    assert found.forward.softmax_scale == pytest.approx(24**-0.5 * (16 / 24) ** 0.125)
    # Of the invariant norm: W without A is A times µP's, whose weight is m, so its own is A² m = 1/m.
    assert table(HEAD_SIZE, "mup", "llama").tensors["output_layer.weight"].gradient_norm[None] == 2
    assert table(HEAD_SIZE, "interpolate:1,1", "llama").tensors["output_layer.weight"].gradient_norm[None] == 0.5
    assert head.gradient_norm[None] == pytest.approx(0.5**0.25)


def test_sgd_s_readout_has_the_square() -> None:
    """By abc-symmetry a rate of W is worth A² under SGD: µP's is m, of A = 1/m, so that of A = 1 is 1/m."""
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2}
    twice = {"model": {"num_layers": 2, **{name: 2 * size for name, size in sizes.items()}}, "base": sizes}
    found = table(twice, "interpolate:1,0.5", "llama", optimizer__name="sgd")
    mup = table(twice, "mup", "llama", optimizer__name="sgd")
    assert mup.tensors["output_layer.weight"].lr == pytest.approx(2)
    assert found.tensors["output_layer.weight"].lr == pytest.approx((2 * 2**-2) ** 0.5)


@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_standard_is_a_corner(architecture: str) -> None:
    assert numbers(table(MIXED, "interpolate:0,0", architecture)) == numbers(table(MIXED, "standard", architecture))


@pytest.mark.parametrize("scaling", ["none", "unit"])
def test_mup_is_a_corner(scaling: str) -> None:
    """With a tied head to the last number; the untied one's is the same by abc-symmetry (test_coord_check.py)."""
    more: dict[str, Any] = {"parametrization__scaling": scaling, "parametrization__batch": "power:0.5"}
    more |= {"hparams__per_tensor": {"mlp": {"lr": 3.0}}, "tuning__global_batch_size": 4}
    found, mup = (table(MIXED, name, **more) for name in ("interpolate:1,1", "mup"))
    assert numbers(found) == numbers(mup)
    assert numbers(table(MIXED, "interpolate:1,0.9", **more)) != numbers(mup)


def test_all_are_one_model_at_the_base() -> None:
    """Whatever a config says of single tensors and of the batch."""
    base = {"model": {**MIXED["model"], **MIXED["base"]}, "base": MIXED["base"]}
    more: dict[str, Any] = {"parametrization__batch": "sqrt_sde", "tuning__global_batch_size": 4}
    more |= {"hparams__per_tensor": {"mlp": {"lr": 3.0, "init": 2.0}}}
    points = (table(base, name, **more) for name in ("interpolate:0.3,0.7", "interpolate:0,0"))
    for found in points:
        assert found.says_the_same(table(base, "mup", **more))


def test_what_does_not_learn_stays_so() -> None:
    """A rate of 0, to whatever power; 0 to the power 0 is 1."""
    frozen = (Fraction(0), Fraction(1), Fraction(0))
    found = multipliers_between(Plane(0.0, 0.0), frozen, forward=Fraction(1), is_sgd=False)
    assert found == (0.0, 1.0, 0.0)


def refused(name: str, **more: Any) -> Config:
    return make(MIXED, "gpt3", parametrization__name=name, **more)


def test_refused() -> None:
    for name in ("interpolate", "interpolate:1", "interpolate:1,x", "interpolate:1,1,1", "between"):
        with pytest.raises(ConfigError, match=r"parametrization\.name: expected one of .*'ntk' or interpolate:INIT,LR"):
            refused(name)
    with pytest.raises(ConfigError, match=r"base\.num_layers: missing; parametrization\.depth"):
        refused("interpolate:0,1", parametrization__depth="completep")
    assert math.isclose(refused("interpolate:-0.5,1").parametrization.plane[0], -0.5)  # type: ignore[index]
