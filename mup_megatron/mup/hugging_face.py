"""Hugging Face's causal language models in µP, with no layer replaced and no multiplier in the forward pass.

Public name: `prepare_hf`. The model stays transformers' own class: `save_pretrained`, `from_pretrained`, Trainer's
checkpoints and servers see weights alone, and nothing can be lost on the way. What µP multiplies in the forward pass
stands in initial values, rates, epsilons and decays instead, which by abc-symmetry is the same training
(docs/parametrization.md, section 7):

- an untied head is output-like: A is in its init and its rate;
- a head that is tied to the embedding leaves A to the final norm, whose gain (and bias) the logits are linear in;
- the softmax scale sqrt(d_base/d) goes into the query projection; under QK-norm, into the query norm; in GPT-2, whose
  queries, keys and values are one matrix, its root into the whole matrix and the root's inverse into the projection
  that the values pass next.

docs/hugging-face.md is the page for users. transformers is not imported; names are its own as of version 5.23.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from mup_megatron.mup.foreign import is_transposed
from mup_megatron.mup.infshape import InfDim, InfShape
from mup_megatron.mup.parameters import global_shape, infshape_of, scale_
from mup_megatron.mup.shape import apply_infshapes, check_not_rescaled, zip_infshapes
from mup_megatron.rules import formulas
from mup_megatron.rules.shapes import FixedFanOut
from mup_megatron.util.errors import UserError

Fold = Literal["head", "final_norm", "query", "root", "inverse_root"]


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """What a parameter is.

    Args:
        fixed_fan_out: the init rule where the fan-in grows and the fan-out does not, as section 2 of
            docs/parametrization.md has it; None for what has no fan-in that grows (embeddings, gains, biases).
        fold: which forward factor its values hold.
        deep: whether transformers divides its deviation by sqrt(2 · layers).
        kind: what `set_per_tensor` calls the matrix, whatever grows; embeddings, gains and biases do not need it.
    """

    fixed_fan_out: FixedFanOut | None = None
    fold: Fold | None = None
    deep: bool = False
    kind: Literal["hidden", "router", "readout"] = "hidden"


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """A class of transformers. Keys of `tensors` are parameters, or layers of which weight and bias are alike."""

    attention: str
    tensors: Mapping[str, _Tensor]


_VECTOR = _Tensor()
_OUTPUT = _Tensor(fixed_fan_out="output_like")
_HIDDEN = _Tensor(fixed_fan_out="hidden_like")  # of MLPs, and what goes into a norm
_HEAD = _Tensor(fixed_fan_out="output_like", fold="head", kind="readout")

_ATTENTION, _MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
_TRUNK = {
    "model.embed_tokens": _VECTOR,
    f"{_ATTENTION}.q_proj": _Tensor(fixed_fan_out="output_like", fold="query"),
    f"{_ATTENTION}.k_proj": _OUTPUT,
    f"{_ATTENTION}.v_proj": _OUTPUT,
    f"{_ATTENTION}.o_proj": _OUTPUT,
    "model.layers.*.input_layernorm": _VECTOR,
    "model.layers.*.post_attention_layernorm": _VECTOR,
    "model.norm": _Tensor(fold="final_norm"),
    "lm_head": _HEAD,
}
_DENSE = {f"{_MLP}.{name}": _HIDDEN for name in ("gate_proj", "up_proj", "down_proj")}
_EXPERTS = {
    f"{_MLP}.gate": _Tensor(fixed_fan_out="output_like", kind="router"),
    f"{_MLP}.experts.gate_up_proj": _HIDDEN,
    f"{_MLP}.experts.down_proj": _HIDDEN,
}
_NORMED = {
    f"{_ATTENTION}.q_proj": _HIDDEN,
    f"{_ATTENTION}.k_proj": _HIDDEN,
    f"{_ATTENTION}.q_norm": _Tensor(fold="query"),
    f"{_ATTENTION}.k_norm": _VECTOR,
}
_BLOCK = "transformer.h.*"
_GPT2 = {
    "transformer.wte": _VECTOR,
    "transformer.wpe": _VECTOR,
    f"{_BLOCK}.ln_1": _VECTOR,
    f"{_BLOCK}.ln_2": _VECTOR,
    f"{_BLOCK}.attn.c_attn": _Tensor(fixed_fan_out="output_like", fold="root"),
    f"{_BLOCK}.attn.c_proj.weight": _Tensor(fixed_fan_out="output_like", fold="inverse_root", deep=True),
    f"{_BLOCK}.attn.c_proj.bias": _VECTOR,
    f"{_BLOCK}.mlp.c_fc": _HIDDEN,
    f"{_BLOCK}.mlp.c_proj": _Tensor(fixed_fan_out="hidden_like", deep=True),
    "transformer.ln_f": _Tensor(fold="final_norm"),
    "lm_head": _HEAD,
}
_ARCHITECTURES = {
    "GPT2LMHeadModel": _Architecture(attention=f"{_BLOCK}.attn", tensors=_GPT2),
    "LlamaForCausalLM": _Architecture(attention=_ATTENTION, tensors=_TRUNK | _DENSE),
    "Qwen2ForCausalLM": _Architecture(attention=_ATTENTION, tensors=_TRUNK | _DENSE),
    "Qwen3ForCausalLM": _Architecture(attention=_ATTENTION, tensors=_TRUNK | _DENSE | _NORMED),
    "MixtralForCausalLM": _Architecture(attention=_ATTENTION, tensors=_TRUNK | _EXPERTS),
}

_SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_embd",
    "n_inner",
    "n_head",
}
"""Keys of a config in which base and model may differ: what grows are sizes of layers and heads."""
_SAYS_NOTHING = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys that say nothing of what is trained: names, token ids, numbers of a checkpoint, what a call returns."""
_DEPTH = ("num_hidden_layers", "n_layer")
_STANDARD_ERRORS = 6
"""By how many standard errors, of 1 / sqrt(2 n) for n values, a deviation may differ from transformers' own. With all
of `_SAMPLE` that is 2 %, so a model that is 4 % wider than its base is not prepared twice."""
_SAMPLE = 1 << 16
_ENOUGH = 256


