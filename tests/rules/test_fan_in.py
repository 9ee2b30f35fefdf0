"""The baselines `fan_in` and `per_layer`: initial values as 1/sqrt(fan-in), no multipliers, and one rate, or each
matrix's as 1/fan-in (docs/parametrization.md, 8)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from mup_megatron.config import PARAMETRIZATIONS, Config, derive
from mup_megatron.data.prepare import prepare
from mup_megatron.model.build import parametrize
from mup_megatron.proof.reverse import small_model
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies, proof_bodies
from tests.helpers.configs import HEAD_SIZE, MIXED, MOE, VOCABULARY, make
from tests.helpers.distributed import Ranks

LAYER = "decoder.layers.1."
SIZES = {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2}
PLAIN = {"model": {"num_layers": 2, **SIZES}, "base": SIZES}


def apply(growth: dict[str, Any], architecture: str = "gpt3", **overrides: Any) -> Parametrization:
    return parametrize(make(growth, architecture, **{"parametrization__name": "fan_in", **overrides}), VOCABULARY)


def stds(parametrization: Parametrization) -> dict[str, Any]:
    """Deviations by name; one number where all blocks have it."""
    found = {}
    for name, tensor in parametrization.tensors.items():
        values = set(tensor.init_std.values())
        found[name] = values.pop() if len(values) == 1 else tensor.init_std
    return found


def test_init_by_hand() -> None:
    """gpt3, hidden ×3/2, FFN ×5/2, heads ×2; init std 0.05, and 0.05 / sqrt(2·2 layers) of output projections."""
    found = stds(apply(MIXED))
    expected = {
        "embedding.word_embeddings.weight": 0.05 / math.sqrt(3 / 2),  # tied: the head's fan-in is the hidden size
        "embedding.position_embeddings.weight": 0.05,
        LAYER + "self_attention.linear_qkv.weight": 0.05 / math.sqrt(3 / 2),
        LAYER + "self_attention.linear_proj.weight": 0.025 / math.sqrt(2),
        LAYER + "mlp.linear_fc1.weight": 0.05 / math.sqrt(3 / 2),
        LAYER + "mlp.linear_fc2.weight": 0.025 / math.sqrt(5 / 2),
        LAYER + "mlp.linear_fc1.bias": 0,
        LAYER + "input_layernorm.weight": 0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_init_of_an_untied_head_and_of_fixed_key_value_heads() -> None:
    """llama, hidden ×2, FFN ×3: an embedding is no product; keys and values take no factor g, whatever the rule."""
    found = stds(apply(HEAD_SIZE, "llama"))
    assert found["embedding.word_embeddings.weight"] == 0.05
    assert found["output_layer.weight"] == pytest.approx(0.05 / math.sqrt(2))
    assert found[LAYER + "mlp.linear_fc2.weight"] == pytest.approx(0.025 / math.sqrt(3))
    model = {**HEAD_SIZE["model"], "num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 8}
    growth = {"model": model, "base": {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}}
    found = stds(apply(growth, "llama", parametrization__fixed_fan_out_init="output_like"))
    assert found[LAYER + "self_attention.linear_qkv.weight"] == pytest.approx(0.05 / math.sqrt(2))


def test_init_of_a_router() -> None:
    """Hidden ×3/2, expert FFN ×5/2: a router is a product like another."""
    found = stds(apply(MOE, "llama"))
    assert found[LAYER + "mlp.router.weight"] == pytest.approx(0.05 / math.sqrt(3 / 2))
    assert found[LAYER + "mlp.experts.local_experts.0.linear_fc2.weight"] == pytest.approx(0.025 / math.sqrt(5 / 2))


@pytest.mark.parametrize(("growth", "architecture"), [(MIXED, "gpt3"), (HEAD_SIZE, "llama"), (MOE, "llama")])
def test_one_rate_and_no_multipliers(growth: dict[str, Any], architecture: str) -> None:
    parametrization = apply(growth, architecture, hparams__lr=3e-3, parametrization__depth="completep")
    for name, tensor in parametrization.tensors.items():
        decay = 1 if tensor.shape.spec.is_decayed else 0
        assert (tensor.lr, tensor.eps_multiplier, tensor.weight_decay_multiplier) == (3e-3, 1, decay), name
        assert tensor.forward_multiplier == 1, name
    assert len(parametrization.groups) == 2
    forward = parametrization.forward
    assert (forward.readout, forward.embedding, forward.residual) == (1, 1, 1)
    assert forward.softmax_scale == 1 / math.sqrt(growth["model"]["kv_channels"])


def test_deviations_fall_as_the_root_of_the_fan_in() -> None:
    """Over widths 32 to 512 each product's deviation has slope -1/2, whatever else grows; all else stays."""
    grown = [derive(make(PLAIN, "llama"), grow(factor)) for factor in (1, 4, 16)]
    tables = [stds(parametrize(config, VOCABULARY)) for config in grown]
    for name, first in tables[0].items():
        product = first and "embedding" not in name
        slopes = [math.log(b[name] / a[name], 4) if first else 0.0 for a, b in pairwise(tables)]
        assert slopes == pytest.approx([-0.5 if product else 0.0] * 2), name


