"""The rules on mixtures of experts, multi-latent attention and the rest, every number worked out by hand.

Base init std 0.05, two layers, so output projections take 0.05/sqrt(2·2) = 0.025. Growth: tests/helpers/configs.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import parametrize, unsharded_model
from mup_megatron.model.explain import explain
from mup_megatron.model.global_names import named_parameters
from mup_megatron.model.init import local_rows
from mup_megatron.model.layers.moe import global_expert_names
from mup_megatron.model.layers.residual import scaled_bias_dropout_add
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.patches import ALL_PATCHES, revert_patches
from mup_megatron.rules import formulas
from mup_megatron.rules.shapes import Init, expert_number
from mup_megatron.util.errors import ConfigError
from tests.helpers import bodies
from tests.helpers.configs import HEAD_SIZE, MIXED, MLA, MOE, make
from tests.helpers.distributed import Ranks
from tests.rules.test_parametrization import EMBEDDING, apply, numbers

ATTENTION = "decoder.layers.1.self_attention."
MLP = "decoder.layers.1.mlp."
THIRD = pytest.approx(1 / 3)


@pytest.fixture(scope="module", autouse=True)
def _patched() -> Iterator[None]:
    """MLA's rotary embedding and the expert bias are made on the current device."""
    upstream.prepare_process()
    yield
    revert_patches(ALL_PATCHES)


def close(value: float) -> Any:
    return pytest.approx(value)


def test_mixture_of_experts() -> None:
    """hidden ×3/2, expert FFN ×5/2, shared FFN ×3, dense FFN ×4 (layer 0)."""
    tensors = apply(MOE, "llama").tensors
    # Router and gate: fan-out fixed, always g.
    for name in ("router.weight", "shared_experts.gate_weight"):
        assert numbers(tensors[MLP + name]) == (close(2 / 3), 1, 1.5)
        assert tensors[MLP + name].init_std == {None: close(0.05 / 1.5)}
    for expert in range(4):
        fc1, fc2 = (tensors[f"{MLP}experts.local_experts.{expert}.linear_fc{i}.weight"] for i in (1, 2))
        assert numbers(fc1) == (close(2 / 3), close(2 / 5), 1.5)
        assert fc1.init_std == {block: close(0.05 / math.sqrt(1.5)) for block in ("gate", "up")}
        assert numbers(fc2) == (close(2 / 5), close(2 / 3), 2.5)
        assert fc2.init_std == {None: close(0.025 / math.sqrt(2.5))}
        assert fc1.shape.spec.expert
        assert fc2.shape.spec.expert
    fc1, fc2 = (tensors[f"{MLP}shared_experts.linear_fc{i}.weight"] for i in (1, 2))
    assert numbers(fc1) == (close(2 / 3), THIRD, 1.5)
    assert numbers(fc2) == (THIRD, close(2 / 3), 3)
    assert fc2.init_std == {None: close(0.025 / math.sqrt(3))}
    assert not fc1.shape.spec.expert
    fc1, fc2 = (tensors[f"decoder.layers.0.mlp.linear_fc{i}.weight"] for i in (1, 2))
    assert numbers(fc1) == (close(2 / 3), 0.25, 1.5)
    assert numbers(fc2) == (0.25, close(2 / 3), 4)
    assert fc2.init_std == {None: 0.0125}


def test_router_keeps_g_and_its_bias_is_drawn() -> None:
    tensors = apply(
        {**MOE, "base": {k: v for k, v in MOE["base"].items() if "shared" not in k}},
        "gpt3",
        parametrization__fixed_fan_out_init="hidden_like",
        model__moe_shared_expert_intermediate_size=None,
        model__moe_shared_expert_gate=False,
    ).tensors
    assert tensors[MLP + "router.weight"].init_std == {None: close(0.05 / 1.5)}
    bias = tensors[MLP + "router.bias"]
    assert numbers(bias) == (1, 1, 0)
    assert bias.init_std == {None: 0.05}