@torch.no_grad()
def prepare_hf(
    model: Any,
    base_config: Any,
    *,
    rescale_params: bool = True,
    output_mult: float = 1.0,
    attention_mult: float = 1.0,
) -> Any:
    """Puts a model of Hugging Face transformers into µP, in place: initial values, and infinite shapes for optimizers.

    Rates and initial values are those at the sizes of `base_config`; a model of these sizes is left as it is, to the
    last bit. Afterwards `MuAdamW(model.parameters(), ...)` and `split_in_place(model, optimizer)` make the groups.

    Args:
        model: GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM or MixtralForCausalLM as
            transformers built it, before anything wraps it.
        base_config: its config at the base sizes. Hidden size, FFN size, heads, key/value heads and head size may
            differ from the model's; no weights are made of it.
        rescale_params: True for a model with transformers' initial values, which are rescaled. False for weights that
            are µP's already, from `save_pretrained` of a prepared model.
        output_mult: α_output, a factor on the logits, tuned at the base.
        attention_mult: α_attention, a factor on the attention's logits, tuned at the base.

    Returns:
        The model.

    Raises:
        UserError: a value of no argument's range, a class or a module that is not known, a config that differs in more
            than sizes, a head that is tied in one of the two alone, values that transformers did not draw, or none at
            all (the meta device). The model is unchanged then.
    """
    _check_arguments(rescale_params, output_mult=output_mult, attention_mult=attention_mult)
    architecture = _architecture(model)
    _check_config(model, base_config)
    with torch.device("meta"):
        base = type(model)(copy.deepcopy(base_config))
    tied = _tied(model)
    if tied != _tied(base):
        raise UserError(
            "base_config.tie_word_embeddings: the head is the embedding in the one model and not in the other; "
            "expected both alike"
        )
    infshapes = zip_infshapes(base, model)
    modules, bases = dict(model.named_modules()), dict(base.named_modules())
    for name, infshape in infshapes.items():
        tensor = _tensor_of(architecture, name)
        attention = re.match(re.escape(architecture.attention).replace(r"\*", r"\d+"), name)
        if attention:
            infshape = infshapes[name] = _with_heads(
                name, infshape, *(each[attention.group()] for each in (bases, modules))
            )
        if is_transposed(modules[name.rpartition(".")[0]]):
            infshape.read_transposed()
        _say_what_it_is(infshape, tensor)
        softmax = attention_mult * _softmax(attention.group(), modules, bases) if attention else 1.0
        infshape.folded = _folded(tensor, infshape, softmax, output_mult, tied)
    if rescale_params:
        check_not_rescaled(model)
        _check_values(model, architecture)
    apply_infshapes(model, infshapes)
    if rescale_params:
        _rescale(model)
    return model


