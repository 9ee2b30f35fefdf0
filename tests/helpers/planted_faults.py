"""Faults of other kinds than `coord-check --break` names, planted in the library for as long as a body runs.

Each says under which model and in which regime the coordinate check sees it, and as which quantity of which tensor or
module. All but those of the table of rules are planted where a programmer would make them: in the optimizer's groups,
in initial values, in a module's forward or backward pass, in what a resumed run reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mup_megatron.engines import deepspeed as deepspeed_engine
from mup_megatron.model import build as model
from mup_megatron.model.global_names import named_buffers
from mup_megatron.proof import coordinates
from mup_megatron.rules import formulas
from mup_megatron.rules.apply import Rules
from mup_megatron.rules.formulas import Ratios
from mup_megatron.rules.table import Parametrization, TensorHyperparameters
from tests.helpers.breakages import replaced

Planted = contextlib.AbstractContextManager[None]
Change = Callable[[Parametrization, TensorHyperparameters], TensorHyperparameters]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and where it is seen.

    Args:
        plant: the fault.
        seen: name of the tensor or module, and the quantity of it, that are out of bounds.
        model: of test_planted_faults.MODELS.
        regime: of regimes.REGIMES.
    """

    plant: Callable[[], Planted]
    seen: tuple[str, str]
    model: str = "gpt3"
    regime: str = "plain"


@contextlib.contextmanager
def _table(which: Callable[[str], bool], change: Change) -> Iterator[None]:
    """The rules of some tensors are others."""
    original = model.apply_rules

    def apply_rules(*arguments: Any, **more: Any) -> Parametrization:
        rules = original(*arguments, **more)
        return rules.replaced(lambda tensor: change(rules, tensor) if which(tensor.shape.name) else tensor)

    with replaced(model, "apply_rules", apply_rules):
        yield


def _rate(*parts: str, by: Callable[[TensorHyperparameters], float]) -> Callable[[], Planted]:
    """The rate of tensors whose name has one of the parts, times what `by` says."""
    return lambda: _table(
        lambda name: any(part in f"{name}." for part in parts),
        lambda rules, tensor: tensor.retuned(lr=float(tensor.group.lr) * by(tensor)),
    )


def _std(part: str, by: Callable[[TensorHyperparameters], float], block: str | None = None) -> Callable[[], Planted]:
    """Initial values of a block (all, if none is named), times what `by` says."""

    def change(rules: Parametrization, tensor: TensorHyperparameters) -> TensorHyperparameters:
        std = {name: value * (by(tensor) if block in (None, name) else 1.0) for name, value in tensor.init_std.items()}
        return dataclasses.replace(tensor, init_std=std)

    return lambda: _table(lambda name: part in f"{name}.", change)


def _m_in(tensor: TensorHyperparameters) -> float:
    return float(tensor.shape.fan_in.ratio)


def _m_out(tensor: TensorHyperparameters) -> float:
    return float(tensor.shape.fan_out.ratio)


@contextlib.contextmanager
def _built(change: Callable[[Any, Parametrization], None]) -> Iterator[None]:
    """Something is done to the model after it was built."""
    original = coordinates.build_model

    def build(parametrization: Any, *more: Any) -> Any:
        chunks = original(parametrization, *more)
        change(chunks[0], parametrization)
        return chunks

    with replaced(coordinates, "build_model", build):
        yield


