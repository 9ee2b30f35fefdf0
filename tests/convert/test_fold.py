"""Which tensor takes which factor, worked out by hand from the sizes; and what no tensor can take."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mup_megatron.convert.export.fold import fold
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.util.errors import ConfigError
from tests.helpers.configs import HEAD_SIZE, MLA, MOE, VOCABULARY, make

# On models whose hidden size is twice (HEAD_SIZE) or 3/2 times (MOE, MLA) the base's.
MULTIPLIERS = {
    "hparams__attention_multiplier": 2.0,
    "hparams__output_multiplier": 3.0,
    "hparams__embedding_multiplier": 0.25,
    "hparams__residual_multiplier": 5.0,
}


def folded(growth: Any, architecture: str = "llama", **overrides: Any) -> dict[str, dict[str | None, float]]:
    """Factors that are not 1."""
    upstream.prepare_process()
    found = fold(parametrize(make(growth, architecture, **{**MULTIPLIERS, **overrides}), VOCABULARY))
    return {name: factors for name, factors in found.items() if set(factors.values()) != {1.0}}


def in_layers(factors: dict[str, Any], layers: int = 2) -> dict[str, Any]:
    return {f"decoder.layers.{layer}.{name}": factor for layer in range(layers) for name, factor in factors.items()}


# Head size 24 over 16, so 2 · sqrt(16/24) of what megatron-core scales by, on query rows alone.
QUERY = {"query": pytest.approx(2 * math.sqrt(2 / 3)), "key": 1.0, "value": 1.0}


def test_untied() -> None:
    """Hidden size 64 over 32: 3/2 for the head. Nothing for norms."""
    assert folded(HEAD_SIZE) == {
        "embedding.word_embeddings.weight": {None: 0.25},
        "output_layer.weight": {None: 1.5},
        **in_layers(
            {
                "self_attention.linear_qkv.weight": QUERY,
                "self_attention.linear_proj.weight": {None: 5.0},
                "mlp.linear_fc2.weight": {None: 5.0},
            }
        ),
    }


def test_tied_with_biases() -> None:
    """The head has taken 1/4 from the embedding: 1.5 / 0.25 is left for the final norm, weight and bias."""
    assert folded(HEAD_SIZE, "gpt3") == {
        "embedding.word_embeddings.weight": {None: 0.25},
        "embedding.position_embeddings.weight": {None: 0.25},
        "decoder.final_layernorm.weight": {None: 6.0},
        "decoder.final_layernorm.bias": {None: 6.0},
        **in_layers(
            {
                f"{name}.{kind}": factors
                for name, factors in {
                    "self_attention.linear_qkv": QUERY,
                    "self_attention.linear_proj": {None: 5.0},
                    "mlp.linear_fc2": {None: 5.0},
                }.items()
                for kind in ("weight", "bias")
            }
        ),
    }


def test_a_depth_rule() -> None:
    """Two layers over one at exponent 1: half of 5."""
    found = folded(HEAD_SIZE, base__num_layers=1, parametrization__depth="completep")
    assert found["decoder.layers.1.mlp.linear_fc2.weight"] == {None: 2.5}


def test_qk_norm() -> None:
    """A norm undoes what the query rows would take; its gain (and bias, under LayerNorm) takes it."""
    found = folded(HEAD_SIZE, "gpt3", model__qk_layernorm=True)
    for kind in ("weight", "bias"):
        norm = f"decoder.layers.1.self_attention.q_layernorm.{kind}"
        assert found.get(norm) == {None: pytest.approx(2 * math.sqrt(2 / 3))}
        assert norm.replace("q_lay", "k_lay") not in found
        assert f"decoder.layers.1.self_attention.linear_qkv.{kind}" not in found


def test_norms_without_gains() -> None:
    """Those that are written have gains: the query norm's takes the factor there as well, and the final norm's."""
    tied: dict[str, Any] = {"model__share_embeddings_and_output_weights": True, "model__norm_gains": "none"}
    found = folded(HEAD_SIZE, model__qk_layernorm=True, **tied)
    assert found["decoder.final_layernorm.weight"] == {None: 6.0}
    gain = found["decoder.layers.0.self_attention.q_layernorm.weight"]
    assert gain == {None: pytest.approx(2 * math.sqrt(2 / 3))}


def test_experts() -> None:
    """Output projections of every expert and of the shared one; the router and its gate nothing."""
    found = folded(MOE, hparams__attention_multiplier=1.0)
    moe = "decoder.layers.1.mlp."
    assert {name for name in found if name.startswith(moe)} == {
        *(f"{moe}experts.local_experts.{expert}.linear_fc2.weight" for expert in range(4)),
        f"{moe}shared_experts.linear_fc2.weight",
    }
    assert not [name for name in found if "linear_qkv" in name]  # head size 8 over 8, and α = 1


def test_latent_attention() -> None:
    """Head size 20 over 12; the whole of the query, and none of the latents' norms."""
    found = folded(MLA)
    factor = pytest.approx(2 * math.sqrt(12 / 20))
    assert found["decoder.layers.0.self_attention.linear_q_up_proj.weight"] == {"nope": factor, "rope": factor}
    attention = {name for name in found if "layers.0.self_attention" in name}
    names = ("linear_q_up_proj", "linear_proj")
    assert attention == {f"decoder.layers.0.self_attention.{name}.weight" for name in names}


def test_multi_token_prediction_is_left_alone() -> None:
    assert not [name for name in folded(HEAD_SIZE, model__mtp_num_layers=1) if name.startswith("mtp.")]


def test_a_tied_head_without_a_final_norm() -> None:
    keys: dict[str, Any] = {
        "model__share_embeddings_and_output_weights": True,
        "model__without_norms": ["final_layernorm"],
    }
    with pytest.raises(
        ConfigError, match=r"model\.without_norms: names the final norm, .* take the factor 6 of a head"
    ):
        folded(HEAD_SIZE, **keys)
    neutral: dict[str, Any] = {
        **keys,
        "hparams__output_multiplier": 2.0,
        "hparams__embedding_multiplier": 1.0,
    }  # 2 · 1/2 / 1
    assert "decoder.final_layernorm.weight" not in folded(HEAD_SIZE, **neutral)
    untied: dict[str, Any] = {**keys, "model__share_embeddings_and_output_weights": False}
    assert folded(HEAD_SIZE, **untied)["output_layer.weight"] == {None: 1.5}


def test_a_norm_of_queries_without_a_gain() -> None:
    with pytest.raises(ConfigError, match=r"model\.qk_l2_norm: undoes every scale .* attention's factor 1\.63299"):
        folded(HEAD_SIZE, model__qk_l2_norm=True)
    assert folded(MOE, model__qk_l2_norm=True, hparams__attention_multiplier=1.0)  # with no factor there is no question
