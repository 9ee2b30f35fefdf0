"""megatron-core's own specs of Transformer Engine's modules, as built: against the local spec with shims, by tensor.

Norms are inside the linear layers that follow them there, under names of their own; every value, record and row is that
of the local layers. Nothing computes, for that needs CUDA.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.helpers import transformer_engine
from tests.helpers.distributed import Ranks
from tests.helpers.transformer_engine import installed
from tests.model.as_built.test_same_table import MODELS
from tests.model.layers.test_transformer_engine import config_of, layout_of

pytestmark = installed
# Norms of the local spec, and the linear layer that has them inside.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
# Whole on every rank, where the local layers are split by rows and gathered.
DOWN = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")

PER_HEAD = ("q_layernorm.weight", "k_layernorm.weight")  # upstream sums their gradients by their names


def fused(names: Any, built: Any) -> dict[str, str]:
    """Names of the local spec, and how the tensors are called there."""
    called = {}
    for name in names:
        layer, found, rest = name.rpartition(next((norm for norm in FUSED if norm in name), "?"))
        inside = f"{layer}{FUSED.get(found)}{rest}"
        called[name] = inside if inside in built else name
    assert sorted(called.values()) == sorted(built)
    return called


def without_split(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:-1], dataclasses.replace(row[-1], partition_dim=None, partition_stride=1))


def check(plain: dict[str, Any], built: dict[str, Any], whole: dict[str, Any]) -> dict[str, str]:
    """Rows, marks and values of one rank; `whole` are the values of the model on one rank."""
    called = fused(plain["rows"], built["rows"])
    for name, there in called.items():
        split = not name.endswith(DOWN)
        assert built["rows"][there] == (plain["rows"][name] if split else without_split(plain["rows"][name])), name
        if split and not name.endswith(PER_HEAD):
            assert built["marks"][there] == plain["marks"][name], name
        np.testing.assert_array_equal(built["values"][there], (plain["values"] if split else whole)[name], err_msg=name)
    return called


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", ["gpt3", "tied-llama", "qk-norm", "qkv-bias", "moe", "mla", "mla-unnormed", "mtp"])
def test_fused_norms_and_linear_layers(te_ranks: Ranks, model: str, tensor: int) -> None:
    plain = te_ranks.run(tensor, transformer_engine.recorded, config=config_of(model, **layout_of(tensor)))
    (whole,) = te_ranks.run(1, transformer_engine.recorded, config=config_of(model))
    ours = te_ranks.run(tensor, transformer_engine.as_built, config=config_of(model, **layout_of(tensor)))
    for theirs, built in zip(plain, ours, strict=True):
        called = check(theirs, built, whole["values"])
        assert any(name != there for name, there in called.items())
        assert "TELayerNormColumnParallelLinear" in built["classes"]  # negative control


@pytest.mark.parametrize("model", MODELS)
def test_one_table(te_ranks: Ranks, model: str) -> None:
    """Of every model, sinks too, which no CPU has, and without memory for any weight."""
    ((plain, built),) = te_ranks.run(1, transformer_engine.table, config=config_of(model))
    for name, there in fused(plain, built).items():
        assert built[there] == (plain[name] if not name.endswith(DOWN) else without_split(plain[name])), name


@pytest.mark.parametrize("tensor", [1, 2])
def test_grouped_experts(te_ranks: Ranks, tensor: int) -> None:
    config = config_of("moe", **layout_of(tensor))
    plain = te_ranks.run(tensor, transformer_engine.recorded, config=config)
    ours = te_ranks.run(tensor, transformer_engine.as_built, config=config, grouped=True)
    for theirs, built in zip(plain, ours, strict=True):
        assert "TEGroupedMLP" in built["classes"]  # negative control
        for name, there in fused(theirs["rows"], built["rows"]).items():
            assert built["rows"][there] == theirs["rows"][name], name
            np.testing.assert_array_equal(built["values"][there], theirs["values"][name], err_msg=name)


def latent(given: dict[str, Any]) -> None:
    given["config"].moe_latent_size = 24


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_on_a_latent(te_ranks: Ranks, grouped: bool) -> None:
    """By hand: hidden 64 to 96, an expert's hidden 32 to 80, the latent 24 in both; what reads it keeps its rate."""
    (built,) = te_ranks.run(1, transformer_engine.as_built, config=config_of("moe"), grouped=grouped, change=latent)
    moe = "decoder.layers.1.mlp."
    expected = {
        "fc1_latent_proj.weight": ((24, 96), Fraction(64, 96)),
        "fc2_latent_proj.weight": ((96, 24), Fraction(1)),
        "experts.local_experts.3.linear_fc1.weight": ((160, 24), Fraction(1)),
        "experts.local_experts.3.linear_fc2.weight": ((24, 80), Fraction(32, 80)),
    }
    for name, (shape, rate) in expected.items():
        group, *_ = built["rows"][moe + name]
        assert (built["values"][moe + name].shape, group.lr) == (shape, rate), name
    assert ("TEGroupedMLP" in built["classes"]) == grouped
    assert "TELinear" in built["classes"]  # the projections


def quantized(recipe: str, given: dict[str, Any]) -> None:
    given["config"].fp8, given["config"].fp8_recipe = "hybrid", recipe


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_recipes_of_fp8_have_no_parameters(te_ranks: Ranks, recipe: str) -> None:
    """They quantize what is multiplied: tensors, values and rows are those without them."""
    config = config_of("llama")
    (plain,) = te_ranks.run(1, transformer_engine.as_built, config=config)
    change = functools.partial(quantized, recipe)
    (built,) = te_ranks.run(1, transformer_engine.as_built, config=config, change=change)
    assert built["rows"] == plain["rows"]
    assert built["marks"] == plain["marks"]
    for name, value in plain["values"].items():
        np.testing.assert_array_equal(built["values"][name], value, err_msg=name)


@pytest.mark.parametrize(("model", "pattern", "tensor"), [("moe", "*-E", 1), ("llama", "*-", 2)])
def test_hybrid_stacks(te_ranks: Ranks, model: str, pattern: str, tensor: int) -> None:
    """megatron-core's own stack: attention, an MLP, experts. Mamba's mixer asks for mamba-ssm, which is CUDA's."""
    experts = {"model__moe_layer_freq": 1} if "E" in pattern else {}
    config = config_of(model, model__num_layers=len(pattern), parallel__tensor_model_parallel_size=tensor, **experts)
    plain, ours = (
        te_ranks.run(tensor, transformer_engine.hybrid, config=config, pattern=pattern, kernels=kernels)
        for kernels in ("local", "transformer_engine")
    )
    for theirs, built in zip(plain, ours, strict=True):
        check(theirs, built, {})
        assert {"TELayerNormColumnParallelLinear", "HybridModel"} <= built["classes"]  # negative control
        assert ("TEGroupedMLP" in built["classes"]) == ("E" in pattern)
