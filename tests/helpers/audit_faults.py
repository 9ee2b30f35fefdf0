"""Faults that an audit must name: what is done to a run, at which moment, and what is said of which tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from mup_megatron.engines.optimizer_state import torch_optimizers
from mup_megatron.rules.table import Parametrization, TensorHyperparameters

LAYER = "decoder.layers.0."
QKV, QKV_BIAS = f"{LAYER}self_attention.linear_qkv.weight", f"{LAYER}self_attention.linear_qkv.bias"
FC1, FC2, BIAS = (f"{LAYER}mlp.linear_{name}" for name in ("fc1.weight", "fc2.weight", "fc2.bias"))
GAIN, WORDS = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"

Named = dict[str, torch.nn.Parameter]
Change = Callable[[Named, int], None]
"""What is done to this rank's parameters by global name; on which rank."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        tensor: that must be named.
        said: of it.
        modules: done to this rank's modules by global name before the first forward pass; on which rank.
        values: done to the initial values, before there is an optimizer.
        table: that the optimizer's groups are made by, from the one that the audit has.
        optimizer: done to the real optimizer before the step.
        weights: done to the optimizer's weights behind the step.
    """

    tensor: str
    said: str
    modules: Callable[[dict[str, Any], int], None] | None = None
    values: Change | None = None
    table: Callable[[Parametrization], Parametrization] | None = None
    optimizer: Callable[[Any, Named], None] | None = None
    weights: Change | None = None


def on(name: str, change: Callable[[torch.Tensor], Any], *, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Change:
    """One tensor changed in place."""

    def changed(named: Named, rank: int) -> None:
        if name in named and rank in ranks:
            change(named[name].data)

    return changed


def swapped(one: str, other: str) -> Change:
    """Two tensors with each other's values."""

    def changed(named: Named, rank: int) -> None:
        first = named[one].data.clone()
        named[one].data.copy_(named[other].data)
        named[other].data.copy_(first)

    return changed


def row(name: str, **retuned: float) -> Callable[[Parametrization], Parametrization]:
    """Another row of the table for one tensor: factors on what its group has."""

    def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
        if tensor.shape.name != name:
            return tensor
        group = {"lr": tensor.group.lr, "eps": tensor.group.eps, "decay": tensor.group.weight_decay}
        return tensor.retuned(**{key: float(group[key]) * factor for key, factor in retuned.items()})

    return lambda table: table.replaced(change)


def exchanged(one: str, other: str) -> Callable[[Parametrization], Parametrization]:
    """Two tensors in each other's groups."""

    def swap(table: Parametrization) -> Parametrization:
        groups = {one: table.tensors[other].group, other: table.tensors[one].group}

        def change(tensor: TensorHyperparameters) -> TensorHyperparameters:
            group = groups.get(tensor.shape.name, tensor.group)
            return tensor.retuned(lr=group.lr, eps=group.eps, decay=group.weight_decay)

        return table.replaced(change)

    return swap


def in_groups(**changed: Any) -> Callable[[Any, Named], None]:
    """Keys of every group of the real optimizer."""

    def change(optimizer: Any, named: Named) -> None:
        for group in optimizer.param_groups:
            group.update(changed)

    return change


def lost(name: str) -> Callable[[Any, Named], None]:
    """A parameter that is in no group any more."""

    def change(optimizer: Any, named: Named) -> None:
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is not named[name]]

    return change


def twice(name: str) -> Callable[[Any, Named], None]:
    """A parameter that is in two groups: the last one has it too."""
    return lambda optimizer, named: optimizer.param_groups[-1]["params"].append(named[name])


def of_matrices(**changed: Any) -> Callable[[Any, Named], None]:
    """Attributes of the optimizer that steps matrices, of megatron-core's chain."""

    def change(optimizer: Any, named: Named) -> None:
        for each in torch_optimizers(optimizer):
            if type(each).__module__.partition(".")[0] != "torch":
                vars(each).update(changed)

    return change


def halved(optimizer: Any, named: Named) -> None:
    """Muon's step of half the size."""
    for each in torch_optimizers(optimizer):
        if (orthogonalize := getattr(each, "orthogonalize", None)) is not None:
            each.orthogonalize = lambda *args, _of=orthogonalize, **keys: _of(*args, **keys) / 2


def frozen(name: str) -> Change:
    """A parameter to which no gradient comes."""

    def change(named: Named, rank: int) -> None:
        if name in named:
            named[name].register_hook(torch.zeros_like)

    return change