def test_multi_latent_attention() -> None:
    """hidden ×3/2, heads ×2, query rank fixed, key/value rank ×3; nope ×3/2, rope ×2, value ×7/2."""
    parametrization = apply(MLA, "llama")
    tensors = {
        name.removeprefix(ATTENTION): tensor
        for name, tensor in parametrization.tensors.items()
        if name.startswith(ATTENTION)
    }
    # A norm follows the latents: g = 1 though the query rank is fixed.
    assert numbers(tensors["linear_q_down_proj.weight"]) == (close(2 / 3), 1, 1.5)
    assert tensors["linear_q_down_proj.weight"].init_std == {None: close(0.05 / math.sqrt(1.5))}
    # Per head, heads ×2: nope 2 · 3/2 = 3, rope 2 · 2 = 4; fan-in (the rank) fixed.
    q_up = tensors["linear_q_up_proj.weight"]
    assert {block: dim.ratio for block, dim in q_up.shape.blocks.items()} == {"nope": 3, "rope": 4}
    assert numbers(q_up) == (1, 0.25, 1)
    assert q_up.init_std == {"nope": 0.05, "rope": 0.05}
    kv_down = tensors["linear_kv_down_proj.weight"]
    assert {block: dim.ratio for block, dim in kv_down.shape.blocks.items()} == {"rank": 3, "rope": 2}
    assert numbers(kv_down) == (close(2 / 3), THIRD, 1.5)
    assert kv_down.init_std == {block: close(0.05 / math.sqrt(1.5)) for block in ("rank", "rope")}
    kv_up = tensors["linear_kv_up_proj.weight"]
    assert {block: dim.ratio for block, dim in kv_up.shape.blocks.items()} == {"nope": 3, "value": 7}
    assert numbers(kv_up) == (THIRD, close(1 / 7), 3)
    assert kv_up.init_std == {block: close(0.05 / math.sqrt(3)) for block in ("nope", "value")}
    # Fan-in heads · value size: 2 · 7/2.
    assert numbers(tensors["linear_proj.weight"]) == (close(1 / 7), close(2 / 3), 7)
    assert tensors["linear_proj.weight"].init_std == {None: close(0.025 / math.sqrt(7))}
    assert numbers(tensors["q_layernorm.weight"]) == (1, 1, 0)
    assert numbers(tensors["kv_layernorm.weight"]) == (1, THIRD, 0)
    # d = 12 + 8 over 8 + 4: 1/sqrt(20) · sqrt(12/20).
    assert parametrization.forward.softmax_scale == close(math.sqrt(12) / 20)


def test_fixed_ranks() -> None:
    """Rank and rotary part fixed: the rank's rows go into a norm (g = 1), the rotary rows do not (g)."""
    growth = {"model": MLA["model"], "base": {"hidden_size": 64, "num_attention_heads": 4}}
    kv_down = ATTENTION + "linear_kv_down_proj.weight"
    assert apply(growth, "llama").tensors[kv_down].init_std == {
        "rank": close(0.05 / math.sqrt(1.5)),
        "rope": close(0.05 / 1.5),
    }
    without = apply(growth, "llama", model__qk_layernorm=False).tensors
    assert without[kv_down].init_std == {block: close(0.05 / 1.5) for block in ("rank", "rope")}
    assert without[ATTENTION + "linear_q_down_proj.weight"].init_std == {None: close(0.05 / 1.5)}
    hidden_like = apply(growth, "llama", parametrization__fixed_fan_out_init="hidden_like").tensors
    assert hidden_like[kv_down].init_std == {block: close(0.05 / math.sqrt(1.5)) for block in ("rank", "rope")}


