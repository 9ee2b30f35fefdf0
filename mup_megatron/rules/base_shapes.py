"""Files of base shapes (.bsh) in microsoft/mup's format: written, read, and joined with the tensors of a model.

Public names: `BaseShapes`, `save_base_shapes`, `base_shapes_text`, `write_base_shapes`, `load_base_shapes`,
`join_base_shapes`. This module imports neither torch, nor megatron-core, nor DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mup_megatron.rules.shapes import Fused, InfDim, TensorShape, TensorSpec, layer_number
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_yaml, parse_yaml, read_text

_BSH_HEADER = """\
# Base shapes in microsoft/mup's format: a number is the base size of a dimension that grows, null one that is fixed.
"""
_BSH_EXTRA = "# mup-megatron: "


class BaseShapes(NamedTuple):
    """The content of a .bsh file.

    Args:
        dims: base size of every dimension of every tensor, None where it is fixed.
        blocks: base fan-outs of the blocks of fused tensors; empty for files of microsoft/mup, which has none.
        extra: what else this project wrote down (head size, depth, carried values); empty for files of microsoft/mup.
    """

    dims: dict[str, list[int | None]]
    blocks: dict[str, dict[str, int | None]]
    extra: dict[str, Any]


def save_base_shapes(path: str | Path, shapes: Mapping[str, TensorShape], extra: Mapping[str, Any]) -> None:
    """Writes base shapes so that `mup.shape.load_base_shapes` of microsoft/mup reads them."""
    Path(path).write_text(base_shapes_text(shapes, extra), encoding="utf-8")


def base_shapes_text(shapes: Mapping[str, TensorShape], extra: Mapping[str, Any]) -> str:
    """The text of a .bsh file. A comment line holds what the format has no place for: blocks of fused tensors, head
    size, depth."""
    dims = {name: [dim.base_dim for dim in shape.infshape] for name, shape in shapes.items()}
    blocks = {
        name: {block: dim.base_dim for block, dim in shape.blocks.items()}
        for name, shape in shapes.items()
        if shape.blocks
    }
    return _base_shapes_text(BaseShapes(dims, blocks, dict(extra)))


def write_base_shapes(path: str | Path, base: BaseShapes) -> None:
    """Writes what `load_base_shapes` reads."""
    Path(path).write_text(_base_shapes_text(base), encoding="utf-8")


def _base_shapes_text(base: BaseShapes) -> str:
    comment = _BSH_EXTRA + json.dumps({"blocks": base.blocks, **base.extra}, sort_keys=True)
    return f"{_BSH_HEADER}{comment}\n{as_yaml(base.dims, lists_on_a_line=True)}"


def load_base_shapes(path: str | Path) -> BaseShapes:
    """Reads a .bsh file of this project or of microsoft/mup. Nothing in it is executed.

    Raises:
        UserError: the file cannot be read or is not a .bsh file.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read base shapes: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a base shape file (expected YAML: parameter name to list of sizes)") from None
    try:
        data = parse_yaml(text, "YAML")
    except UserError as error:
        raise UserError(f"{path}: not a base shape file ({error})") from None
    if not isinstance(data, dict) or not all(
        isinstance(name, str) and isinstance(dims, list) and all(map(_is_base_size, dims))
        for name, dims in data.items()
    ):
        raise UserError(f"{path}: not a base shape file (expected YAML: parameter name to list of sizes and nulls)")
    extra: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(_BSH_EXTRA):
            try:
                extra = json.loads(line.removeprefix(_BSH_EXTRA))
            except (json.JSONDecodeError, RecursionError):
                extra = {"blocks": None}
    if not _is_extra(extra):
        raise UserError(f"{path}: the line that starts with {_BSH_EXTRA!r} is damaged")
    return BaseShapes(data, extra.pop("blocks", {}), extra)


def _is_extra(extra: Any) -> bool:
    """Whether what a .bsh file says beyond microsoft/mup's format is what this project writes."""
    if not isinstance(extra, dict) or not isinstance(extra.get("blocks", {}), dict):
        return False
    blocks = extra.get("blocks", {}).values()
    if not all(isinstance(block, dict) and all(map(_is_base_size, block.values())) for block in blocks):
        return False
    carried = extra.get("carried", {})
    if not isinstance(carried, dict) or not all(map(_is_carried, carried.values())):
        return False
    return _is_base_size(extra.get("kv_channels")) and _is_base_size(extra.get("num_layers"))


def _is_carried(factors: Any) -> bool:
    """Whether they are three factors above 0: of rate, epsilon and decay."""
    return (
        isinstance(factors, list)
        and len(factors) == 3
        and all(type(factor) in (int, float) and 0 < factor < float("inf") for factor in factors)
    )


def _is_base_size(size: Any) -> bool:
    return size is None or (type(size) is int and size > 0)


def join_base_shapes(target: Mapping[str, TensorSpec], base: BaseShapes, source: str) -> dict[str, TensorShape]:
    """Joins specs with a .bsh file.

    Raises:
        UserError: the file has other tensors or another number of dimensions, or the base sizes of a fused tensor's
            blocks are not in the file and do not follow from it.
    """
    if set(target) != set(base.dims):
        name = min(set(target) ^ set(base.dims))
        raise UserError(f"{source}: {name} is {'missing' if name in target else 'not a tensor of this model'}")
    result = {}
    for name, spec in target.items():
        dims = base.dims[name]
        if len(dims) != len(spec.shape):
            raise UserError(f"{source}: {name} has {len(dims)} dimensions; the model has shape {list(spec.shape)}")
        infshape = tuple(InfDim(small, size) for small, size in zip(dims, spec.shape, strict=True))
        blocks = None
        if spec.fused:
            blocks = _blocks_from_file(name, spec.fused, infshape[0], base.blocks.get(name), source)
        result[name] = TensorShape(name=name, spec=spec, infshape=infshape, blocks=blocks, layer=layer_number(name))
    return result


def _blocks_from_file(
    name: str, fused: Fused, whole: InfDim, known: Mapping[str, int | None] | None, source: str
) -> dict[str, InfDim]:
    if known is not None:
        if set(known) != set(fused.fan_outs):
            raise UserError(f"{source}: {name} has blocks {sorted(known)}; the model has {sorted(fused.fan_outs)}")
        return {block: InfDim(known[block], rows) for block, rows in fused.fan_outs.items()}
    if not whole.grows:
        return {block: InfDim(None, rows) for block, rows in fused.fan_outs.items()}
    if len(set(fused.fan_outs.values())) == 1 and whole.base_dim is not None and not whole.base_dim % len(fused.runs):
        # Blocks that have the same size here (MHA, gate|up) are assumed to have the same size in the base.
        return {block: InfDim(whole.base_dim // len(fused.runs), rows) for block, rows in fused.fan_outs.items()}
    raise UserError(
        f"{source}: {name} holds blocks of different sizes ({fused.fan_outs}) and the file does not tell their base "
        "sizes; name the base sizes under base: instead, or save the file with this project"
    )
