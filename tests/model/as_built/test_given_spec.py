"""A script's own layer spec against megatron-core's: norms that it leaves out, and what else makes it another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from mup_megatron.model.as_built.given import OtherLayers, norms_left_out
from mup_megatron.model.build import parametrize, unsharded_model
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel import upstream
from tests.helpers.configs import MIXED, MOE, make

PLAIN = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
EXPERTS = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=2, moe_layer_freq=[0, 1], mtp_num_layers=1
)
LATENT = MLATransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, qk_layernorm=True, rope_type="rope")


@pytest.fixture(autouse=True)
def _one_stage() -> Iterator[None]:
    """What megatron-core's specs ask of the pipeline, without process groups."""
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)
    yield
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_pipeline_model_parallel_world_size(None)


def left_out(config: TransformerConfig, spec: Any, mtp: Any = None) -> list[str]:
    return norms_left_out(config, spec, mtp, transformer_engine=False, stage=None)


def blocks(config: TransformerConfig) -> TransformerBlockSubmodules:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)


@pytest.mark.parametrize("config", [PLAIN, EXPERTS, LATENT], ids=["plain", "experts", "latent"])
def test_megatrons_own_leaves_out_nothing(config: TransformerConfig) -> None:
    block = blocks(config)
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if config.mtp_num_layers else None
    assert left_out(config, block, mtp) == []
    # A script's own copy, not megatron-core's objects.
    assert left_out(config, copy.deepcopy(block), copy.deepcopy(mtp)) == []
    if config is not EXPERTS:
        layer = block.layer_specs[0]
        assert left_out(config, layer) == []
        assert left_out(config, ModuleSpec(module=TransformerLayer, submodules=layer.submodules)) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["input_layernorm"], ["input_layernorm"]),
        (["pre_mlp_layernorm", "input_layernorm"], ["input_layernorm", "pre_mlp_layernorm"]),
    ],
)
def test_norms_of_layers(names: list[str], expected: list[str]) -> None:
    layer = get_gpt_layer_local_spec()
    for name in names:
        setattr(layer.submodules, name, IdentityOp)
    assert left_out(PLAIN, layer) == expected
    # Without norms a script needs no names for them in checkpoints.
    layer.submodules.sharded_state_dict_keys_map = {}
    assert left_out(PLAIN, layer) == expected


@pytest.mark.parametrize("nothing", [None, IdentityOp])
def test_final_norm(nothing: Any) -> None:
    block = blocks(PLAIN)
    block.layer_norm = nothing
    assert left_out(PLAIN, block) == ["final_layernorm"]


def _attention(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda layer: change(layer.submodules.self_attention)


def _other_projection(layer: Any) -> None:
    mlp = layer.submodules.mlp
    parts = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
    parts.linear_fc2 = torch.nn.Linear


def _unmasked(attention: Any) -> None:
    attention.params = {"attn_mask_type": AttnMaskType.no_mask}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_projection, r"layer 0: mlp\.linear_fc2 is Linear, and megatron-core's own .* is RowParallelLinear"),
        (
            _attention(lambda attention: setattr(attention.submodules, "core_attention", torch.nn.Identity)),
            r"self_attention\.core_attention is Identity, and .* is DotProductAttention",
        ),
        (_attention(_unmasked), r"self_attention\.attn_mask_type is .*no_mask, and .* is .*causal"),
        (
            _attention(lambda attention: setattr(attention.submodules, "q_layernorm", torch.nn.LayerNorm)),
            r"self_attention\.q_layernorm is LayerNorm, and .* is IdentityOp",
        ),
        (
            lambda layer: setattr(layer.submodules, "input_layernorm", torch.nn.GroupNorm),
            "input_layernorm is GroupNorm",
        ),
        (
            lambda layer: setattr(layer.submodules, "mlp_bda", functools.partial),
            "mlp_bda is partial, and .* get_bias_d",
        ),
        (
            lambda layer: setattr(layer, "params", {"hidden_dropout": 0.5}),
            "layer 0: hidden_dropout is 0.5, and .* nothing",
        ),
        (lambda layer: setattr(layer, "module", torch.nn.Identity), "layer is Identity, and .* is TransformerLayer"),
    ],
)
def test_other_layers(change: Callable[[Any], None], said: str) -> None:
    layer = get_gpt_layer_local_spec()
    change(layer)
    with pytest.raises(OtherLayers, match=said):
        left_out(PLAIN, layer)


def test_norms_of_some_layers() -> None:
    block = blocks(EXPERTS)
    layers = [copy.deepcopy(block.layer_specs[0]), block.layer_specs[1]]
    layers[0].submodules.input_layernorm = IdentityOp
    with pytest.raises(OtherLayers, match=r"no input_layernorm in some layers alone \(layer 1 of this rank differs"):
        left_out(EXPERTS, TransformerBlockSubmodules(layer_specs=layers, layer_norm=block.layer_norm))
    mtp = get_gpt_mtp_block_spec(EXPERTS, block, use_transformer_engine=False)
    for layer in (layers := [copy.deepcopy(layer) for layer in block.layer_specs]):
        layer.submodules.input_layernorm = IdentityOp
    with pytest.raises(OtherLayers, match=r"multi-token prediction differs from the first"):
        left_out(EXPERTS, TransformerBlockSubmodules(layer_specs=layers, layer_norm=block.layer_norm), mtp)
    with pytest.raises(OtherLayers, match="has 1 layers for this rank, the options give it 2"):
        left_out(EXPERTS, TransformerBlockSubmodules(layer_specs=layers[:1], layer_norm=block.layer_norm))


@pytest.mark.parametrize("growth", [MIXED, MOE], ids=["dense", "experts"])
def test_without_norms_is_built_and_parametrised(growth: dict[str, Any]) -> None:
    """The key has the effect that the spec has: these tensors are not there; every other has the rules it had."""
    upstream.prepare_process()
    places = ["final_layernorm", "input_layernorm", "pre_mlp_layernorm"]
    usual, config = make(growth, "llama"), make(growth, "llama", model__without_norms=places)
    built = [unsharded_model(made, made.model, 384) for made in (usual, config)]
    names = [[name for name, _ in named_parameters(model) if "layernorm" in name] for model in built]
    assert (len(names[0]), len(names[1])) == (5, 0)
    ours, theirs = parametrize(config, 384), parametrize(usual, 384)
    assert set(ours.tensors) == {name for name in theirs.tensors if "layernorm" not in name}
    for name, tensor in ours.tensors.items():
        assert tensor.group == theirs.tensors[name].group, name