def _rescale(model: Any) -> None:
    """Makes µP's initial values of transformers'."""
    for parameter in model.parameters():
        infshape = infshape_of(parameter)
        ratios = infshape.ratios
        factor = formulas.init_std(m_in=ratios.m_in, forward=ratios.forward, output_like=infshape.output_like)
        if factor != 1:
            scale_(parameter, factor)
    model._has_rescaled_params = True


def _architecture(model: Any) -> _Architecture:
    kind = type(model)
    known = _ARCHITECTURES.get(kind.__name__) if kind.__module__.startswith("transformers.") else None
    if known is None:
        raise UserError(
            f"prepare_hf does not know {kind.__module__}.{kind.__name__}; expected one of "
            f"{', '.join(_ARCHITECTURES)} of transformers, before anything wraps it"
        )
    for name, module in model.named_modules():
        package = f"{type(module).__module__}."
        if not package.startswith(("torch.nn.", "transformers.")) or "quant" in package:
            raise UserError(
                f"{name} is a {type(module).__module__}.{type(module).__name__}, which prepare_hf does not know; "
                "expected the layers that transformers built"
            )
    for name, _ in model.named_parameters():
        _tensor_of(known, name)
    return known


def _tensor_of(architecture: _Architecture, name: str) -> _Tensor:
    pattern = re.sub(r"\.\d+\.", ".*.", name)
    found = architecture.tensors.get(pattern) or architecture.tensors.get(pattern.rpartition(".")[0])
    if found is None:
        raise UserError(
            f"{name}: prepare_hf does not know this parameter, so no rule can be applied to it; expected the layers "
            "that transformers built"
        )
    return found


def _check_arguments(rescale_params: Any, **factors: Any) -> None:
    if rescale_params is not True and rescale_params is not False:
        raise UserError(f"rescale_params: {rescale_params!r}; expected True or False")
    for name, factor in factors.items():
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not number or not 0 < factor < math.inf:
            raise UserError(f"{name}: {factor!r}; expected a number above 0")


def _check_config(model: Any, base_config: Any) -> None:
    config = model.config
    if type(base_config) is not type(config):
        raise UserError(
            f"base_config is a {type(base_config).__name__}; expected a {type(config).__name__}, as the model has it"
        )
    ours, bases = config.to_dict(), base_config.to_dict()
    for key in sorted((ours.keys() | bases.keys()) - _SIZES - _SAYS_NOTHING, key=lambda key: (key not in _DEPTH, key)):
        here, there = ours.get(key), bases.get(key)
        if here != there:
            hint = "; there is no rule for depth here" if key in _DEPTH else ""
            raise UserError(
                f"base_config.{key} is {there!r} and the model's {here!r}; base and model may differ in hidden size, "
                f"FFN size, heads, key/value heads and head size alone{hint}"
            )


def _tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


_HEADS = {
    "q_proj": ("num_attention_heads", 0),
    "k_proj": ("num_key_value_heads", 0),
    "v_proj": ("num_key_value_heads", 0),
    "o_proj": ("num_attention_heads", 1),
}
"""By layer, which heads a dimension holds, and the dimension: its size is heads times head size."""