def grow(factor: int) -> dict[str, Any]:
    return {"parametrization.name": "fan_in", **{f"model.{name}": size * factor for name, size in SIZES.items()}}


def test_the_depth_is_the_models_own() -> None:
    """Megatron's 1/sqrt(2L), as in the standard parametrization; another depth than the base's is no error."""
    sizes = {**MIXED["model"], **MIXED["base"]}
    config = make({"model": {**sizes, "num_layers": 8}, "base": {**MIXED["base"], "num_layers": 2}}, "gpt3",
                  parametrization__name="fan_in")  # fmt: skip
    assert stds(parametrize(config, VOCABULARY))[LAYER + "mlp.linear_fc2.weight"] == pytest.approx(0.05 / 4)


def per_layer(growth: dict[str, Any], architecture: str) -> Parametrization:
    return apply(growth, architecture, parametrization__name="per_layer", hparams__lr=1.0)


@pytest.mark.parametrize(("growth", "architecture"), [(MIXED, "gpt3"), (HEAD_SIZE, "llama"), (MOE, "llama")])
def test_per_layer_is_fan_in_but_for_the_rates(growth: dict[str, Any], architecture: str) -> None:
    """Decay is decoupled and keeps rate times decay, as the config says of any parametrization."""
    ours, theirs = per_layer(growth, architecture), apply(growth, architecture, hparams__lr=1.0)
    assert (stds(ours), ours.forward) == (stds(theirs), theirs.forward)
    for name, tensor in ours.tensors.items():
        assert (tensor.eps_multiplier, tensor.forward_multiplier) == (1, 1), name
        decay = 1 if tensor.shape.spec.is_decayed else 0
        assert tensor.weight_decay_multiplier * tensor.lr_multiplier == pytest.approx(decay), name


