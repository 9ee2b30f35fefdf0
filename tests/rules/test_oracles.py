"""Identity 5: independent implementations of µP agree where they hold, which is dense models in proportional growth.

microsoft/mup (PyPI's `mup`): width multipliers, MuAdam, MuAdamW and MuSGD groups, MuReadout. megatron-core's native MuP
(0.17 and later): init and hidden rates at equal depth.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import mup
import pytest
import torch
from packaging.version import Version

from mup_megatron.config import Config
from mup_megatron.model.build import parametrize, unsharded_model
from mup_megatron.mup import MuSGD, set_base_shapes, split_in_place
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from tests.helpers.configs import VOCABULARY, make

# Everything ×4: hidden 32 to 128, FFN 64 to 256, heads 2 to 8 (groups as many), head size 16.
PROPORTIONAL = {
    "model": {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8},
    "base": {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2},
}


def build(config: Config, **sizes: int) -> torch.nn.Module:
    """megatron-core's own GPTModel, unsharded on the meta device: microsoft/mup needs shapes alone."""
    vocabulary = config.model.padded_vocab_size(VOCABULARY)
    return unsharded_model(config, config.model.model_copy(update=sizes), vocabulary)


def with_infshapes(architecture: str, **overrides: Any) -> tuple[Parametrization, torch.nn.Module]:
    config = make(PROPORTIONAL, architecture, **overrides)
    model = build(config)
    base, delta = build(config, **config.base.sizes), build(config, **config.base.enlarged().sizes)
    mup.set_base_shapes(model, base, delta=delta, rescale_params=False, do_assert=False)
    return parametrize(config, VOCABULARY), model


@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_infinite_shapes(architecture: str) -> None:
    ours, model = with_infshapes(architecture)
    for name, parameter in model.named_parameters():
        assert [(dim.base_dim, dim.dim) for dim in parameter.infshape] == [
            (dim.base_dim, dim.dim) for dim in ours.shapes[name].infshape
        ], name


@pytest.mark.parametrize("place", [False, True])
def test_sgd_on_blocks_that_grow_apart(place: bool) -> None:
    """Queries grow, keys and values do not: their rates by hand are 1 and 1/4. Control: where all grow, it is one."""

    def build_and_split(**groups: int) -> None:
        config = make({**PROPORTIONAL, "model": {**PROPORTIONAL["model"], **groups}}, "llama")
        model = build(config)
        base, delta = build(config, **config.base.sizes), build(config, **config.base.enlarged().sizes)
        set_base_shapes(model, base, delta=delta, rescale_params=False)
        if place:
            split_in_place(model, torch.optim.SGD(model.parameters(), lr=1.0))
        else:
            MuSGD(model.parameters(), lr=1.0)

    with pytest.raises(UserError, match=r"different factors \(query 4, key 1, value 1\); expected Adam"):
        build_and_split(num_query_groups=2)
    build_and_split()


@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
@pytest.mark.parametrize(("name", "theirs"), [("adam", mup.MuAdam), ("adamw", mup.MuAdamW), ("sgd", mup.MuSGD)])
def test_optimizer_groups(architecture: str, name: str, theirs: Any) -> None:
    """Rate and decay of every parameter. They decay every tensor; ours decays what Megatron decays."""
    decay = 0.0 if name == "adam" else 0.1
    ours, model = with_infshapes(
        architecture, optimizer__name=name, optimizer__implementation="torch", hparams__weight_decay=decay
    )
    assert disagreements(ours, model, theirs(model.parameters(), lr=ours.config.hparams.lr, weight_decay=decay)) == []


def disagreements(ours: Parametrization, model: torch.nn.Module, theirs: torch.optim.Optimizer) -> list[str]:
    """Parameters whose rate or decay differs."""
    groups = {id(parameter): group for group in theirs.param_groups for parameter in group["params"]}
    wrong = []
    for name, parameter in model.named_parameters():
        group, tensor = groups[id(parameter)], ours.tensors[name]
        decays = not tensor.weight_decay_multiplier or tensor.weight_decay == pytest.approx(group["weight_decay"])
        if tensor.lr != pytest.approx(group["lr"]) or not decays:
            wrong.append(name)
    return wrong


