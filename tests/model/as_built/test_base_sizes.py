"""Sizes of the base and the enlarged base, layer by layer, by hand; and files of layers that are refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

from mup_megatron.model.as_built.base_sizes import NO_OTHERS, BaseSizes, put_sizes, read_layers
from mup_megatron.util.errors import UserError

OWN = {"no_op": False, "replace_with_linear": False}
LAYERS: list[dict[str, Any]] = [
    {"attention": {**OWN, "n_heads_in_group": 2}, "ffn": {**OWN, "ffn_mult": 3.0}},
    {"attention": {**OWN, "n_heads_in_group": None, "no_op": True}, "ffn": {**OWN, "ffn_mult": 12.0}},
    {"attention": {**OWN, "num_query_groups": 4}, "mlp": {**OWN, "ffn_hidden_size": 96}},
]


def model() -> Any:
    """Hidden size 64, four heads; FFN sizes 128 to 256, 512, and 96."""
    return HeterogeneousTransformerConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        kv_channels=16,
        ffn_hidden_size=128,
        activation_func=torch.nn.functional.silu,
        heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": LAYERS}),
    )


def sizes(base: BaseSizes, hidden: int, heads: int, times: int) -> list[tuple[int | None, int | None]]:
    """Key/value heads and FFN size of each layer."""
    core = model()
    made = copy.copy(core)
    made.hidden_size, made.num_attention_heads = hidden, heads
    put_sizes(made, core, base, times=times, hidden=True)
    before = [(block.attention.num_query_groups, block.mlp.ffn_hidden_size) for block in core.per_block_parameters]
    assert before == [(2, 256), (None, 512), (4, 96)]  # the model's own stay
    return [(block.attention.num_query_groups, block.mlp.ffn_hidden_size) for block in made.per_block_parameters]


def test_relative_sizes_follow_and_numbers_are_fixed() -> None:
    """Upstream rounds 2/3 of the multiple up to 256, for 16 and for 32; the enlarged base has twice the base's."""
    assert sizes(NO_OTHERS, 16, 2, 1) == [(1, 256), (None, 256), (4, 96)]
    assert sizes(NO_OTHERS, 32, 4, 2) == [(2, 512), (None, 512), (4, 96)]


def test_a_file_of_the_bases_own() -> None:
    """Numbers in it grow, and what it leaves out is the model's."""
    said = copy.deepcopy(LAYERS)
    said[0] = {"attention": OWN, "ffn": {**OWN, "ffn_hidden_size": 40}}
    said[2] = {"attention": {**OWN, "num_query_groups": 2}, "ffn": OWN}
    base = BaseSizes(layers=read_layers("base.json", json.dumps({"block_configs": said})), source="base.json")
    assert sizes(base, 16, 2, 1) == [(2, 40), (None, 256), (2, 96)]
    assert sizes(base, 32, 4, 2) == [(2, 80), (None, 512), (4, 96)]
    short = BaseSizes(layers=base.layers[:2], source="base.json") if base.layers else base
    with pytest.raises(UserError, match=r"^base.json: has 2 layers, the model has 3; expected as many"):
        sizes(short, 16, 2, 1)


def test_a_size_that_the_model_does_not_have() -> None:
    with pytest.raises(UserError, match=r"^base.moe_latent_size: the model has no such size"):
        sizes(BaseSizes(sizes={"moe_latent_size": 8}), 16, 2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "f.json: not valid JSON"),
        ("[]", "f.json: expected block_configs, a list with attention and ffn"),
        ('{"block_configs": [{"attention": {}}]}', "f.json: layer 0: expected attention and ffn"),
        (
            '{"block_configs": [{"attention": {"num_query_groups": 1.5}, "ffn": {"a": 1}}]}',
            "f.json: layer 0: attention.num_query_groups: 1.5; expected a whole number above 0, or null",
        ),
        (
            '{"block_configs": [{"attention": {"a": 1}, "mlp": {"ffn_mult": "x"}}]}',
            "f.json: layer 0: ffn.ffn_mult: 'x'; expected a number above 0, or null",
        ),
    ],
)
def test_files_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as problem:
        read_layers("f.json", text)
    assert said in str(problem.value)
