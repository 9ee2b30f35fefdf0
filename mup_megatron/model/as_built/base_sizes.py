"""Base sizes of a model as built that no key of this project's config says: of latent experts, and layer by layer.

Public names: `OTHER_SIZES`, `LAYERS`, `BaseSizes`, `NO_OTHERS`, `read_layers`, `put_sizes`, `query_groups`.

They are fields of megatron-core's TransformerConfig. Layers of different sizes (HeterogeneousTransformerConfig, the
blocks of Nemotron's pruned models) stand in a file of upstream's: `block_configs` says for each layer its attention and
its MLP. A size that is relative there (`n_heads_in_group`, `ffn_mult`) follows the heads and the hidden size, in the
base as in the model. A size that is a number (`num_query_groups`, `ffn_hidden_size`) is fixed. With a file of the
base's own, its numbers are the base's and grow, and what it leaves out is the model's and fixed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mup_megatron.util.errors import UserError

OTHER_SIZES = (
    *("moe_latent_size", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "dsa_indexer_n_heads", "dsa_indexer_head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
)
"""Fields of TransformerConfig that a base may name, and that grow where it does."""

LAYERS = "heterogeneous_layers_config_path"
"""The option that names the file of layers, by its destination; among base sizes the base's own file."""

_BLOCKS = "block_configs"
_WHOLE, _ANY = (int,), (int, float)
_SIZES: dict[str, dict[str, tuple[type, ...]]] = {
    "attention": {"n_heads_in_group": _WHOLE, "num_query_groups": _WHOLE},
    "ffn": {"ffn_mult": _ANY, "ffn_hidden_size": _WHOLE},
}
_Block = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BaseSizes:
    """What a base says beside the sizes of this project's configs.

    Args:
        sizes: of `OTHER_SIZES`, by name.
        layers: `block_configs` of the base's own file of layers; None without one.
        source: that file, for messages.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    layers: Sequence[_Block] | None = None
    source: str = f"--{LAYERS.replace('_', '-')}"

    @property
    def named(self) -> list[str]:
        """What is named, for messages."""
        return [*self.sizes, *([LAYERS] if self.layers is not None else [])]


NO_OTHERS = BaseSizes()
"""What a base says that has the sizes of this project's configs alone."""


