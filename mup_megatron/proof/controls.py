"""Negative controls: one rule taken out, in a regime that excites it; and the plane between standard and µP.

Public names: `Control`, `CONTROLS`, `control`, `processes`, `interpolate`. A control changes the table
(`Parametrization`) that init, optimizer and forward pass read. The model that then trains is a real one with one wrong
rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mup_megatron.parallel.layout import Layout
from mup_megatron.rules import formulas
from mup_megatron.rules.apply import base_std
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import Parametrization, TensorHyperparameters
from mup_megatron.util.errors import UserError

Break = Callable[[Parametrization, Layout], Parametrization]


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


def interpolate(init: float, lr: float) -> Break:
    """A point in the plane of parametrizations (Tensor Programs V's blog post): (0, 0) is standard, (1, 1) is µP.

    The readout is taken in the form without a forward multiplier, in which its init and rate have exponents of their
    own (paper, Table 8 to Table 3, by abc-symmetry); a tied one, whose init is the embedding's, takes the init's
    exponent in its forward multiplier.

    Args:
        init: exponent on µP's init multipliers.
        lr: exponent on those of rate, epsilon and attention scale.
    """

    def between(parametrization: Parametrization, layout: Layout) -> Parametrization:
        def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
            # Of a readout, what W's init and rate would be without the multiplier A.
            forward = float(tensor.shape.ratios.forward)
            bases = _base_stds(parametrization, tensor)
            std = {
                block: base * (value / base * forward) ** init if base else 0.0
                for (block, value), base in zip(tensor.init_std.items(), bases, strict=True)
            }
            power = 2 if parametrization.update_rule == "sgd" else 1
            eps = (tensor.eps_multiplier or 1.0) / forward
            return dataclasses.replace(tensor, init_std=std).retuned(
                lr=(tensor.lr_multiplier * forward**power) ** lr,
                eps=eps**lr,
                decay=((tensor.weight_decay_multiplier or 1.0) / forward**power) ** lr,
            )

        tied = not any(shape.spec.readout for shape in parametrization.shapes.values())
        alpha = parametrization.config.hparams.output_multiplier
        forward = parametrization.forward
        model = parametrization.config.model
        growth = math.sqrt(parametrization.base_head_size / model.head_size)
        return parametrization.replaced(
            change,
            readout=alpha * (forward.readout / alpha) ** init if tied else alpha,
            softmax_scale=forward.softmax_scale / growth * growth**lr,
        )

    return between


def _base_stds(parametrization: Parametrization, tensor: TensorHyperparameters) -> list[float]:
    base = base_std(parametrization.config, tensor.shape.spec.init)
    return [base if std else 0.0 for std in tensor.init_std.values()]


def _m_in(tensor: TensorHyperparameters) -> Fraction:
    return tensor.shape.ratios.m_in


def _m_out(tensor: TensorHyperparameters) -> Fraction:
    return tensor.shape.ratios.m_out


def _is_hidden(tensor: TensorHyperparameters) -> bool:
    return not tensor.shape.spec.readout and tensor.shape.fan_in.grows


def _embedding_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """The embedding's rate falls as a hidden tensor's does."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        if tensor.shape.spec.init is not Init.EMBEDDING:
            return tensor
        return tensor.retuned(lr=tensor.group.lr / _m_out(tensor))

    return parametrization.replaced(change)


def _relative_bias_init(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """The table of relative positions starts smaller on a wider model, as Hugging Face's T5 draws it."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        if tensor.shape.spec.init is not Init.RELATIVE_BIAS:
            return tensor
        factor = 1 / math.sqrt(_m_out(tensor))
        return dataclasses.replace(tensor, init_std={block: std * factor for block, std in tensor.init_std.items()})

    return parametrization.replaced(change)


def _relative_bias_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """The rate of the table of relative positions falls as a hidden tensor's does."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        if tensor.shape.spec.init is not Init.RELATIVE_BIAS:
            return tensor
        return tensor.retuned(lr=tensor.group.lr / _m_out(tensor))

    return parametrization.replaced(change)


def _hidden_init(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Hidden tensors are drawn with the base's standard deviation."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        if not _is_hidden(tensor):
            return tensor
        factor = math.sqrt(_m_in(tensor))
        return dataclasses.replace(tensor, init_std={block: std * factor for block, std in tensor.init_std.items()})

    return parametrization.replaced(change)


def _hidden_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Hidden tensors take the base's rate."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(lr=tensor.group.lr * _m_in(tensor)) if _is_hidden(tensor) else tensor

    return parametrization.replaced(change)


def _readout_multiplier(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Logits are W h, without A = 1/m_in; init and rate are those that go with it."""
    return parametrization.replaced(readout=parametrization.config.hparams.output_multiplier)


def _attention_scale(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """1/sqrt(d) instead of 1/d."""
    growth = math.sqrt(parametrization.config.model.head_size / parametrization.base_head_size)
    return parametrization.replaced(softmax_scale=parametrization.forward.softmax_scale * growth)


def _output_like_init(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """The readout, and whatever else is output-like, is drawn without g."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        factor = math.sqrt(_m_in(tensor))
        fan_outs = tensor.shape.fan_outs
        std = {block: value if fan_outs[block].grows else value * factor for block, value in tensor.init_std.items()}
        return dataclasses.replace(tensor, init_std=std)

    return parametrization.replaced(change)


def _epsilon(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """One epsilon for all tensors at all widths."""
    return parametrization.replaced(lambda tensor: tensor.retuned(eps=formulas.ONE))


def _is_routed(tensor: TensorHyperparameters) -> bool:
    """Whether the rule over experts holds: of an expert, or of the router."""
    return tensor.shape.spec.expert or tensor.shape.name.endswith((".router.weight", ".router.bias"))


def _experts(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Epsilon of experts and router is the same however many experts there are."""
    ratio = parametrization.config.experts_ratio

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(eps=tensor.group.eps * ratio) if _is_routed(tensor) else tensor

    return parametrization.replaced(change)


def _experts_sgd_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """SGD's rate of experts and router is the same however many experts there are."""
    ratio = parametrization.config.experts_ratio

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(lr=tensor.group.lr / ratio) if _is_routed(tensor) else tensor

    return parametrization.replaced(change)


def _weight_decay(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """λ is the same at all widths, so that lr·λ falls as the rate does; where that is the rule, lr·λ is the same."""
    coupled = parametrization.config.parametrization.weight_decay == "coupled"

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(decay=1 / tensor.group.lr if coupled and tensor.group.lr else formulas.ONE)

    return parametrization.replaced(change)


def _depth_factor(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Branches are added whole, whatever the depth."""
    return parametrization.replaced(residual=parametrization.config.hparams.residual_multiplier)


def _sgd_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """SGD's rate is the same for all tensors at all widths."""
    return parametrization.replaced(lambda tensor: tensor.retuned(lr=formulas.ONE))


def _muon_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Muon's rate is the same at all widths: a coordinate of an update keeps its size, as it is commonly used."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(lr=formulas.ONE) if tensor.group.update_rule == "muon" else tensor

    return parametrization.replaced(change)


def _soap_rate(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """SOAP's matrices have Adam's rate, 1/m_in: the update is Adam's, but in another basis."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(lr=1 / tensor.shape.ratios.m_in) if tensor.group.update_rule == "soap" else tensor

    return parametrization.replaced(change)


def _soap_epsilon(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """SOAP's epsilon follows one coordinate of the gradient, as Adam's does, and not a singular value."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        return tensor.retuned(eps=1 / _m_out(tensor)) if tensor.group.update_rule == "soap" else tensor

    return parametrization.replaced(change)


def _local_shard(parametrization: Parametrization, layout: Layout) -> Parametrization:
    """Fan-in and fan-out are read from the parameter itself, which under tensor parallelism is a slice of it."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        spec = tensor.shape.spec
        slices = layout.slice_of(spec, 0)[1] if spec.partition_dim is not None else 1
        if spec.partition_dim == spec.fan_in and tensor.shape.fan_in.grows:
            std = {block: value * math.sqrt(slices) for block, value in tensor.init_std.items()}
            return dataclasses.replace(tensor, init_std=std).retuned(lr=tensor.group.lr * slices)
        if spec.partition_dim == spec.fan_out and tensor.shape.fan_out.grows:
            return tensor.retuned(eps=tensor.group.eps * slices)
        return tensor

    return parametrization.replaced(change)


CONTROLS: dict[str, Control] = {
    "embedding_rate": Control(taken_out="the embedding's rate", break_=_embedding_rate),
    "relative_bias_init": Control(
        taken_out="init of relative positions", break_=_relative_bias_init, regime="relative"
    ),
    "relative_bias_rate": Control(
        taken_out="rate of relative positions", break_=_relative_bias_rate, regime="relative"
    ),
    "hidden_init": Control(taken_out="init of hidden tensors", break_=_hidden_init),
    "hidden_rate": Control(taken_out="rate of hidden tensors", break_=_hidden_rate),
    "readout_multiplier": Control(taken_out="forward multiplier of the readout", break_=_readout_multiplier),
    "attention_scale": Control(taken_out="attention scale", break_=_attention_scale, regime="head_size"),
    "output_like_init": Control(taken_out="g, init of output-like tensors", break_=_output_like_init, regime="untied"),
    "eps": Control(taken_out="Adam's epsilon", break_=_epsilon, regime="eps"),
    "experts": Control(
        taken_out="the number of experts in epsilon", break_=_experts, regime="eps", grows="num_moe_experts"
    ),
    "experts_sgd_rate": Control(
        taken_out="the number of experts in SGD's rate", break_=_experts_sgd_rate, regime="sgd", grows="num_moe_experts"
    ),
    "decay": Control(taken_out="the rule of weight decay", break_=_weight_decay, regime="decay"),
    "depth_factor": Control(taken_out="depth factor of branches", break_=_depth_factor, regime="depth"),
    "sgd_rate": Control(taken_out="SGD's rate", break_=_sgd_rate, regime="sgd"),
    "muon_rate": Control(taken_out="Muon's rate", break_=_muon_rate, regime="muon"),
    "soap_rate": Control(taken_out="SOAP's rate", break_=_soap_rate, regime="soap"),
    "soap_eps": Control(taken_out="SOAP's epsilon", break_=_soap_epsilon, regime="soap_eps"),
    "local_shard": Control(
        taken_out="global widths (read from a local shard)",
        break_=_local_shard,
        growing_tensor=True,
        factors=(1, 2, 4),
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


def processes(name: str | None, factors: Sequence[int]) -> int | None:
    """Number of processes that a control needs; None where the config's own layout is enough.

    A control whose tensor-parallel size grows with the width needs one process per factor.

    Args:
        name: of the control; None is none.
        factors: sizes over the base's; the control's own if there are none.
    """
    if name is None or not control(name).growing_tensor:
        return None
    return max(factors or control(name).factors)