def unscaled(name: str, *, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Callable[[dict[str, Any], int], None]:
    """A module that lost what multiplies its input or output."""

    def change(modules: dict[str, Any], rank: int) -> None:
        if name in modules and rank in ranks:
            for hooks in (modules[name]._forward_pre_hooks, modules[name]._forward_hooks):
                for key in [key for key, hook in hooks.items() if "scale_" in hook.__qualname__]:
                    del hooks[key]

    return change


def at_scale(name: str, scale: Callable[[float], float]) -> Callable[[dict[str, Any], int], None]:
    """A core attention with another softmax scale."""

    def change(modules: dict[str, Any], rank: int) -> None:
        if name in modules:
            modules[name].softmax_scale = scale(modules[name].softmax_scale)

    return change


def adding(layer: str, get_add: Callable[[Any], Any]) -> Callable[[dict[str, Any], int], None]:
    """A layer that adds its MLP in another way."""

    def change(modules: dict[str, Any], rank: int) -> None:
        if layer in modules:
            modules[layer].mlp_bda = get_add(modules[layer].mlp_bda)

    return change


def once(get_add: Any) -> Any:
    """Scaled where no gradient is asked for: not when recomputation runs the layer again."""
    return lambda training, fused: (
        lambda *args: (get_bias_dropout_add if torch.is_grad_enabled() else get_add)(training, fused)(*args)
    )


FLIP: Callable[[torch.Tensor], Any] = lambda value: value.copy_(value.flatten().flip(0).view_as(value))  # noqa: E731
INITIAL = {
    "twice the size": Fault(tensor=FC2, said="initial std", values=on(FC2, lambda v: v.mul_(2))),
    "the base's size": Fault(tensor=QKV, said="initial std", values=on(QKV, lambda v: v.mul_(1.225))),
    "half the size": Fault(tensor=WORDS, said="initial std", values=on(WORDS, lambda v: v.mul_(0.5))),
    "zeros": Fault(tensor=FC1, said="initial std", values=on(FC1, lambda v: v.zero_())),
    "a mean": Fault(tensor=WORDS, said="initial mean", values=on(WORDS, lambda v: v.add_(0.02))),
    "a bias of its own": Fault(tensor=BIAS, said="values that are not 0", values=on(BIAS, lambda v: v.add_(0.01))),
    "a gain of its own": Fault(tensor=GAIN, said="values that are not 1", values=on(GAIN, lambda v: v.mul_(1.1))),
    "other numbers": Fault(tensor=FC2, said="not the seed's", values=on(FC2, FLIP)),
    "of another layer": Fault(tensor=FC2, said="not the seed's", values=swapped(FC2, FC2.replace(".0.", ".1."))),
    "one rank's slice": Fault(tensor=FC1, said="not the seed's", values=on(FC1, FLIP, ranks=(1,))),
    "one rank's copy": Fault(tensor=GAIN, said="copies apart", values=on(GAIN, lambda v: v[:1].add_(1e-6), ranks=(1,))),
}
GROUPS = {
    "twice the rate": Fault(tensor=FC2, said="learning rate", table=row(FC2, lr=2)),
    "the base's rate": Fault(tensor=QKV, said="learning rate", table=row(QKV, lr=1.5)),
    "a rate 1 % off": Fault(tensor=WORDS, said="learning rate", table=row(WORDS, lr=1.01)),
    "no rate": Fault(tensor=FC1, said="learning rate", table=row(FC1, lr=0.0)),
    "a gain's rate": Fault(tensor=GAIN, said="learning rate", table=row(GAIN, lr=0.5)),
    "a bias's rate": Fault(tensor=BIAS, said="learning rate", table=row(BIAS, lr=2)),
    "another epsilon": Fault(tensor=QKV, said="epsilon", table=row(QKV, eps=4)),
    "the base's epsilon": Fault(tensor=GAIN, said="epsilon", table=row(GAIN, eps=1.5)),
    "half the decay": Fault(tensor=FC1, said="weight decay", table=row(FC1, decay=0.5)),
    "a tenth of the epsilon": Fault(tensor=WORDS, said="epsilon", table=row(WORDS, eps=0.1)),
    "no decay": Fault(tensor=QKV, said="weight decay", table=row(QKV, decay=0.0)),
    "in each other's groups": Fault(tensor=WORDS, said="learning rate", table=exchanged(WORDS, FC2)),
    "other betas": Fault(tensor=FC2, said="second beta", optimizer=in_groups(betas=(0.9, 0.9))),
    "one epsilon for all": Fault(tensor=QKV, said="epsilon", optimizer=in_groups(eps=1e-5)),
    "gains decay": Fault(tensor=GAIN, said="weight decay", optimizer=in_groups(weight_decay=0.3)),
}
RELATIVE_BIAS = "decoder_relative_pos_emb.relative_attention_bias"
LAYERS = [f"decoder.layers.{number}" for number in range(2)]
MLPS, CORES = [f"{layer}.mlp" for layer in LAYERS], [f"{layer}.self_attention.core_attention" for layer in LAYERS]
MULTIPLIERS = {
    "no readout multiplier": Fault(tensor="output_layer", said="readout", modules=unscaled("output_layer")),
    "no embedding multiplier": Fault(tensor="embedding", said="embedding", modules=unscaled("embedding")),
    "1/sqrt(d)": Fault(tensor=CORES[0], said="softmax", modules=at_scale(CORES[0], lambda scale: scale**0.5)),
    "a softmax 1 % off": Fault(tensor=CORES[1], said="softmax", modules=at_scale(CORES[1], lambda scale: scale * 1.01)),
    "no residual multiplier": Fault(
        tensor=MLPS[0], said="residual", modules=adding(LAYERS[0], lambda _: get_bias_dropout_add)
    ),
    "unscaled when recomputed": Fault(tensor=MLPS[1], said="residual", modules=adding(LAYERS[1], once)),
    "one rank's readout": Fault(tensor="output_layer", said="readout", modules=unscaled("output_layer", ranks=(1,))),
}
STEPS = {
    "decay in the gradient": Fault(tensor=FC2, said="update", optimizer=in_groups(decoupled_weight_decay=False)),
    "the largest square so far": Fault(tensor=FC2, said="update", optimizer=in_groups(amsgrad=True)),
    "no gradient": Fault(tensor=FC1, said="gradient", values=frozen(FC1)),
    "undone": Fault(tensor=QKV, said="update", weights=on(QKV, lambda v: v.mul_(1.001))),
    "apart after the step": Fault(tensor=GAIN, said="copies", weights=on(GAIN, lambda v: v.mul_(1.5), ranks=(1,))),
}
MATRICES = {
    "slices": Fault(tensor=FC2, said="update", optimizer=of_matrices(tp_mode="blockwise")),
    "query, key and value as one": Fault(tensor=QKV, said="update", optimizer=of_matrices(split_qkv=False)),
    "of half the size": Fault(tensor=FC2, said="update", optimizer=halved),
    "another momentum": Fault(tensor=FC2, said="momentum", optimizer=in_groups(momentum=0.5)),
    "Nesterov's in the bases": Fault(tensor=FC2, said="update", optimizer=of_matrices(nesterov=True)),
}
"""Of Muon and SOAP."""
OF_LAYERS = {
    "no position bias multiplier": Fault(tensor=RELATIVE_BIAS, said="position bias", modules=unscaled(RELATIVE_BIAS)),
    "no multiplier of fc1": Fault(
        tensor=f"{MLPS[0]}.linear_fc1", said="layer", modules=unscaled(f"{MLPS[0]}.linear_fc1")
    ),
    "no multiplier of fc2": Fault(
        tensor=f"{MLPS[0]}.linear_fc2", said="layer", modules=unscaled(f"{MLPS[0]}.linear_fc2")
    ),
    "no multiplier of words": Fault(tensor=WORDS[:-7], said="layer", modules=unscaled(WORDS[:-7])),
}
"""Of models whose layers multiply."""
FIRST_STEPS = {name: fault for name, fault in STEPS.items() if name != "the largest square so far"}
"""Of a run's very first step, behind which there is only one square."""
WHOLE_GROUPS = {
    "in no group": Fault(tensor=FC1, said="optimizer groups", optimizer=lost(FC1)),
    "in two groups": Fault(tensor=FC1, said="optimizer groups", optimizer=twice(FC1)),
}
"""Where the optimizer steps the parameters themselves."""


def apart(faults: dict[str, Fault]) -> list[tuple[str, ...]]:
    """Names of faults that one run can have together: each in a tensor of its own, done at the same moment."""
    together: list[dict[str, Fault]] = []
    for name, fault in faults.items():
        for others in together:
            if all(other.tensor != fault.tensor and _moment(other) == _moment(fault) for other in others.values()):
                others[name] = fault
                break
        else:
            together.append({name: fault})
    return [tuple(names) for names in together]


def _moment(fault: Fault) -> tuple[bool, bool]:
    return fault.table is not None, fault.optimizer is not None