def read_layers(source: str, text: str) -> list[_Block]:
    """The blocks of a file of layers, each with `attention` and `ffn`.

    Args:
        source: the file, for messages.
        text: what it holds.

    Raises:
        UserError: it is no such file; names the layer and the key.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid JSON: {error}") from None
    blocks = data.get(_BLOCKS) if isinstance(data, dict) else None
    if not isinstance(blocks, list) or not blocks:
        raise UserError(f"{source}: expected {_BLOCKS}, a list with attention and ffn of every layer")
    return [_read_block(f"{source}: layer {number}", block) for number, block in enumerate(blocks)]


def _read_block(where: str, block: Any) -> _Block:
    found = {}
    for part, sizes in _SIZES.items():
        said = (block.get(part) or (block.get("mlp") if part == "ffn" else None)) if isinstance(block, dict) else None
        if not isinstance(said, dict):
            raise UserError(f"{where}: expected attention and ffn, each with keys and values")
        for name, kinds in sizes.items():
            value = said.get(name)
            if value is not None and not _is_size(value, kinds):
                kind = "a whole number" if kinds is _WHOLE else "a number"
                raise UserError(f"{where}: {part}.{name}: {value!r:.40}; expected {kind} above 0, or null")
        found[part] = said
    return found


def _is_size(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and bool(0 < value < 2**24)


class _Build(NamedTuple):
    """One of the builds of a base.

    Args:
        config: a copy of the script's, with the sizes that this project's configs say.
        times: 1, or by how much the build is larger than the base in each size that grows.
        hidden: whether the hidden size grows.
        own: whether the base has a file of its own.
    """

    config: Any
    times: int
    hidden: bool
    own: bool


def put_sizes(made: Any, core: Any, base: BaseSizes, *, times: int, hidden: bool) -> None:
    """Puts the sizes of a base, or of the enlarged base, into a copy of the script's config.

    Args:
        made: the copy; sizes that this project's configs say are there already.
        core: the script's own.
        base: what the base says.
        times: 1 for the base; by how much larger the build is in each size that the base names.
        hidden: whether the base names the hidden size.

    Raises:
        UserError: the script's config has no such size, or its layers are others than the base's.
    """
    for name, size in base.sizes.items():
        if getattr(core, name, None) is None:
            raise UserError(f"base.{name}: the model has no such size; expected its option, or no such base size")
        setattr(made, name, size * times)
    theirs = getattr(core, "per_block_parameters", None)
    if theirs is None:
        if base.layers is not None:
            raise UserError(f"base.{LAYERS}: all layers of the model are alike; expected --{LAYERS.replace('_', '-')}")
        return
    said = _layers(core, base)
    if len(said) != len(theirs):
        raise UserError(f"{base.source}: has {len(said)} layers, the model has {len(theirs)}; expected as many")
    build = _Build(made, times, hidden, base.layers is not None)
    made.per_block_parameters = [
        _block(f"{base.source}: layer {number}", build, *pair)
        for number, pair in enumerate(zip(theirs, said, strict=True))
    ]


def _layers(core: Any, base: BaseSizes) -> Sequence[_Block]:
    if base.layers is not None:
        return base.layers
    return read_layers(base.source, str(core.heterogeneous_layers_config_encoded_json))


def _block(where: str, build: _Build, theirs: Any, said: _Block) -> Any:
    """One layer of a base: the model's, with other sizes."""
    block = copy.deepcopy(theirs)
    for part, name in ((block.attention, "attention"), (block.mlp, "ffn")):
        for kind in ("no_op", "replace_with_linear"):
            found = bool(said[name].get(kind))
            if build.own and found != getattr(part, kind):
                raise UserError(
                    f"{where}: {name}.{kind}: {str(found).lower()}, but {str(not found).lower()} in the model; "
                    "expected the same layers in the base"
                )
    if block.attention.num_query_groups is not None:
        groups = _query_groups(where, said["attention"], build.config.num_attention_heads, build.own, build.times)
        block.attention.num_query_groups = groups or block.attention.num_query_groups
    if block.mlp.ffn_hidden_size is not None:
        block.mlp.ffn_hidden_size = _ffn(block.mlp, said["ffn"], build) or block.mlp.ffn_hidden_size
    return block


def _query_groups(where: str, said: _Block, heads: int, own: bool, times: int = 1) -> int | None:
    """A layer's key/value heads in a base with that many heads; None where they are the model's."""
    if said.get("num_query_groups") is not None:
        return int(said["num_query_groups"]) * times if own else None
    in_group = said.get("n_heads_in_group")
    if in_group is None:
        return None
    if heads % in_group:
        raise UserError(
            f"{where}: attention.n_heads_in_group: {in_group} does not divide the base's {heads} heads; expected a "
            "multiple of it among the base sizes"
        )
    return int(heads // in_group)


def _ffn(theirs: Any, said: _Block, build: _Build) -> int | None:
    """A layer's FFN size in a base; None where it is the model's.

    Upstream rounds what it derives up to a multiple of 256, so a small hidden size and its double may give one number.
    Where the hidden size grows, the enlarged base has exactly `times` the base's.
    """
    if said.get("ffn_hidden_size") is not None:
        return int(said["ffn_hidden_size"]) * build.times if build.own else None
    if said.get("ffn_mult") is None:
        return None
    times = build.times if build.hidden else 1
    return int(theirs.ffn_mult_to_intermediate_size(said["ffn_mult"], build.config.hidden_size // times)) * times


def query_groups(core: Any, base: BaseSizes, heads: int) -> int | None:
    """Key/value heads of the first layer with attention, in a base with that many heads; None where they are fixed.

    Args:
        core: the script's config.
        base: what the base says.
        heads: query heads of the base.

    Raises:
        UserError: heads cannot be shared out.
    """
    theirs = getattr(core, "per_block_parameters", None)
    for number, (one, said) in enumerate(zip(theirs, _layers(core, base), strict=False) if theirs else ()):
        if one.attention.num_query_groups is not None:
            return _query_groups(f"{base.source}: layer {number}", said["attention"], heads, base.layers is not None)
    return None
