"""What each tensor of a model is, by module class and parameter name: from upstream's modules to TensorSpecs.

Public names: `Entry` (one line of the table), `KINDS` (what a tensor can be), `VECTORS`, `UPSTREAM` (the entries for
megatron-core's modules), `Classified`, `classify`.

An entry belongs to the nearest module above a parameter that has one; a subclass has its base classes' entries. Entries
of megatron-core's modules hold for layers that are known to keep weights as [fan-out, fan-in] (`_LINEAR`), and for no
others. A parameter without an entry is refused, so that no tensor is left to a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.identity_op import IdentityOp

from mup_megatron.model.as_built.ready_made import READY_FOR
from mup_megatron.model.global_names import global_names
from mup_megatron.model.layers.linear import FC1, QKV, KeyValueUp, QueryUp
from mup_megatron.rules.shapes import FixedFanOut, Fused, Init, TensorSpec
from mup_megatron.util.errors import UserError

_PACKAGES = ("megatron", "transformer_engine", "torch", "apex", "mup_megatron")
# Classes of layers whose weight is [fan-out, fan-in], by the entry "matrix" and its kin.
_LINEAR = ("ColumnParallelLinear", "RowParallelLinear", "Linear", "TELinear", "LayerNormLinear", "TEGroupedLinear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What one tensor, or many by a pattern, is.

    Args:
        module: name of a class; its subclasses' parameters are meant too. None where `name` is given.
        parameter: name of the parameter below that module; `*` stands for anything.
        name: pattern of global names, instead of module and parameter.
        kind: one of `KINDS`.
        source: who says so, for messages.
        fan_in: dimension of the fan-in, where it is not the kind's.
        fan_out: dimension of the fan-out, where it is not the kind's.
        init: base distribution, where it is not the kind's.
        blocks: names of equal blocks of dimension 0.
        fixed_fan_out: as TensorSpec has it.
        split: dimension that tensor parallelism splits, where the parameter does not say so itself.
    """

    module: str | None = None
    parameter: str | None = None
    name: str | None = None
    kind: str
    source: str = "megatron-core"
    fan_in: int | None = None
    fan_out: int | None = None
    init: Init | None = None
    blocks: tuple[str, ...] = ()
    fixed_fan_out: FixedFanOut | None = None
    split: int | None = None

    @property
    def meant(self) -> str:
        """Which tensors it is about, for people."""
        return self.name or f"{self.module}.{self.parameter}"


class Classified(NamedTuple):
    """A tensor of an unsharded model, and the entry that says what it is."""

    spec: TensorSpec
    entry: Entry


class _Tensor(NamedTuple):
    """What a kind sees of a parameter."""

    config: Any
    owner: torch.nn.Module
    module: torch.nn.Module
    shape: tuple[int, ...]


def _matrix(tensor: _Tensor) -> dict[str, Any]:
    return {"fan_in": 1, "fan_out": 0, "init": Init.WEIGHT}


def _output_projection(tensor: _Tensor) -> dict[str, Any]:
    return {**_matrix(tensor), "init": Init.OUTPUT_PROJECTION}


def _rows_of(kind: Any) -> Callable[[_Tensor], dict[str, Any]]:
    """A matrix whose rows are what a mixin of model/layers/linear.py says."""

    def fields(tensor: _Tensor) -> dict[str, Any]:
        made = kind()
        rules = made.rules(tensor.config) if hasattr(made, "rules") else {}
        return {**_matrix(tensor), "fused": made.fused(tensor.config, tensor.shape[0]), **rules}

    return fields


def _gate_up(tensor: _Tensor) -> dict[str, Any]:
    """Each rank's rows are its gate, then its up; Transformer Engine's layers of experts do not say so."""
    halves = 2 if tensor.config.gated_linear_unit else 1
    return {**_rows_of(FC1)(tensor), "partition_stride": halves}


def _grouped_gate_up(tensor: _Tensor) -> dict[str, Any]:
    return {**_gate_up(tensor), "partition_dim": 0}


def _grouped_output_projection(tensor: _Tensor) -> dict[str, Any]:
    return {**_output_projection(tensor), "partition_dim": 1}