def _with_heads(name: str, infshape: InfShape, base: Any, attention: Any) -> InfShape:
    """A dimension of heads grows where their number or their size does, whatever the product.

    Half as many heads of twice the size are as many rows as before, and grow with ratio 1.
    """
    key, at = _HEADS.get(name.split(".")[-2], ("", 0))
    if not key or at >= len(infshape) or infshape[at].grows:
        return infshape
    if (getattr(base.config, key), base.head_dim) == (getattr(attention.config, key), attention.head_dim):
        return infshape
    size = infshape[at].dim
    return InfShape((InfDim(size, size) if each == at else dim for each, dim in enumerate(infshape)), infshape.name)


def _say_what_it_is(infshape: InfShape, tensor: _Tensor) -> None:
    """Marks a matrix with its kind, and one from a dimension that grows to one that does not with its init rule.

    The last two dimensions are the matrix.
    """
    if len(infshape) < 2 or tensor.fixed_fan_out is None:
        return
    infshape.kind = tensor.kind
    fan_out, fan_in = infshape[-2:] if infshape.fan_in_idx == 1 else reversed(infshape[-2:])
    if fan_in.grows and not fan_out.grows:
        infshape.output_like = tensor.fixed_fan_out == "output_like"
        infshape.hidden_like = not infshape.output_like


def _softmax(name: str, modules: Mapping[str, Any], bases: Mapping[str, Any]) -> float:
    """µP's softmax scale, scale_base · d_base/d, over the one that this attention has."""
    attention, base = modules[name], bases[name]
    for key in ("scaling", "head_dim"):
        if not hasattr(attention, key):
            raise UserError(f"{name} has no attribute {key}, which transformers 5 has; this version is not known")
    return float(base.scaling * (base.head_dim / attention.head_dim) / attention.scaling)


def _folded(tensor: _Tensor, infshape: InfShape, softmax: float, output_mult: float, tied: bool) -> Fraction:
    """The factor of one tensor. An untied head's A is not in it: the head is output-like."""
    if tensor.fold == "head":
        return formulas.ONE if tied else Fraction(output_mult)
    if tensor.fold == "final_norm":
        return Fraction(output_mult) * formulas.readout_multiplier(infshape[0].ratio) if tied else formulas.ONE
    if tensor.fold == "query":
        return Fraction(softmax)
    if tensor.fold == "root":
        return Fraction(math.sqrt(softmax))
    if tensor.fold == "inverse_root":
        return 1 / Fraction(math.sqrt(softmax))
    return formulas.ONE


def _check_values(model: Any, architecture: _Architecture) -> None:
    """Whether matrices have the deviation that transformers draws with: pretrained weights must not be rescaled."""
    config = model.config
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(
                f"{name} is on the meta device and has no values to rescale; build the model on a device, or pass "
                "rescale_params=False and draw the values with mup_megatron.mup.init"
            )
        # A shard, or what ZeRO 3 has partitioned, has no values of its own to look at.
        whole = type(parameter) is torch.nn.Parameter and tuple(parameter.shape) == global_shape(parameter)
        if whole and parameter.dim() == 1 and name.endswith(".weight") and bool((parameter != 1).any()):
            raise UserError(
                f"{name}: a norm's gains are 1 where transformers draws a model; pass rescale_params=False for weights "
                "of a prepared model"
            )
        if parameter.dim() < 2 or not whole or parameter.numel() < _ENOUGH:
            continue
        expected = config.initializer_range or 0.02
        if _tensor_of(architecture, name).deep:
            expected /= math.sqrt(2 * config.num_hidden_layers)
        sample = parameter.flatten()[:_SAMPLE].float()
        count = int(sample.count_nonzero()) or 1  # the row of a padding token is 0
        std, close = math.sqrt(float(sample.square().sum()) / count), 1 + _STANDARD_ERRORS / math.sqrt(2 * count)
        if not expected / close < std < expected * close:
            raise UserError(
                f"{name} has the standard deviation {std:.2g}, and transformers draws it with {expected:.2g}; pass "
                "rescale_params=False for weights of a prepared model; weights that were trained without µP cannot "
                "be put into it"
            )