def test_yarn_as_upstream() -> None:
    """At the base shape the scale is megatron-core's own, to the last bit."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_mscale

    base = {**MLA, "model": {**MLA["model"], **MLA["base"]}}
    forward = apply(base, "llama", model__rope_type="yarn", model__mscale_all_dim=0.707).forward
    mscale = _yarn_get_mscale(40.0, 0.707)
    assert forward.softmax_scale == mscale * mscale / math.sqrt(12)
    for scaling, all_dim in ((40.0, 1.0), (1.0, 1.0), (0.5, 0.3), (8.0, 0.0)):
        assert formulas.yarn_mscale(scaling, all_dim) == _yarn_get_mscale(scaling, all_dim)


def test_qk_norm_takes_g_from_queries_and_keys_alone() -> None:
    """Heads 2 to 8 on one KV head, hidden ×4: the key's scale is normed away, the value's is not."""
    growth = {
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 512,
            "num_attention_heads": 8,
            "num_query_groups": 1,
            "qk_layernorm": True,
        },
        "base": {"hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 2},
    }
    qkv = ATTENTION + "linear_qkv.weight"
    tensors = apply(growth, "llama").tensors
    assert tensors[qkv].init_std == {"query": 0.025, "key": 0.025, "value": 0.0125}
    assert numbers(tensors[ATTENTION + "q_layernorm.weight"]) == (1, 1, 0)
    hidden_like = apply(growth, "llama", parametrization__fixed_fan_out_init="hidden_like").tensors
    assert set(hidden_like[qkv].init_std.values()) == {0.025}
    without = apply(growth, "llama", model__qk_layernorm=False).tensors
    assert without[qkv].init_std == {"query": 0.025, "key": 0.0125, "value": 0.0125}
    growing = apply(HEAD_SIZE, "llama", model__qk_layernorm=True).tensors
    assert numbers(growing[ATTENTION + "k_layernorm.weight"]) == (1, close(2 / 3), 0)  # head size 16 to 24


def test_multi_token_prediction_has_its_own_depth() -> None:
    """Decoder ×2 in depth under CompleteP: branches 1/2 there, 1 here; eh_proj [96, 192] over [64, 128]."""
    growth: dict[str, Any] = {
        "model": {**MIXED["model"], "mtp_num_layers": 1},
        "base": {**MIXED["base"], "num_layers": 1},
    }
    parametrization = apply(growth, "llama", parametrization__depth="completep")
    tensors = {name: tensor for name, tensor in parametrization.tensors.items() if name.startswith("mtp.")}
    assert numbers(tensors["mtp.layers.0.eh_proj.weight"]) == (close(2 / 3), close(2 / 3), 1.5)
    assert numbers(tensors["mtp.layers.0.enorm.weight"]) == (1, close(2 / 3), 0)
    fc1 = next(tensor for name, tensor in tensors.items() if name.endswith("mlp.linear_fc1.weight"))
    assert numbers(fc1) == (close(2 / 3), close(2 / 5), 1.5)
    inside = parametrization.tensors["decoder.layers.0.mlp.linear_fc1.weight"]
    assert numbers(inside) == (close(2 / 3), close(1 / 2 * 2 / 5), 1.5)
    assert all(tensor.shape.layer is None for tensor in tensors.values())


def test_branches_of_multi_token_prediction_keep_their_depth(ranks: Ranks) -> None:
    """α_residual 3 under CompleteP, decoder ×2 in depth: 3/2 · (1 + 2) there, bias and all, and 3 · (1 + 2) here."""
    growth: dict[str, Any] = {
        "model": {**MIXED["model"], "mtp_num_layers": 1},
        "base": {**MIXED["base"], "num_layers": 1},
    }
    config = make(growth, parametrization__depth="completep", hparams__residual_multiplier=3.0)
    (added,) = ranks.run(1, bodies.branches, config=config)
    assert added == {
        f"{layer} {branch}": 9.0 if layer == "mtp 0" else 4.5
        for layer in ("decoder 0", "decoder 1", "mtp 0")
        for branch in ("self_attn_bda", "mlp_bda")
    }


def test_zero_init() -> None:
    zero = {"parametrization__zero_init_query": True, "parametrization__zero_init_readout": True}
    tensors = apply(MIXED, "llama", **zero).tensors
    plain = apply(MIXED, "llama").tensors
    qkv = tensors[ATTENTION + "linear_qkv.weight"].init_std
    assert (qkv["query"], qkv["key"] > 0, qkv["value"] > 0) == (0.0, True, True)
    assert tensors["output_layer.weight"].init_std == {None: 0.0}
    for name, tensor in tensors.items():
        assert numbers(tensor) == numbers(plain[name])
        if "linear_qkv" not in name and name != "output_layer.weight":
            assert tensor.init_std == plain[name].init_std
    mla = apply(MLA, "llama", **zero).tensors
    assert set(mla[ATTENTION + "linear_q_up_proj.weight"].init_std.values()) == {0.0}
    assert all(mla[ATTENTION + "linear_q_down_proj.weight"].init_std.values())
    uncompressed = apply(MLA, "llama", model__q_lora_rank=None, **zero).tensors
    assert set(uncompressed[ATTENTION + "linear_q_proj.weight"].init_std.values()) == {0.0}


def test_norm_gains() -> None:
    gain = "decoder.layers.0.input_layernorm.weight"
    frozen = apply(MIXED, "llama", model__norm_gains="frozen")
    assert numbers(frozen.tensors[gain]) == (0, close(2 / 3), 0)
    assert frozen.tensors[EMBEDDING].lr_multiplier == 1
    assert not any("norm" in name for name in apply(MIXED, "llama", model__norm_gains="none").tensors)


def test_at_the_base_everything_is_one() -> None:
    growths: list[dict[str, Any]] = [MOE, MLA]
    for growth in growths:
        base = {**growth, "model": {**growth["model"], **growth["base"]}}
        parametrization = apply(base, "llama", model__mtp_num_layers=1)
        assert {numbers(tensor)[:2] for tensor in parametrization.tensors.values()} == {(1, 1)}
        assert len(parametrization.groups) == 2


def test_gates_and_sinks() -> None:
    """hidden ×3/2, heads ×2, query groups ×4: gates are as many rows as queries, a sink is a vector over heads."""
    tensors = apply(MIXED, "llama", model__attention_output_gate=True, model__softmax_type="learnable").tensors
    qkv = tensors[ATTENTION + "linear_qkv.weight"]
    assert qkv.shape.blocks == {
        "query": (32, 64),
        "gate": (32, 64),
        "key": (8, 32),
        "value": (8, 32),
    }
    assert qkv.shape.spec.fused is not None
    assert qkv.shape.spec.fused.runs == (("query", 16), ("gate", 16), ("key", 8), ("value", 8))
    assert qkv.init_std == dict.fromkeys(("query", "gate", "key", "value"), close(0.05 / math.sqrt(1.5)))
    assert numbers(qkv) == (close(2 / 3), 0.25, 1.5)
    sink = tensors[ATTENTION + "core_attention.softmax_offset"]
    assert sink.shape.infshape == ((4, 8),)
    assert sink.init_std == {None: 0.05}
    assert numbers(sink) == (1, 0.5, 0)


@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_gains_that_are_added_to_one(architecture: str, ranks: Ranks) -> None:
    """They start at 0 and are decayed no more than gains from 1; the model is the same function and trains the same."""
    change = {"model__layernorm_zero_centered_gamma": True, "model__qk_layernorm": True, "training__train_steps": 4}
    plain = make(MIXED, architecture, **{**change, "model__layernorm_zero_centered_gamma": False})
    config = make(MIXED, architecture, **change)
    tensors, expected = (parametrize(one, 384).tensors for one in (config, plain))
    for name, row in tensors.items():
        assert row.group == expected[name].group
        is_gain = "norm" in name and name.endswith("weight")
        assert row.shape.spec.init is (Init.ZEROS if is_gain else expected[name].shape.spec.init), name
    prepare(config)
    ours, theirs = (ranks.run(1, bodies.train, config=one, steps=4)[0] for one in (config, plain))
    assert ours["losses"][:2] == theirs["losses"][:2]
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert ours["losses"][-1] != ours["losses"][0]


def test_rates_of_embedding_and_head_alone() -> None:
    """Megatron's decoupled rate: multipliers stay the rules', groups are told apart, positions keep the common rate."""
    apart = {"optimizer__decoupled_lr": 3e-3, "model__position_embedding_type": "learned_absolute"}
    parametrization = apply(MIXED, "llama", **apart)
    decoupled = {name: row.lr for name, row in parametrization.tensors.items() if row.group.decoupled}
    assert decoupled == {EMBEDDING: 3e-3, "output_layer.weight": 3e-3}
    plain = apply(MIXED, "llama", model__position_embedding_type="learned_absolute")
    for name, row in plain.tensors.items():
        assert numbers(parametrization.tensors[name]) == numbers(row), name
        assert (parametrization.tensors[name].lr == row.lr) == (name not in decoupled), name
    groups = {str(key) for key in parametrization.groups}
    assert len(groups) == len(parametrization.groups)


def test_what_only_megatrons_own_run_trains() -> None:
    for change, key in (
        ({"training__precision": "fp16"}, "training.precision"),
        ({"optimizer__decoupled_lr": 3e-3}, "optimizer.decoupled_lr"),
    ):
        with pytest.raises(ConfigError, match="mup-megatron run") as error:
            resolve(make(MIXED, "llama", **change), 1)
        assert error.value.key == key
        resolve(make(MIXED, "llama", **change), 1, trains=False)


EXPERTS = {key: value for key, value in MOE["model"].items() if key != "moe_layer_freq"}


@pytest.mark.parametrize(
    ("growth", "change", "key", "problem"),
    [
        (MOE, {"base__num_moe_experts": 2}, "base.num_moe_experts", "has no rule here"),
        (MOE, {"proxy__moe_router_topk": 1}, "proxy.moe_router_topk", "has no rule here"),
        (MIXED, {"base__num_moe_experts": 2}, "base.num_moe_experts", "belongs to a mixture of experts"),
        (MIXED, {"model__moe_router_topk": 1}, "model.moe_router_topk", "belongs to a mixture of experts"),
        (MIXED, {"base__moe_ffn_hidden_size": 8}, "base.moe_ffn_hidden_size", "belongs to a mixture of experts"),
        (MOE, {"model__moe_router_topk": 5}, "model.moe_router_topk", "expected at most 4"),
        (MOE, {"model__moe_router_topk": 1}, "model.moe_router_pre_softmax", "no gradient"),
        (MOE, {"model__moe_router_num_groups": 3, "model__moe_router_group_topk": 1}, "num_groups", "does not divide"),
        (MOE, {"model__moe_router_num_groups": 2}, "model.moe_router_group_topk", "missing"),
        (MOE, {"model__moe_router_num_groups": 2, "model__moe_router_group_topk": 3}, "group_topk", "3 groups"),
        (
            MOE,
            {"model__moe_router_num_groups": 4, "model__moe_router_group_topk": 1},
            "model.moe_router_topk",
            "equal parts",
        ),
        (MOE, {"model__moe_router_enable_expert_bias": True}, "enable_expert_bias", "sigmoid"),
        (MOE, {"model__moe_router_bias_update_rate": 0.5}, "bias_update_rate", "needs moe_router_enable_expert_bias"),
        (MOE, {"model__moe_router_load_balancing_type": "none"}, "model.moe_aux_loss_coeff", "expected 0"),
        (MOE, {"model__moe_shared_expert_intermediate_size": None}, "moe_shared_expert", "no shared experts"),
        (MOE, {"model__add_bias_linear": True}, "model.add_bias_linear", "shared experts have no biases"),
        (MOE, {"model__moe_layer_freq": [0, 1, 1]}, "model.moe_layer_freq", "3 entries for 2 layers"),
        (MOE, {"model__moe_layer_freq": [0, 0]}, "model.moe_layer_freq", "no layer has experts"),
        (MOE, {"model__moe_layer_freq": [0, 2]}, "model.moe_layer_freq", "expected"),
        (MLA, {"model__kv_lora_rank": None}, "model.kv_lora_rank", "missing"),
        (MLA, {"model__multi_latent_attention": False}, "model.q_lora_rank", "belongs to multi-latent attention"),
        (MIXED, {"base__v_head_dim": 8}, "base.v_head_dim", "belongs to multi-latent attention"),
        (MLA, {"model__num_query_groups": 4}, "model.num_query_groups", "no such size"),
        (MLA, {"base__kv_channels": 4}, "base.kv_channels", "no such size"),
        (MLA, {"model__q_lora_rank": None, "base__q_lora_rank": 8}, "base.q_lora_rank", "compresses no queries"),
        (MLA, {"model__position_embedding_type": "none"}, "model.position_embedding_type", "expected rope"),
        (MLA, {"model__add_qkv_bias": True}, "model.add_qkv_bias", "no such bias"),
        (MLA, {"model__mscale": 0.7}, "model.mscale", "belongs to YaRN"),
        (MLA, {"model__qk_pos_emb_head_dim": 7}, "model.qk_pos_emb_head_dim", "odd"),
        (MLA, {"model__qk_l2_norm": True}, "model.qk_l2_norm", "no such norm"),
        (MLA, {"model__attention_output_gate": True}, "model.attention_output_gate", "no such gate"),
        (MLA, {"model__rope_scaling": True}, "model.rope_scaling", "no multi-latent attention"),
        (MIXED, {"model__rope_scaling_factor": 4.0}, "model.rope_scaling_factor", "belongs to rope_scaling"),
        (MIXED, {"model__rotary_scaling_factor": 4.0}, "model.rotary_scaling_factor", "multi-latent attention"),
        (MIXED, {"model__correction_range_round_to_int": False}, "correction_range", "belongs to YaRN"),
        (MIXED, {"model__qk_l2_norm": True, "model__qk_layernorm": True}, "model.qk_l2_norm", "have a norm already"),
        (MIXED, {"model__softmax_type": "learnable", "model__core_attention": "sdpa"}, "core_attention", "learnable"),
        (MIXED, {"model__attention_output_gate": True, "optimizer__name": "muon"}, "attention_output_gate", "Muon"),
        (
            MIXED,
            {"model__gated_linear_unit": False, "model__glu_linear_offset": 1.0},
            "model.glu_linear_offset",
            "belongs to a gated unit",
        ),
        (MOE, {"model__moe_router_load_balancing_type": "sinkhorn"}, "model.moe_aux_loss_coeff", "is sinkhorn"),
        (MOE, {"model__moe_aux_loss_coeff": [0.1, 0.1]}, "model.moe_aux_loss_coeff", "one number for each"),
        (
            MIXED,
            {"parametrization__zero_init_query": True, "model__qk_l2_norm": True},
            "parametrization.zero_init_query",
            "a norm follows",
        ),
        (MIXED, {"training__lr_warmup_init": 1.0}, "training.lr_warmup_init", "above the peak"),
        (MIXED, {"optimizer__decoupled_min_lr": 1e-4}, "optimizer.decoupled_min_lr", "needs decoupled_lr"),
        (MIXED, {"model__mtp_loss_scaling_factor": 0.5}, "model.mtp_loss_scaling_factor", "needs mtp_num_layers"),
        (MIXED, {"model__mtp_num_layers": 32}, "model.mtp_num_layers", "within training.seq_length"),
        (MIXED, {"model__norm_gains": "none", "model__norm_implementation": "apex"}, "norm_implementation", "gains"),
        (
            MIXED,
            {"parametrization__zero_init_query": True, "model__qk_layernorm": True},
            "parametrization.zero_init_query",
            "a norm follows",
        ),
        (
            MIXED,
            {"parametrization__zero_init_readout": True, "model__share_embeddings_and_output_weights": True},
            "parametrization.zero_init_readout",
            "tied",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions(growth: dict[str, Any], change: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(growth, "llama", **change)
    assert key in error.value.key
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("growth", "change", "key"),
    [
        (MOE, {"model__moe_shared_expert_intermediate_size": 51}, "model.moe_shared_expert_intermediate_size"),
        (MLA, {"model__kv_lora_rank": 49}, "model.kv_lora_rank"),
        (MLA, {"model__q_lora_rank": 25}, "model.q_lora_rank"),
    ],
)
def test_sizes_that_tensor_parallelism_cannot_split(growth: dict[str, Any], change: dict[str, Any], key: str) -> None:
    config = make(
        growth,
        "llama",
        parallel__tensor_model_parallel_size=2,
        parallel__sequence_parallel=True,
        training__micro_batch_size=4,
        **change,
    )
    with pytest.raises(ConfigError, match="not divisible by the tensor-parallel size 2") as error:
        resolve_layout(config, 2)
    assert error.value.key == key


def test_a_dumped_config_is_read_again() -> None:
    """It names every key, those of architectures that the model has not among them."""
    from mup_megatron.config import parse_config

    for growth in (MIXED, MOE, MLA):
        config = make(growth, "llama")
        assert parse_config(config.model_dump(), config.source) == config


def test_experts_are_named_by_their_global_number() -> None:
    """The second of two expert-parallel ranks, each with four of eight experts, holds numbers 4 to 7."""
    config = make(MOE, "llama")
    model = unsharded_model(config, config.model, 384)
    assert {expert_number(name) for name, _ in named_parameters(model)} == {None, 0, 1, 2, 3}
    model.decoder.layers[1].mlp.experts.ep_group = SimpleNamespace(rank=lambda: 1)
    assert {expert_number(name) for name, _ in named_parameters(model)} == {None, 4, 5, 6, 7}
    rename = global_expert_names(model)
    first = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    assert rename(first) == first.replace("experts.0", "experts.4")
    assert rename("decoder.layers.0.mlp.linear_fc1.weight") == "decoder.layers.0.mlp.linear_fc1.weight"


def test_explain_tells_what_a_rank_holds() -> None:
    """Two expert-parallel ranks: experts 0 and 1 here, 2 and 3 there; router and dense layers on both."""
    one = {"parallel__tensor_model_parallel_size": 1}
    config = make(MOE, "llama", parallel__expert_model_parallel_size=2, **one)
    parametrization = apply(MOE, "llama")
    layout = resolve_layout(config, 2)
    held = [
        {parameter["name"] for parameter in explain(parametrization, layout, rank)["parameters"]} for rank in (0, 1)
    ]
    assert [{expert_number(name) for name in names} for names in held] == [{None, 0, 1}, {None, 2, 3}]
    assert MLP + "router.weight" in held[0] & held[1]
    assert held[0] | held[1] == set(parametrization.tensors)


def test_rows_of_fused_qkv() -> None:
    """megatron-core's order: of each query group the queries, one key, one value. 8 heads of 8 in 4 groups."""
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    spec = apply(MIXED, "gpt3").tensors[name].shape.spec
    values: dict[str | None, float] = {"query": 1.0, "key": 2.0, "value": 3.0}
    group = [1.0] * 16 + [2.0] * 8 + [3.0] * 8
    assert local_rows(spec, values, 0, 1, torch.device("cpu")).tolist() == group * 4
    assert local_rows(spec, values, 1, 2, torch.device("cpu")).tolist() == group * 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_branch_s_bias_is_multiplied_too(fused: bool) -> None:
    """10 + 0.5 (2 + 4), without dropout."""
    add = scaled_bias_dropout_add(0.5)(False, fused)
    output, bias, residual = torch.full((2, 1, 3), 2.0), torch.full((3,), 4.0), torch.full((2, 1, 3), 10.0)
    assert torch.equal(add((output, bias), residual, 0.0), torch.full((2, 1, 3), 13.0))
    assert torch.equal(add((output, None), residual, 0.0), torch.full((2, 1, 3), 11.0))