def _qkv(tensor: _Tensor) -> dict[str, Any]:
    """The fused QKV; whether queries and keys are normed is what the attention has, whatever the config says."""
    fields, attention = _rows_of(QKV)(tensor), tensor.owner
    if hasattr(attention, "q_layernorm"):
        places = {"query": "q_layernorm", "key": "k_layernorm"}
        norms = {block: getattr(attention, place, None) for block, place in places.items()}
        normed = [block for block, norm in norms.items() if norm is not None and not isinstance(norm, IdentityOp)]
        fields["block_fixed_fan_out"] = tuple((block, "hidden_like") for block in normed)
    return fields


def _query_down(tensor: _Tensor) -> dict[str, Any]:
    return {**_matrix(tensor), "fixed_fan_out": "hidden_like" if tensor.config.qk_layernorm else None}


def _key_value_down(tensor: _Tensor) -> dict[str, Any]:
    config = tensor.config
    return {
        **_matrix(tensor),
        "fused": Fused(runs=(("rank", config.kv_lora_rank), ("rope", config.qk_pos_emb_head_dim))),
        "block_fixed_fan_out": (("rank", "hidden_like"),) if config.qk_layernorm else (),
    }


def _embedding(tensor: _Tensor) -> dict[str, Any]:
    return {"fan_in": 0, "fan_out": 1, "init": Init.EMBEDDING}


def _standard(tensor: _Tensor) -> dict[str, Any]:
    """No rule: rates, epsilon and decay of the base at every width, and the values that the layer itself drew."""
    return {"fan_in": None, "fan_out": 0, "init": Init.OWN, "standard": True}


def _router(tensor: _Tensor) -> dict[str, Any]:
    return {**_matrix(tensor), "fixed_fan_out": "output_like"}


def _readout(tensor: _Tensor) -> dict[str, Any]:
    return {**_router(tensor), "readout": True}


def _vector(init: Init) -> Callable[[_Tensor], dict[str, Any]]:
    return lambda tensor: {"fan_in": None, "fan_out": 0, "init": init}


def _gain(tensor: _Tensor) -> dict[str, Any]:
    marks = ("zero_centered_gamma", "zero_centered")
    added_to_one = any(getattr(tensor.module, mark, False) for mark in marks)
    return _vector(Init.ZEROS if added_to_one else Init.ONES)(tensor)


def _sink(tensor: _Tensor) -> dict[str, Any]:
    return {**_vector(Init.WEIGHT)(tensor), "partition_dim": 0}  # by heads, which upstream does not say


VECTORS = ("gain", "bias", "vector", "sink", "standard")
"""The kinds without a fan-in."""

KINDS: Mapping[str, Callable[[_Tensor], dict[str, Any]]] = {
    "matrix": _matrix,
    "output_projection": _output_projection,
    "qkv": _qkv,
    "gate_up": _gate_up,
    "grouped_gate_up": _grouped_gate_up,
    "grouped_output_projection": _grouped_output_projection,
    "query_up": _rows_of(QueryUp),
    "key_value_up": _rows_of(KeyValueUp),
    "query_down": _query_down,
    "key_value_down": _key_value_down,
    "embedding": _embedding,
    "readout": _readout,
    "router": _router,
    "gain": _gain,
    "bias": _vector(Init.ZEROS),
    "vector": _vector(Init.WEIGHT),
    "sink": _sink,
    "standard": _standard,
}
"""What a tensor can be: a function to the fields of its TensorSpec."""


def _entries(*lines: tuple[str, str, str]) -> tuple[Entry, ...]:
    return tuple(
        Entry(module=module, parameter=parameter, kind=kind)
        for modules, parameters, kind in lines
        for module in modules.split()
        for parameter in parameters.split()
    )


# The second computes the same with the up-projections of keys and values in other places (for sparse attention).
_LATENT = "MLASelfAttention AbsorbedMLASelfAttention"