def test_the_comparison_can_fail() -> None:
    """Negative control: coupled decay is not MuAdamW's default, and the standard parametrization is not MuAdamW."""
    for change in ({"parametrization__weight_decay": "coupled"}, {"parametrization__name": "standard"}):
        ours, model = with_infshapes("gpt3", **change)
        theirs = mup.MuAdamW(model.parameters(), lr=ours.config.hparams.lr, weight_decay=0.1)
        assert "decoder.layers.0.mlp.linear_fc1.weight" in disagreements(ours, model, theirs)


def test_readout_multiplier() -> None:
    """MuReadout multiplies its input by output_mult / width_mult."""
    ours, model = with_infshapes("llama", hparams__output_multiplier=6.0)
    readout = mup.MuReadout(128, 384, bias=False, output_mult=6.0)
    readout.weight.infshape = model.output_layer.weight.infshape
    x = torch.randn(3, 128)
    expected = torch.nn.functional.linear(x, readout.weight) * ours.forward.readout
    torch.testing.assert_close(readout(x), expected)
    assert ours.forward.readout == 1.5


@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_init(architecture: str) -> None:
    """mup.init.normal_ divides a hidden weight's std by the square root of its fan-in's width multiplier."""
    ours, model = with_infshapes(architecture)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        tensor = torch.nn.Parameter(torch.empty(1000, 1000))
        tensor.infshape = parameter.infshape
        base_std = ours.config.hparams.init_method_std
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            base_std /= math.sqrt(2 * 2)
        if name.startswith("output_layer"):
            continue  # its multiplier is in the forward pass, and init is constant: MuReadout rescales instead
        mup.init.normal_(tensor, std=base_std)
        for std in ours.tensors[name].init_std.values():
            assert tensor.std().item() == pytest.approx(std, rel=0.01), name


native = pytest.mark.skipif(
    Version(importlib.metadata.version("megatron-core")) < Version("0.17"),
    reason="megatron-core has its own MuP from 0.17 on",
)


@native
@pytest.mark.parametrize("architecture", ["gpt3", "llama"])
def test_native_mup(architecture: str) -> None:
    """Init of hidden weights and their Adam rate and decay, at equal depth and proportional growth."""
    from megatron.core.optimizer import OptimizerConfig, get_mup_config_overrides
    from megatron.core.transformer.transformer_config import TransformerConfig

    ours = parametrize(make(PROPORTIONAL, architecture), VOCABULARY)
    theirs = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=8,
        init_method_std=0.05,
        use_mup=True,
        mup_base_hidden_size=32,
        mup_base_head_dim=16,
    )
    assert theirs.softmax_scale == pytest.approx(ours.forward.softmax_scale)
    for method, name in (
        (theirs.init_method, "decoder.layers.0.mlp.linear_fc1.weight"),
        (theirs.output_layer_init_method, "decoder.layers.0.mlp.linear_fc2.weight"),
        (theirs.embedding_init_method, "embedding.word_embeddings.weight"),
    ):
        tensor = torch.empty(1000, 1000)
        method(tensor)
        for std in ours.tensors[name].init_std.values():
            assert tensor.std().item() == pytest.approx(std, rel=0.01), name
    overrides = get_mup_config_overrides(OptimizerConfig(optimizer="adam", lr=8e-3), mup_width_mult=4.0)
    rates = {override["max_lr"] for override in overrides.values() if "max_lr" in override}
    hidden = {tensor.lr for tensor in ours.tensors.values() if len(tensor.shape.spec.shape) == 2}
    assert min(rates) == pytest.approx(min(hidden)) == pytest.approx(2e-3)


@native
def test_native_mup_has_one_scalar() -> None:
    """Where it falls short: FFN fixed at 4x hidden. fc2 there is an input-like tensor whose init must not shrink."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    growth = {
        "model": {**PROPORTIONAL["model"], "ffn_hidden_size": 64},
        "base": {"hidden_size": 32, "num_attention_heads": 2},
    }
    ours = parametrize(make(growth), VOCABULARY).tensors["decoder.layers.0.mlp.linear_fc2.weight"]
    theirs = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=64,
        num_attention_heads=8,
        init_method_std=0.05,
        use_mup=True,
        mup_base_hidden_size=32,
    )
    tensor = torch.empty(1000, 1000)
    theirs.output_layer_init_method(tensor)
    assert ours.init_std[None] == pytest.approx(0.025)
    assert tensor.std().item() == pytest.approx(0.0125, rel=0.01)
