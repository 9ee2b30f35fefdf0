"""Negative controls: one rule taken out, in a regime that excites it.

Public names: `Control`, `CONTROLS`, `control`. A control changes the table (`Parametrization`) that init, optimizer
and forward pass read. The model that then trains is a real one with one wrong rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules import formulas
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import Parametrization, TensorHyperparameters
from mup_megatron.util.errors import UserError

Break = Callable[[Parametrization, Layout], Parametrization]
Which = Callable[[TensorHyperparameters], bool]


@dataclass(frozen=True, kw_only=True)
class Control:
    """How a rule is taken out.

    Args:
        taken_out: the rule, for people.
        break_: the parametrization without it.
        regime: name of the one (`regimes.REGIMES`) under which the rule matters.
        growing_tensor: whether the tensor-parallel size has to grow with the width.
        factors: sizes over the base's, where not any will do.
        grows: the key of `base:` that has to grow (`--growth`), where widths do not tell; empty where any will do.
    """

    taken_out: str
    break_: Break
    regime: str = "plain"
    growing_tensor: bool = False
    factors: tuple[int, ...] = ()
    grows: str = ""


def _m_in(tensor: TensorHyperparameters) -> Fraction:
    return tensor.shape.ratios.m_in


def _m_out(tensor: TensorHyperparameters) -> Fraction:
    return tensor.shape.ratios.m_out


def _is_hidden(tensor: TensorHyperparameters) -> bool:
    return not tensor.shape.spec.readout and tensor.shape.fan_in.grows


def _is_routed(tensor: TensorHyperparameters) -> bool:
    """Whether the rule over experts holds: of an expert, or of the router."""
    return tensor.shape.spec.expert or tensor.shape.name.endswith((".router.weight", ".router.bias"))


def _drawn_by(init: Init) -> Which:
    return lambda tensor: tensor.shape.spec.init is init


def _stepped_by(rule: str) -> Which:
    return lambda tensor: tensor.group.update_rule == rule


def _of(which: Which, change: Callable[[TensorHyperparameters, Config], TensorHyperparameters]) -> Break:
    """Another rule for some tensors, each by itself."""

    def broken(parametrization: Parametrization, layout: Layout) -> Parametrization:
        config = parametrization.config
        return parametrization.replaced(lambda tensor: change(tensor, config) if which(tensor) else tensor)

    return broken


def _every(tensor: TensorHyperparameters) -> bool:
    return True


def _spread(tensor: TensorHyperparameters, factor: float) -> TensorHyperparameters:
    """Initial values times a factor."""
    return dataclasses.replace(tensor, init_std={block: std * factor for block, std in tensor.init_std.items()})


def _without_g(tensor: TensorHyperparameters, config: Config) -> TensorHyperparameters:
    factor, fan_outs = math.sqrt(_m_in(tensor)), tensor.shape.fan_outs
    std = {block: value if fan_outs[block].grows else value * factor for block, value in tensor.init_std.items()}
    return dataclasses.replace(tensor, init_std=std)


def _other_decay(tensor: TensorHyperparameters, config: Config) -> TensorHyperparameters:
    coupled = config.parametrization.weight_decay == "coupled"
    return tensor.retuned(decay=1 / tensor.group.lr if coupled and tensor.group.lr else formulas.ONE)


def _attention_scale(parametrization: Parametrization, layout: Layout) -> Parametrization:
    growth = math.sqrt(parametrization.config.model.head_size / parametrization.base_head_size)
    return parametrization.replaced(softmax_scale=parametrization.forward.softmax_scale * growth)


def _local_shard(parametrization: Parametrization, layout: Layout) -> Parametrization:
    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        spec = tensor.shape.spec
        slices = layout.slice_of(spec, 0)[1] if spec.partition_dim is not None else 1
        if spec.partition_dim == spec.fan_in and tensor.shape.fan_in.grows:
            return _spread(tensor, math.sqrt(slices)).retuned(lr=tensor.group.lr * slices)
        if spec.partition_dim == spec.fan_out and tensor.shape.fan_out.grows:
            return tensor.retuned(eps=tensor.group.eps * slices)
        return tensor

    return parametrization.replaced(change)


CONTROLS: dict[str, Control] = {
    # Falls as a hidden tensor's does.
    "embedding_rate": Control(
        taken_out="the embedding's rate",
        break_=_of(_drawn_by(Init.EMBEDDING), lambda tensor, _: tensor.retuned(lr=tensor.group.lr / _m_out(tensor))),
    ),
    # The table starts smaller on a wider model, as Hugging Face's T5 draws it.
    "relative_bias_init": Control(
        taken_out="init of relative positions",
        break_=_of(_drawn_by(Init.RELATIVE_BIAS), lambda tensor, _: _spread(tensor, 1 / math.sqrt(_m_out(tensor)))),
        regime="relative",
    ),
    # Falls as a hidden tensor's does.
    "relative_bias_rate": Control(
        taken_out="rate of relative positions",
        break_=_of(
            _drawn_by(Init.RELATIVE_BIAS), lambda tensor, _: tensor.retuned(lr=tensor.group.lr / _m_out(tensor))
        ),
        regime="relative",
    ),
    # The base's standard deviation.
    "hidden_init": Control(
        taken_out="init of hidden tensors",
        break_=_of(_is_hidden, lambda tensor, _: _spread(tensor, math.sqrt(_m_in(tensor)))),
    ),
    # The base's rate.
    "hidden_rate": Control(
        taken_out="rate of hidden tensors",
        break_=_of(_is_hidden, lambda tensor, _: tensor.retuned(lr=tensor.group.lr * _m_in(tensor))),
    ),
    # Logits are W h, without A = 1/m_in; init and rate are those that go with it.
    "readout_multiplier": Control(
        taken_out="forward multiplier of the readout",
        break_=lambda rules, layout: rules.replaced(readout=rules.config.hparams.output_multiplier),
    ),
    # 1/sqrt(d) instead of 1/d.
    "attention_scale": Control(taken_out="attention scale", break_=_attention_scale, regime="head_size"),
    # The readout, and whatever else is output-like, is drawn without g.
    "output_like_init": Control(
        taken_out="g, init of output-like tensors", break_=_of(_every, _without_g), regime="untied"
    ),
    # One epsilon for all tensors at all widths.
    "eps": Control(
        taken_out="Adam's epsilon", break_=_of(_every, lambda tensor, _: tensor.retuned(eps=formulas.ONE)), regime="eps"
    ),
    # The same epsilon of experts and router, however many experts there are.
    "experts": Control(
        taken_out="the number of experts in epsilon",
        break_=_of(_is_routed, lambda tensor, config: tensor.retuned(eps=tensor.group.eps * config.experts_ratio)),
        regime="eps",
        grows="num_moe_experts",
    ),
    # SGD's same rate of experts and router, however many experts there are.
    "experts_sgd_rate": Control(
        taken_out="the number of experts in SGD's rate",
        break_=_of(_is_routed, lambda tensor, config: tensor.retuned(lr=tensor.group.lr / config.experts_ratio)),
        regime="sgd",
        grows="num_moe_experts",
    ),
    # λ is the same at all widths, so that lr·λ falls as the rate does; where that is the rule, lr·λ is the same.
    "decay": Control(taken_out="the rule of weight decay", break_=_of(_every, _other_decay), regime="decay"),
    # Branches are added whole, whatever the depth.
    "depth_factor": Control(
        taken_out="depth factor of branches",
        break_=lambda rules, layout: rules.replaced(residual=rules.config.hparams.residual_multiplier),
        regime="depth",
    ),
    # The same for all tensors at all widths.
    "sgd_rate": Control(
        taken_out="SGD's rate", break_=_of(_every, lambda tensor, _: tensor.retuned(lr=formulas.ONE)), regime="sgd"
    ),
    # The same at all widths: a coordinate of an update keeps its size, as Muon is commonly used.
    "muon_rate": Control(
        taken_out="Muon's rate",
        break_=_of(_stepped_by("muon"), lambda tensor, _: tensor.retuned(lr=formulas.ONE)),
        regime="muon",
    ),
    # Adam's rate, 1/m_in: the update is Adam's, but in another basis.
    "soap_rate": Control(
        taken_out="SOAP's rate",
        break_=_of(_stepped_by("soap"), lambda tensor, _: tensor.retuned(lr=1 / _m_in(tensor))),
        regime="soap",
    ),
    # It follows one coordinate of the gradient, as Adam's does, and not a singular value.
    "soap_eps": Control(
        taken_out="SOAP's epsilon",
        break_=_of(_stepped_by("soap"), lambda tensor, _: tensor.retuned(eps=1 / _m_out(tensor))),
        regime="soap_eps",
    ),
    # Fan-in and fan-out are read from the parameter itself, which under tensor parallelism is a slice of it.
    "local_shard": Control(
        taken_out="global widths (read from a local shard)", break_=_local_shard, growing_tensor=True, factors=(1, 2, 4)
    ),
}
"""By the name that `--break` takes."""


def control(name: str) -> Control:
    """The control of that name.

    Raises:
        UserError: there is none.
    """
    if name not in CONTROLS:
        raise UserError(f"--break {name}: expected one of {', '.join(CONTROLS)}")
    return CONTROLS[name]