UPSTREAM: Sequence[Entry] = _entries(
    ("LanguageModelEmbedding", "word_embeddings.weight position_embeddings.weight", "embedding"),
    ("GPTModel HybridModel", "output_layer.weight", "readout"),
    ("SelfAttention", "linear_qkv.weight", "qkv"),
    (f"SelfAttention {_LATENT}", "linear_proj.weight", "output_projection"),
    (_LATENT, "linear_q_proj.weight linear_q_up_proj.weight", "query_up"),
    (_LATENT, "linear_kv_up_proj.weight", "key_value_up"),
    (_LATENT, "linear_q_down_proj.weight", "query_down"),
    (_LATENT, "linear_kv_down_proj.weight", "key_value_down"),
    ("DotProductAttention", "softmax_offset", "sink"),
    ("MLP", "linear_fc1.weight", "gate_up"),
    ("MLP", "linear_fc2.weight", "output_projection"),
    ("TEGroupedMLP", "linear_fc1.weight", "grouped_gate_up"),  # of each expert, as all that have a number
    ("TEGroupedMLP", "linear_fc2.weight", "grouped_output_projection"),
    ("TEGroupedLinear", "bias", "bias"),
    ("TopKRouter", "weight", "router"),
    ("TopKRouter", "bias", "vector"),  # megatron-core draws it as it draws the weight
    ("SharedExpertMLP", "gate_weight", "router"),
    ("MultiTokenPredictionLayer", "eh_proj.weight", "matrix"),
    ("ColumnParallelLinearGathered TELayerNormColumnParallelLinearGathered", "weight", "matrix"),  # in place of a part
    ("MoELayer", "fc1_latent_proj.weight", "matrix"),  # around the experts: to their latent, and from it
    ("MoELayer", "fc2_latent_proj.weight", "output_projection"),
    ("ColumnParallelLinear RowParallelLinear Linear TELinear LayerNormLinear", "bias", "bias"),
    ("LayerNormLinear", "layer_norm_weight", "gain"),
    ("LayerNormLinear", "layer_norm_bias", "bias"),
    ("LayerNorm RMSNorm FusedLayerNorm", "weight", "gain"),
    ("LayerNorm FusedLayerNorm", "bias", "bias"),
)
"""The entries for modules of megatron-core, torch's norms, Apex and Transformer Engine."""


def stride_of(parameter: torch.nn.Parameter) -> int:
    """`partition_stride`, which some of upstream's layers leave out where it is 1."""
    return int(getattr(parameter, "partition_stride", 1))


def classify(model: LanguageModule, entries: Sequence[Entry] = ()) -> dict[str, Classified]:
    """What every tensor of a model is, by global name in the model's order.

    Args:
        model: the whole model, unsharded.
        entries: a user's own, which come before `UPSTREAM`; the first that matches holds.

    Raises:
        UserError: a tensor that no entry is about, or one that is not what its entry says; names it.
    """
    to_global, modules = global_names(model), dict(model.named_modules())
    found: dict[str, Classified] = {}
    for local_name, parameter in model.named_parameters():
        name = to_global(local_name)
        above = list(_above(local_name, modules))
        matched = _own_entry(name, above, entries) or _upstreams_entry(above)
        if matched is None:
            raise _unknown(name, above)
        entry, owner = matched
        weight = found.get(f"{name.rpartition('.')[0]}.weight")
        blocks = weight.spec.fused if weight and entry.kind == "bias" else None
        # Layers of different sizes have a config each; a user's own module may have none.
        config = next((at.config for at, _ in above if hasattr(at, "config")), model.config)
        tensor = _Tensor(config, owner, above[0][0], tuple(parameter.shape))
        found[name] = Classified(_spec(name, parameter, tensor, entry, blocks), entry)
    return found