def test_rates_per_layer_by_hand() -> None:
    """gpt3, head tied, hidden ×3/2, FFN ×5/2, heads ×2; llama, head its own, hidden ×2, FFN ×3: a matrix takes 1 over
    its fan-in, as Everett et al. have it (2407.05872, full alignment)."""
    found = {name: tensor.lr_multiplier for name, tensor in per_layer(MIXED, "gpt3").tensors.items()}
    expected = {
        "embedding.word_embeddings.weight": 2 / 3,  # the head's
        "embedding.position_embeddings.weight": 1,
        LAYER + "self_attention.linear_qkv.weight": 2 / 3,
        LAYER + "self_attention.linear_proj.weight": 1 / 2,
        LAYER + "mlp.linear_fc1.weight": 2 / 3,
        LAYER + "mlp.linear_fc2.weight": 2 / 5,
        LAYER + "mlp.linear_fc1.bias": 1,
        LAYER + "input_layernorm.weight": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    found = {name: tensor.lr_multiplier for name, tensor in per_layer(HEAD_SIZE, "llama").tensors.items()}
    expected = {
        "embedding.word_embeddings.weight": 1,
        "output_layer.weight": 1 / 2,
        LAYER + "mlp.linear_fc2.weight": 1 / 3,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_per_layer_is_for_adam() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name: sgd: parametrization\.name: per_layer is for adam"):
        make(MIXED, "gpt3", optimizer__name="sgd", parametrization__name="per_layer")


def named(growth: dict[str, Any], name: str) -> Config:
    return make(growth, "gpt3", parametrization__name=name, parallel__zero_stage=1)


def losses(ranks: Ranks, growth: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in PARAMETRIZATIONS:
        config = named(growth, name)
        prepare(config)
        found[name] = ranks.run(1, bodies.train, config=config, steps=4)[0]["losses"]
    return found


def test_at_the_base_all_are_one_model(ranks: Ranks) -> None:
    """Initial values, groups and four losses, to the last bit."""
    at_base = {"model": {**MIXED["model"], **MIXED["base"]}, "base": MIXED["base"]}
    tables = [parametrize(named(at_base, name), VOCABULARY) for name in PARAMETRIZATIONS]
    assert len(PARAMETRIZATIONS) == 6
    for table in tables:
        assert (table.tensors, table.forward) == (tables[0].tensors, tables[0].forward)
    found = losses(ranks, at_base)
    assert all(each == found["mup"] for each in found.values())


def test_off_the_base_each_is_another(ranks: Ranks) -> None:
    """Negative control of the comparison above: it sees one from another before any step, or after the first with a
    rate where only rates differ."""
    found = losses(ranks, MIXED)
    assert len({tuple(each) for each in found.values()}) == len(PARAMETRIZATIONS)
    assert len({each[0] for each in found.values()}) == len(PARAMETRIZATIONS) - 1
    assert found["per_layer"][0] == found["fan_in"][0]


def slopes(ranks: Ranks, point: str) -> dict[tuple[str, str, int], float]:
    config = make(PLAIN, "llama", hparams__lr=2e-3, hparams__weight_decay=0.0)
    options = {"factors": (1, 4, 16), "steps": 3, "seeds": 1, "compare": False, "point": point}
    result = ranks.run(1, proof_bodies.check, config=config, options=options)[0]
    assert result["judged"] == point
    assert not result["passed"]
    return {(each["name"], each["quantity"], each["step"]): each["slope"] for each in result["slopes"][point]}


def test_it_is_fair_at_the_start_and_fails_afterwards(ranks: Ranks) -> None:
    """At step 0 every output keeps its size, which the standard parametrization breaks; updates of one rate do not."""
    fair, constant = slopes(ranks, "fan_in"), slopes(ranks, "standard")
    start = {name: slope for (name, quantity, step), slope in fair.items() if (quantity, step) == ("output", 0)}
    assert "output_layer" in start
    off = {name: slope for name, slope in start.items() if abs(slope) > 0.25}
    assert not off
    assert constant["output_layer", "output", 0] > 0.4  # 1/2 in the limit
    assert constant[LAYER + "mlp", "output", 0] > 0.75  # two products: 1
    # Attention's first input does not change: a step of one rate moves W x by the fan-in, so the output as width.
    assert fair["decoder.layers.0.self_attention", "change", 1] == pytest.approx(1, abs=0.25)


def test_without_a_base() -> None:
    with pytest.raises(ConfigError, match="base: missing; expected the sizes that grow"):
        make({"model": MIXED["model"], "base": {}}, "gpt3", parametrization__name="fan_in")


def test_it_cannot_be_reversed() -> None:
    with pytest.raises(ConfigError, match=r"parametrization\.name: fan_in gives every tensor"):
        small_model(named(MIXED, "fan_in"))
