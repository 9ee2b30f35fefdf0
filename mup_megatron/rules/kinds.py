"""Which kinds of `hparams.per_tensor` a tensor belongs to, and the factors that a config gives it.

Public names: `kinds_of`, `PerTensorFactors`, `factors_of`, `names`, `check_entries`, `is_decayed`. A tensor that
several entries name takes their product. Kinds of parts of a fused tensor (query, key and value rows) can have initial
values of their own; the tensor has one learning rate and one decay, which its parts must agree on.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mup_megatron.config import Config
from mup_megatron.config.per_tensor import is_pattern
from mup_megatron.rules.shapes import Init, TensorShape, without_numbers
from mup_megatron.util.errors import UserError

_KEY = "hparams.per_tensor"
_BLOCKS = {"query": "attention_q", "key": "attention_k", "value": "attention_v"}
_CONSTANT = (Init.ZEROS, Init.ONES, Init.OWN)


@dataclass(frozen=True, kw_only=True)
class PerTensorFactors:
    """What `hparams.per_tensor` multiplies of one tensor.

    Args:
        lr: the learning rate.
        weight_decay: the decay.
        init: the standard deviation of initial values, per block ({None: factor} for one block).
    """

    lr: float
    weight_decay: float
    init: dict[str | None, float]


def kinds_of(shape: TensorShape, block: str | None) -> frozenset[str]:
    """The kinds of a tensor, or of one of its blocks. None for what no kind is about (a softmax offset).

    Args:
        shape: the tensor, by its global name.
        block: of a fused tensor; None for a tensor that is one block.
    """
    name, spec = shape.name, shape.spec
    if spec.fan_in is None:
        gain = name.endswith(".weight") and "norm" in name.rpartition(".")[0].rpartition(".")[2]
        return frozenset({"gains"} if gain else {"biases"} if name.endswith("bias") else ())
    if spec.init is Init.EMBEDDING:
        return frozenset({"embedding"})
    if spec.init is Init.RELATIVE_BIAS:
        return frozenset()
    if spec.readout:
        return frozenset({"readout"})
    if name.endswith((".router.weight", ".gate_weight")):
        return frozenset({"router"})
    return frozenset({"hidden", *_attention(name, block), *_feed_forward(name, block)})


def _attention(name: str, block: str | None) -> Iterable[str]:
    if "attention." not in name:
        return ()
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer == "linear_proj":
        return ("attention", "attention_o")
    if layer in ("linear_qkv", "linear_kv"):
        return ("attention", _BLOCKS[block]) if block in _BLOCKS else ("attention",)
    if layer.startswith("linear_q"):
        return ("attention", "attention_q")
    if layer == "linear_kv_up_proj":
        return ("attention", "attention_v" if block == "value" else "attention_k")
    return ("attention",)  # what keys and values are both made of


def _feed_forward(name: str, block: str | None) -> Iterable[str]:
    if ".mlp." not in name:
        return ()
    kind = "experts" if ".local_experts." in name else "shared_experts" if ".shared_experts." in name else "mlp"
    if "linear_fc2." in name:
        return (kind, "ffn_down")
    return (kind, "ffn_gate" if block == "gate" else "ffn_up")


def factors_of(config: Config, shape: TensorShape) -> PerTensorFactors:
    """The product of the entries that name a tensor.

    Raises:
        UserError: parts of a fused tensor would have rates or decays of their own.
    """
    entries = config.hparams.per_tensor
    found: dict[str, dict[str | None, float]] = {what: {} for what in ("lr", "weight_decay", "init")}
    for block in shape.fan_outs:
        matching = [entry for entry in entries if names(entry, shape, block)]
        for what, factors in found.items():
            factors[block] = 1.0
            for entry in matching:
                factors[block] *= getattr(entries[entry], what)
    for what in ("lr", "weight_decay"):
        if len(set(found[what].values())) > 1:
            raise _one_tensor(config, shape, what, found[what])
    return PerTensorFactors(
        lr=next(iter(found["lr"].values())),
        weight_decay=next(iter(found["weight_decay"].values())),
        init=found["init"],
    )


def names(entry: str, shape: TensorShape, block: str | None) -> bool:
    """Whether an entry of `hparams.per_tensor`, a kind or a pattern, is about a tensor, or about one of its blocks."""
    return fnmatch.fnmatchcase(shape.name, entry) if is_pattern(entry) else entry in kinds_of(shape, block)


def _one_tensor(config: Config, shape: TensorShape, what: str, factors: Mapping[str | None, float]) -> UserError:
    """Of parts that do not agree, by the first entry that names some of them alone."""
    entry = next(
        entry
        for entry, said in config.hparams.per_tensor.items()
        if getattr(said, what) != 1.0 and len({names(entry, shape, block) for block in factors}) > 1
    )
    said = ", ".join(f"×{factor:g} for the {block}" for block, factor in factors.items())
    return config.error(
        f"{_KEY}.{entry}.{what}",
        f"{shape.name} holds its parts in one tensor, which an optimizer steps at one rate and one decay ({said}); "
        "expected the same for all of them, or init, which each part may have",
    )


def check_entries(config: Config, shapes: Mapping[str, TensorShape]) -> None:
    """Whether every entry names a tensor of the model, and every factor has something to act on.

    Args:
        config: the run.
        shapes: every tensor of the whole model, by global name.

    Raises:
        UserError: names the key.
    """
    if not config.hparams.per_tensor:
        return
    kinds: dict[tuple[int, str], TensorShape] = {}
    for name, shape in shapes.items():  # a tensor of each sort; a pattern sees every name
        kinds.setdefault((id(shape.spec), without_numbers(name)), shape)
    for entry, factors in config.hparams.per_tensor.items():
        candidates = shapes.values() if is_pattern(entry) else kinds.values()
        named = [shape for shape in candidates if any(names(entry, shape, block) for block in shape.fan_outs)]
        if not named:
            why = "; a tied head is the embedding" if entry == "readout" else ""
            raise config.error(
                f"{_KEY}.{entry}", f"names no tensor of this model{why} (mup-megatron explain lists them)"
            )
        if factors.init != 1.0 and all(shape.spec.init in _CONSTANT for shape in named):
            raise config.error(
                f"{_KEY}.{entry}.init", f"{factors.init:g}: their initial values are constants; expected 1"
            )
        if factors.weight_decay != 1.0 and not any(is_decayed(config, shape) for shape in named):
            raise config.error(
                f"{_KEY}.{entry}.weight_decay",
                f"{factors.weight_decay:g}: they have no weight decay, as in Megatron; expected 1",
            )


def is_decayed(config: Config, shape: TensorShape) -> bool:
    """Whether weight decay falls on a tensor: as Megatron has it, with its `apply_wd_to_qk_layernorm`."""
    return shape.spec.is_decayed or (config.optimizer.apply_wd_to_qk_layernorm and _is_qk_norm(shape.name))


def _is_qk_norm(name: str) -> bool:
    return "q_layernorm." in name or "k_layernorm." in name