def _above(local_name: str, modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """The modules above a parameter, from its own to the model, and what each calls it."""
    words = local_name.split(".")
    for length in range(len(words) - 1, -1, -1):
        yield modules[".".join(words[:length])], ".".join(words[length:])


_Above = Sequence[tuple[torch.nn.Module, str]]


def _own_entry(name: str, above: _Above, entries: Sequence[Entry]) -> tuple[Entry, torch.nn.Module] | None:
    """A user's entry for a parameter, and the module that it is below."""
    for entry in entries:
        if entry.name is not None:
            if fnmatchcase(name, entry.name):
                return entry, above[1 if len(above) > 1 else 0][0]
            continue
        for module, path in above:
            named = entry.module in [kind.__name__ for kind in type(module).mro()]
            if named and fnmatchcase(path, entry.parameter or ""):
                return entry, module
    return None


_KNOWN = {(entry.module, entry.parameter): entry for entry in UPSTREAM}
_OF_AN_EXPERT = re.compile(r"\b(weight|bias)\d+$")
_OF_LINEAR = {
    "matrix",
    "output_projection",
    "qkv",
    "gate_up",
    "grouped_gate_up",
    "grouped_output_projection",
    "query_up",
    "key_value_up",
    "query_down",
    "key_value_down",
    "readout",
}


def _upstreams_entry(above: _Above) -> tuple[Entry, torch.nn.Module] | None:
    """The entry of megatron-core's for a parameter, and the module that it is below."""
    for module, path in above:
        for kind in _known_classes(module):
            entry = _KNOWN.get((kind, _OF_AN_EXPERT.sub(r"\1", path)))
            if entry is None:
                continue
            if entry.kind in _OF_LINEAR and not set(_known_classes(above[0][0])) & set(_LINEAR):
                return None
            return entry, module
    return None


def _known_classes(module: torch.nn.Module) -> list[str]:
    """Names of a module's class and its bases, those alone whose meaning is known here: not a user's own classes."""
    return [kind.__name__ for kind in type(module).mro() if kind.__module__.split(".")[0] in _PACKAGES]


def _unknown(name: str, above: _Above) -> UserError:
    """What a user can do about a tensor without an entry."""
    own = [pair for pair in above if type(pair[0]).__module__.split(".")[0] not in _PACKAGES]
    module, path = (own or above[1:] or above)[0]
    kind = type(module).__name__
    ready = next((kind for kind in [type(one).__name__ for one, _ in above] if kind in READY_FOR), None)
    if ready is not None:
        return UserError(
            f"{name}: no rule of µP is tested for the tensors of {ready}; expected --mup-tensors {READY_FOR[ready]}, "
            "which keeps them in the standard parametrization, or entries of your own"
        )
    return UserError(
        f"{name}: no entry says what this tensor of {kind} is, so no rule can be applied to it; expected one in "
        f"--mup-tensors FILE, such as {{module: {kind}, parameter: {path}, kind: matrix}}"
    )


def _spec(name: str, parameter: torch.nn.Parameter, tensor: _Tensor, entry: Entry, blocks: Fused | None) -> TensorSpec:
    """The TensorSpec of an unsharded parameter."""
    shape = tensor.shape
    said: dict[str, Any] = {"partition_dim": None, "partition_stride": 1}
    if getattr(parameter, "tensor_model_parallel", False):
        said = {"partition_dim": parameter.partition_dim, "partition_stride": stride_of(parameter)}  # type: ignore[attr-defined]
    has_fan_in = entry.kind not in VECTORS
    needed = 1 + max(
        int(has_fan_in), *(dim for dim in (entry.fan_in, entry.fan_out, entry.split) if dim is not None), 0
    )
    if len(shape) < needed:
        raise UserError(
            f"{name}: has shape {list(shape)}; expected {needed} dimension{'s' * (needed > 1)} at least for kind "
            f"{entry.kind}, as {entry.source} says"
        )
    said |= KINDS[entry.kind](tensor)
    if blocks is not None:
        said["fused"] = blocks
    own = {"fan_in": entry.fan_in, "fan_out": entry.fan_out, "init": entry.init, "fixed_fan_out": entry.fixed_fan_out}
    said |= {key: value for key, value in own.items() if value is not None}
    if entry.split is not None:
        said["partition_dim"] = entry.split
    if said["partition_dim"] is None:
        said["partition_stride"] = 1
    if entry.blocks:
        if shape[0] % len(entry.blocks):
            raise UserError(
                f"{name}: has {shape[0]} rows, which are no {len(entry.blocks)} equal blocks as {entry.source} says"
            )
        said["fused"] = Fused(runs=tuple((block, shape[0] // len(entry.blocks)) for block in entry.blocks))
    if said["init"] is Init.OUTPUT_PROJECTION and getattr(tensor.config, "is_hybrid_model", False):
        said["init"] = Init.HYBRID_OUTPUT_PROJECTION  # as TransformerConfig has it: a layer there has one branch
    if said["init"] is Init.OWN and name.endswith(".weight") and set(_known_classes(tensor.module)) & set(_LINEAR):
        raise UserError(
            f"{name}: megatron-core draws it by the config's init_method, whose place the rules take; expected init: "
            f"weight or init: output_projection beside kind: {entry.kind} in {entry.source}"
        )
    try:
        return TensorSpec(shape=shape, expert=".experts." in name, frozen=not parameter.requires_grad, **said)
    except ValueError as error:
        raise UserError(f"{name}: is not of kind {entry.kind} as {entry.source} says: {error}") from None
