"""A config whose base is a file of base shapes (.bsh): the tensors' shapes, and what no shape tells.

Public names: `shapes_from_file`, `beside_shapes`. A .bsh file of microsoft/mup holds shapes alone. The head size, which
the attention scale needs, and the depth, which the depth rule needs, are in files of this project, or the config names
them beside the file. One that `rebase` wrote also holds what its tensors carry (`parametrization.Carried`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mup_megatron.config import Config
from mup_megatron.rules.base_shapes import join_base_shapes, load_base_shapes
from mup_megatron.rules.shapes import TensorShape, TensorSpec
from mup_megatron.rules.table import Carried, Parametrization
from mup_megatron.util.errors import UserError


def shapes_from_file(
    config: Config, target: Mapping[str, TensorSpec], path: str
) -> tuple[dict[str, TensorShape], int, dict[str, Carried]]:
    """The target's tensors joined with a file of base shapes.

    Args:
        config: the run.
        target: specs of its model, by global name.
        path: `base.file`.

    Returns:
        The tensors, the base's head size, and what tensors carry.

    Raises:
        UserError: the file is of another model, contradicts what the config names, or does not tell the head size.
    """
    file = load_base_shapes(path)
    shapes = join_base_shapes(target, file, path)
    layers = file.extra.get("num_layers")
    if layers is not None and layers != config.num_layers_base:
        named = (
            f"base.num_layers is {config.base.num_layers}" if config.base.num_layers else "base.num_layers is missing"
        )
        raise UserError(f"{path}: was written for a base of {layers} layers, and {named}; expected {layers}")
    carried = {name: Carried(*map(float, factors)) for name, factors in file.extra.get("carried", {}).items()}
    if unknown := set(carried) - set(target):
        raise UserError(f"{path}: {min(unknown)}, which carries values, is not a tensor of this model")
    return shapes, _head_size(config, shapes, file.extra.get("kv_channels"), path), carried


def _head_size(config: Config, shapes: Mapping[str, TensorShape], told: int | None, path: str) -> int:
    """The base's head size: as the config names it beside the file, as the file tells it, or the target's own."""
    keys = ("qk_head_dim", "qk_pos_emb_head_dim") if config.model.multi_latent_attention else ("kv_channels",)
    named = config.model.resized(config.base.width).head_size if any(map(config.base.sizes.get, keys)) else None
    if None not in (named, told) and named != told:
        raise UserError(f"{path}: was written for a head size of {told}, and base.{keys[0]} makes it {named}")
    for name, shape in shapes.items():
        for block, rows in shape.fan_outs.items():
            if not (shape.spec.is_query(block) and rows.grows):
                continue
            head_size = named or told
            if head_size is None:
                raise UserError(
                    f"{path}: does not tell the base's head size, and the query rows of {name} grow "
                    f"({rows.base_dim} to {rows.dim}), by more heads or by larger ones; expected base.{keys[0]} beside "
                    "base.file"
                )
            whole = rows.base_dim if block in (None, "query") else shape.fan_out.base_dim
            if whole is not None and whole % head_size:
                raise UserError(
                    f"{path}: {whole} query rows of {name} are no number of heads of size {head_size}; expected "
                    f"another base.{keys[0]}"
                )
    return named or told or config.model.head_size


def beside_shapes(parametrization: Parametrization) -> dict[str, Any]:
    """What a file of base shapes holds beside the shapes (`save_base_shapes`), of this parametrization's base."""
    carried = {name: list(factors) for name, factors in parametrization.carried.items()}
    return {
        "kv_channels": parametrization.base_head_size,
        "num_layers": parametrization.config.num_layers_base,
        **({"carried": carried} if carried else {}),
    }