def _key_rows_stay() -> Planted:
    """Gradients of the key's rows are lost on the way through the fused tensor."""

    def change(model: Any, rules: Parametrization) -> None:
        for layer in model.decoder.layers:
            weight = layer.self_attention.linear_qkv.weight
            head, groups = rules.config.model.head_size, rules.config.model.query_groups
            period = weight.shape[0] // groups
            lost = (torch.arange(weight.shape[0]) % period // head) == period // head - 2
            weight.register_hook(lambda gradient, lost=lost: gradient.masked_fill(lost[:, None], 0.0))

    return _built(change)


def _scale_of_one_layer(kind: str = "self_attention") -> Planted:
    """The last layer's self- or cross-attention is scaled with 1/sqrt(d)."""

    def change(model: Any, rules: Parametrization) -> None:
        attention = getattr(model.decoder.layers[-1], kind).core_attention
        attention.softmax_scale *= math.sqrt(rules.config.model.head_size / rules.base_head_size)

    return _built(change)


def _mlp_branch_whole() -> Planted:
    """The depth factor is lost on the MLP's branch."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    def change(model: Any, rules: Parametrization) -> None:
        for layer in model.decoder.layers:
            layer.mlp_bda = get_bias_dropout_add

    return _built(change)


def _weak_gradient() -> Planted:
    """The gradient into the MLP's branch is divided by the width once more; Adam's updates do not see it."""

    def change(model: Any, rules: Parametrization) -> None:
        ratio = float(rules.tensors["decoder.layers.0.mlp.linear_fc1.weight"].shape.fan_in.ratio)

        def weaken(_module: Any, _inputs: Any, output: Any) -> Any:
            output[0].register_hook(lambda gradient: gradient / ratio)

        for layer in model.decoder.layers:
            layer.mlp.register_forward_hook(weaken)

    return _built(change)


def _gain_starts_small() -> Planted:
    def change(model: Any, rules: Parametrization) -> None:
        ratio = float(rules.tensors["decoder.final_layernorm.weight"].shape.fan_out.ratio)
        model.decoder.final_layernorm.weight.data.div_(ratio)

    return _built(change)


def _multiplier_twice() -> Planted:
    """The embedding's multiplier is applied twice."""
    from mup_megatron.model.layers.embedding import scale_output

    def change(model: Any, rules: Parametrization) -> None:
        scale_output(model.embedding, rules.forward.embedding)

    return _built(change)


@contextlib.contextmanager
def _multiplier_lost_in_recomputation() -> Iterator[None]:
    """The second forward pass, which gradients come from, adds branches whole."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.random import CheckpointFunction

    from mup_megatron.model.layers import spec

    original, backward = spec.scaled_bias_dropout_add, CheckpointFunction.backward
    again = []

    def run_again(*arguments: Any) -> Any:
        again.append(True)
        try:
            return backward(*arguments)
        finally:
            again.pop()

    def scaled_bias_dropout_add(multiplier: float) -> Any:
        whole = original(multiplier)
        return lambda *which: lambda *tensors: (get_bias_dropout_add if again else whole)(*which)(*tensors)

    with (
        replaced(CheckpointFunction, "backward", staticmethod(run_again)),
        replaced(spec, "scaled_bias_dropout_add", scaled_bias_dropout_add),
    ):
        yield


@contextlib.contextmanager
def _after_loading(change: Callable[[Any], None]) -> Iterator[None]:
    """Something is done to an engine that has read a state."""
    original = coordinates.load_state

    def load(engine: Any, *more: Any) -> None:
        original(engine, *more)
        change(engine)

    with replaced(coordinates, "load_state", load):
        yield


def _group_of(engine: Any, part: str) -> Any:
    return next(group for group in engine.optimizer.param_groups if any(part in name for name in group["names"]))


def _doubled_after_resume() -> Planted:
    def change(engine: Any) -> None:
        group = _group_of(engine, "final_layernorm.weight")
        group["lr_multiplier"] *= 2

    return _after_loading(change)


def _moments_lost() -> Planted:
    """A resumed run's second moments start from zero."""

    def change(engine: Any) -> None:
        for state in engine._inner.state.values():
            state["exp_avg_sq"].zero_()

    return _after_loading(change)


@contextlib.contextmanager
def _expert_bias_lost() -> Iterator[None]:
    """A resumed run's routers start from a bias of zero."""
    original = coordinates.load_weights

    def load(chunks: Any, *more: Any) -> None:
        original(chunks, *more)
        for name, buffer in named_buffers(chunks):
            if name.endswith("expert_bias"):
                buffer.zero_()

    with replaced(coordinates, "load_weights", load):
        yield


def _in_no_group() -> Planted:
    """A tensor that no group of the optimizer has."""
    original = deepspeed_engine.parameter_groups

    def parameter_groups(named: Any, rules: Any) -> Any:
        return original([each for each in named if each[0] != "decoder.layers.0.mlp.linear_fc2.weight"], rules)

    return replaced(deepspeed_engine, "parameter_groups", parameter_groups)


def _tied_readout_whole() -> Planted:
    return replaced(Rules, "_readout", lambda _self: Ratios(readout=True))


def _eps(part: str) -> Callable[[], Planted]:
    return lambda: _table(lambda name: part in name, lambda rules, tensor: tensor.retuned(eps=1.0))


def _decay(part: str) -> Callable[[], Planted]:
    return lambda: _table(lambda name: part in name, lambda rules, tensor: tensor.retuned(decay=1.0))


def _gains_decay() -> Planted:
    def change(rules: Parametrization, tensor: TensorHyperparameters) -> TensorHyperparameters:
        return dataclasses.replace(tensor, group=dataclasses.replace(tensor.group, weight_decay=1.0))

    return _table(lambda name: "layernorm.weight" in name, change)


def _sqrt_as_independent() -> Planted:
    """Decay of the rule `sqrt` is divided by the rate's multiplier and not by its root."""
    original = formulas.weight_decay
    return replaced(formulas, "weight_decay", lambda rule, lr: original("independent" if rule == "sqrt" else rule, lr))


def _init_factor_twice() -> Planted:
    """The factor of `hparams.per_tensor` on initial values is applied twice: too large by the same at every width."""
    original = TensorHyperparameters.times

    def times(self: TensorHyperparameters, factors: Any) -> TensorHyperparameters:
        once = dataclasses.replace(factors, lr=1.0, weight_decay=1.0)
        return original(original(self, factors), once)

    return replaced(TensorHyperparameters, "times", times)


def _gains_start_at_half() -> Planted:
    def change(model: Any, rules: Parametrization) -> None:
        model.decoder.final_layernorm.weight.data.mul_(0.5)

    return _built(change)


def _one_ratio() -> Planted:
    """Every hidden tensor's rate falls with the hidden size, whatever its own fan-in is."""
    from mup_megatron.rules.shapes import Init

    def change(rules: Parametrization, tensor: TensorHyperparameters) -> TensorHyperparameters:
        spec, m = tensor.shape.spec, float(rules.tensors["embedding.word_embeddings.weight"].shape.fan_out.ratio)
        hidden = spec.fan_in is not None and spec.init is not Init.EMBEDDING and not spec.readout
        return tensor.retuned(lr=1 / m) if hidden else tensor

    return _table(lambda name: True, change)


FAULTS: dict[str, Fault] = {
    "attention_never_trained": Fault(
        plant=_rate(".self_attention.", by=lambda tensor: 0.0),
        seen=("decoder.layers.0.self_attention.linear_qkv.weight[query]", "update"),
    ),
    "gains_and_biases_never_trained": Fault(
        plant=_rate("layernorm.", ".bias.", by=lambda tensor: 0.0), seen=("decoder.final_layernorm.weight", "update")
    ),
    "readout_rate_over_m_again": Fault(
        plant=_rate("output_layer.", by=lambda tensor: 1 / _m_in(tensor)),
        seen=("output_layer.weight", "update"),
        model="llama",
    ),
    "one_ratio_for_every_tensor": Fault(
        plant=_one_ratio, seen=("decoder.layers.0.mlp.linear_fc2.weight", "update"), model="mixed"
    ),
    "gains_by_m": Fault(
        plant=_rate("layernorm.weight.", by=lambda tensor: 1 / _m_out(tensor)),
        seen=("decoder.layers.0.input_layernorm.weight", "update"),
    ),
    "one_layer_of_mlp": Fault(
        plant=_rate("layers.1.mlp.linear_fc1.weight.", by=_m_in),
        seen=("decoder.layers.1.mlp.linear_fc1.weight", "update"),
    ),
    "one_kind_of_layer": Fault(
        plant=_rate("linear_proj.weight.", by=_m_in),
        seen=("decoder.layers.0.self_attention.linear_proj.weight", "update"),
    ),
    "positions_as_hidden": Fault(
        plant=_rate("position_embeddings.", by=lambda tensor: 1 / _m_out(tensor)),
        seen=("embedding.position_embeddings.weight", "update"),
    ),
    "doubled_group": Fault(
        plant=_rate("linear_fc2.weight.", by=lambda tensor: 2.0),
        seen=("decoder.layers.0.mlp.linear_fc2.weight", "rate"),
    ),
    "in_no_group": Fault(plant=_in_no_group, seen=("decoder.layers.0.mlp.linear_fc2.weight", "update")),
    "key_rows_stay": Fault(
        plant=_key_rows_stay, seen=("decoder.layers.1.self_attention.linear_qkv.weight[key]", "update")
    ),
    "query_drawn_as_at_the_base": Fault(
        plant=_std("linear_qkv.weight.", lambda tensor: math.sqrt(_m_in(tensor)), "query"),
        seen=("decoder.layers.0.self_attention.linear_qkv.weight[query]", "initial"),
    ),
    "value_drawn_without_g": Fault(
        plant=_std("linear_qkv.weight.", lambda tensor: math.sqrt(_m_in(tensor)), "value"),
        seen=("decoder.layers.0.self_attention.core_attention.value", "output"),
        model="fixed_kv",
    ),
    "embedding_drawn_by_m": Fault(
        plant=_std("word_embeddings.", lambda tensor: 1 / math.sqrt(_m_out(tensor))),
        seen=("embedding.word_embeddings.weight", "initial"),
    ),
    "init_factor_twice": Fault(
        plant=_init_factor_twice, seen=("decoder.layers.0.mlp.linear_fc2.weight", "drawn"), model="factors"
    ),
    "gains_start_at_half": Fault(plant=_gains_start_at_half, seen=("decoder.final_layernorm.weight", "drawn")),
    "output_projections_without_layers": Fault(
        plant=_std("linear_proj.weight.", lambda tensor: 2.0),
        seen=("decoder.layers.0.self_attention.linear_proj.weight", "drawn"),
    ),
    "gain_starts_small": Fault(plant=_gain_starts_small, seen=("decoder.final_layernorm.weight", "initial")),
    "tied_readout_without_its_multiplier": Fault(plant=_tied_readout_whole, seen=("output_layer", "output")),
    "weak_gradient": Fault(plant=_weak_gradient, seen=("decoder.layers.0.mlp", "gradient")),
    "one_expert_s_rate": Fault(
        plant=_rate("local_experts.1.linear_fc1.weight.", by=_m_in),
        seen=("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight[gate]", "update"),
        model="moe",
    ),
    "one_expert_s_init": Fault(
        plant=_std("local_experts.0.linear_fc2.weight.", lambda tensor: math.sqrt(_m_in(tensor))),
        seen=("decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight", "initial"),
        model="moe",
    ),
    "router_s_rate": Fault(
        plant=_rate("router.weight.", by=_m_in), seen=("decoder.layers.0.mlp.router.weight", "update"), model="moe"
    ),
    "router_drawn_without_g": Fault(
        plant=_std("router.weight.", lambda tensor: math.sqrt(_m_in(tensor))),
        seen=("decoder.layers.0.mlp.router.logits", "output"),
        model="moe",
    ),
    "router_s_bias_lost": Fault(
        plant=_expert_bias_lost,
        seen=("decoder.layers.0.mlp.router", "change"),
        model="moe_biased",
        regime="resume",
    ),
    "shared_expert_s_gate": Fault(
        plant=_rate("gate_weight.", by=_m_in),
        seen=("decoder.layers.0.mlp.shared_experts.gate_weight", "update"),
        model="moe",
    ),
    "mtp_s_projection": Fault(
        plant=_rate("eh_proj.weight.", by=_m_in), seen=("mtp.layers.0.eh_proj.weight", "update"), model="mtp"
    ),
    "latent_s_projection": Fault(
        plant=_rate("linear_kv_up_proj.weight.", by=_m_in),
        seen=("decoder.layers.0.self_attention.linear_kv_up_proj.weight[value]", "update"),
        model="mla",
    ),
    "epsilon_of_one_layer": Fault(
        plant=_eps("layers.1.mlp.linear_fc1.weight"),
        seen=("decoder.layers.1.mlp.linear_fc1.weight", "update"),
        regime="eps",
    ),
    "decay_of_one_layer": Fault(
        plant=_decay("layers.0.mlp.linear_fc1.weight"),
        seen=("decoder.layers.0.mlp.linear_fc1.weight", "update"),
        regime="decay",
    ),
    "sqrt_as_independent": Fault(
        plant=_sqrt_as_independent,
        seen=("decoder.layers.0.mlp.linear_fc1.weight", "update"),
        model="sqrt_decay",
        regime="decay",
    ),
    "gains_decay": Fault(plant=_gains_decay, seen=("decoder.final_layernorm.weight", "rate"), regime="decay"),
    "attention_scale_of_one_layer": Fault(
        plant=_scale_of_one_layer,
        seen=("decoder.layers.1.self_attention.core_attention.logits", "output"),
        regime="head_size",
    ),
    "cross_attention_scale": Fault(
        plant=lambda: _scale_of_one_layer("cross_attention"),
        seen=("decoder.layers.1.cross_attention.core_attention.logits", "output"),
        model="t5",
        regime="head_size",
    ),
    "depth_factor_of_one_branch": Fault(
        plant=_mlp_branch_whole, seen=("decoder.layers.last", "change"), regime="depth"
    ),
    "biases_under_sgd": Fault(
        plant=_rate(".bias.", by=lambda tensor: 1 / _m_out(tensor)),
        seen=("decoder.layers.0.mlp.linear_fc1.bias", "update"),
        regime="sgd",
    ),
    "embedding_multiplier_twice": Fault(plant=_multiplier_twice, seen=("embedding", "output"), regime="multipliers"),
    "multiplier_lost_in_recomputation": Fault(
        plant=_multiplier_lost_in_recomputation,
        seen=("embedding", "gradient"),
        model="halved_branches",
        regime="recompute",
    ),
    "doubled_after_resume": Fault(
        plant=_doubled_after_resume, seen=("decoder.final_layernorm.weight", "update"), regime="resume"
    ),
    "moments_lost": Fault(
        plant=_moments_lost, seen=("decoder.layers.0.mlp.linear_fc1.weight", "update"), regime="resume"
    ),
}
