"""Base shapes by microsoft/mup's names: from models or files to `p.infshape` on every parameter.

Public names: `set_base_shapes`, `make_base_shapes`, `save_base_shapes`, `load_base_shapes`, `get_shapes`,
`get_infshapes`, `zip_infshapes`, `clear_dims`, `apply_infshapes`, `assert_hidden_size_inf`, `check_not_rescaled`.

Shapes are global (unsharded) also where a parameter is a DTensor, is partitioned by ZeRO 3, or belongs to a sharded
megatron-core layer (then its TensorSpec says the global shape). Base and delta models may be built on the meta device,
where they need no memory. A .bsh file is read as plain data; nothing in it is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from mup_megatron.model.layers.tensor_spec import spec_of
from mup_megatron.mup import drawn
from mup_megatron.mup.foreign import gates, is_computed, is_transposed, read_layers
from mup_megatron.mup.infshape import InfDim, InfShape, zip_infshape
from mup_megatron.mup.layer import MuReadout, MuSharedReadout, rescale_gate, rescale_linear_bias
from mup_megatron.mup.parameters import attach, clean_names, global_shape, infshape_of, own_values
from mup_megatron.rules import base_shapes as files
from mup_megatron.rules import shapes
from mup_megatron.rules.shapes import TensorShape, TensorSpec
from mup_megatron.util.errors import UserError

Shapes = Mapping[str, Any]
"""Sizes, or InfShapes, by parameter name."""
Source = torch.nn.Module | Shapes | str | Path
"""Where shapes come from: a model, a dictionary, a .bsh file."""


def get_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Global shape of every parameter, by name; prefixes that wrappers such as DDP add to names are removed."""
    clean = clean_names(name for name, _ in model.named_parameters())
    return {clean[name]: global_shape(parameter) for name, parameter in model.named_parameters()}


def get_infshapes(model: torch.nn.Module) -> dict[str, InfShape]:
    """Infinite shape of every parameter.

    Raises:
        UserError: a parameter has none.
    """
    clean = clean_names(name for name, _ in model.named_parameters())
    return {clean[name]: infshape_of(parameter) for name, parameter in model.named_parameters()}


def save_base_shapes(model_or_shapes: torch.nn.Module | Mapping[str, InfShape], file: str | Path) -> None:
    """Writes a .bsh file, which microsoft/mup reads too.

    Args:
        model_or_shapes: a model that has infinite shapes, or these by name.
        file: to be written.
    """
    given = model_or_shapes
    infshapes = get_infshapes(given) if isinstance(given, torch.nn.Module) else given
    blocks = {
        name: {block: dim.base_dim for block, dim in infshape.tensor.blocks.items()}
        for name, infshape in infshapes.items()
        if infshape.tensor is not None and infshape.tensor.blocks
    }
    dims = {name: infshape.base_shape() for name, infshape in infshapes.items()}
    files.write_base_shapes(file, files.BaseShapes(dims, blocks, {}))


def load_base_shapes(filename: str | Path) -> dict[str, InfShape]:
    """Base shapes of a .bsh file, microsoft/mup's or ours; sizes are None.

    Raises:
        UserError: the file cannot be read, or is no such file.
    """
    dims = files.load_base_shapes(filename).dims
    return {name: InfShape.from_base_shape(base) for name, base in dims.items()}


def zip_infshapes(base: Source, target: Source) -> dict[str, InfShape]:
    """Joins base shapes with shapes, by name.

    Raises:
        UserError: other tensors, or other dimensions; names them.
    """
    base_shapes, target_shapes = _shapes(base), _shapes(target)
    _check_names(set(base_shapes), set(target_shapes))
    return {name: zip_infshape(base_shapes[name], target_shapes[name], name=name) for name in target_shapes}


def clear_dims(infshapes: Mapping[str, InfShape]) -> dict[str, InfShape]:
    """The same base shapes without the model's own sizes, which become None."""
    return {name: InfShape.from_base_shape(infshape.base_shape()) for name, infshape in infshapes.items()}


def make_base_shapes(base_shapes: Source, delta_shapes: Source, savefile: str | Path | None = None) -> dict:
    """Base shapes from two models of a family: a dimension grows if its size differs between the two.

    Args:
        base_shapes: the base model, for which hyperparameters are defined.
        delta_shapes: the same model, larger in every dimension that grows.
        savefile: a .bsh file to be written.

    Returns:
        InfShapes by name, sizes None.

    Raises:
        UserError: the two have different tensors; names them.
    """
    result = clear_dims(zip_infshapes(base_shapes, delta_shapes))
    if savefile is not None:
        save_base_shapes(result, savefile)
    return result


def apply_infshapes(model: torch.nn.Module, infshapes: Mapping[str, InfShape]) -> None:
    """Attaches infinite shapes by name. They remain when parameters are sharded or replaced later (parameters.py)."""
    clean = clean_names(name for name, _ in model.named_parameters())
    by_identity = {id(parameter): infshapes[clean[name]] for name, parameter in model.named_parameters()}
    read_layers(model, lambda weight: by_identity[id(weight)])
    attach(model, {name: infshapes[clean[name]] for name in clean})
    for module in model.modules():
        if isinstance(module, MuReadout):
            module.record_width_mult()


def set_base_shapes(
    model: torch.nn.Module,
    base: Source | None,
    rescale_params: bool | Literal["constant"] = True,
    delta: Source | None = None,
    savefile: str | Path | None = None,
    do_assert: bool = True,
) -> torch.nn.Module:
    """Gives every parameter its infinite shape, `p.infshape`, and rescales values of torch's default init to µP.

    Args:
        model: to be trained.
        base: a model, shapes by name, or a .bsh file; None means the model itself, so that nothing grows.
        rescale_params: True if torch's own init drew the values: readouts, and biases of linear and convolution layers,
            are rescaled to µP. `constant` if the values were drawn with a standard deviation that does not depend on
            width, as in Hugging Face's models: hidden matrices are rescaled to µP. False if weights come from a
            checkpoint or are drawn again (init.py).
        delta: as `base`, but larger in every dimension that grows. Without it a dimension grows if its size differs
            between model and base.
        savefile: a .bsh file to be written.
        do_assert: refuse a linear layer or a convolution whose input grows and whose output does not, unless it is a
            MuReadout, such a matrix of a recurrent layer or of attention, a transposed convolution whose input and
            output do not grow alike, and a layer that grows and whose weight is computed (weight_norm).

    Returns:
        The model.

    Raises:
        UserError: base and model have different tensors or dimensions (named), a readout is no MuReadout, a gate of
            deepspeed.moe is a MuReadout, or the model was rescaled before. The model is unchanged then.

    Warns if `rescale_params` is True and the values of matrices inside, or of a readout, do not look as if they were
    drawn by width, as torch's default init does.
    """
    if rescale_params not in (True, False, "constant"):
        raise UserError(f"rescale_params: {rescale_params!r}; expected True, False or 'constant'")
    infshapes = _infshapes(model, model if base is None else base, delta)
    if rescale_params == "constant" and any(infshape.tensor is not None for infshape in infshapes.values()):
        raise UserError(
            "rescale_params: 'constant' is for layers that draw their own values; megatron-core's shims do not"
        )
    clean = clean_names(name for name, _ in model.named_parameters())
    by_identity = {id(parameter): infshapes[clean[name]] for name, parameter in model.named_parameters()}
    read_layers(model, lambda weight: by_identity[id(weight)])
    if do_assert:
        _check_readouts(model, lambda weight: by_identity[id(weight)])
    if rescale_params:
        check_not_rescaled(model)
    if rescale_params is True:
        _check_tied(model)
        _check_drawn(model, lambda tensor: by_identity[id(tensor)])
    if savefile is not None:
        save_base_shapes(infshapes, savefile)
    apply_infshapes(model, infshapes)
    if rescale_params == "constant":
        drawn.rescale(model, base)
    elif rescale_params:
        drawn.warn(model, base)
        seen: set[int] = set()  # parameters that several layers share
        for module in model.modules():
            if isinstance(module, MuReadout) and id(module.weight) not in seen:
                seen |= {id(module.weight), id(module.bias)}
                module._rescale_parameters()
            elif isinstance(module, (torch.nn.Linear, _ConvNd)) and id(module.bias) not in seen:
                seen.add(id(module.bias))
                if not is_computed(module):
                    rescale_linear_bias(module)
        for _, gate in gates(model):
            rescale_gate(gate)
    return model


def assert_hidden_size_inf(model: torch.nn.Module) -> None:
    """Refuses what `do_assert` of `set_base_shapes` refuses.

    Raises:
        UserError: names the layer.
    """
    _check_readouts(model, infshape_of)


def _check_readouts(model: torch.nn.Module, infshape: Any) -> None:
    without_multiplier = {id(gate) for _, gate in gates(model)}
    for name, module in model.named_modules():
        if is_computed(module):
            if any(infshape(parameter).ninf() for parameter in module.parameters()):
                raise UserError(
                    f"{name}: its weight is computed, as by weight_norm, spectral_norm or pruning, and there is no "
                    "rule for what it is computed of; expected a weight that is a parameter"
                )
        elif isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.MultiheadAttention)):
            _check_matrices_of(name, {key: infshape(weight) for key, weight in module.named_parameters(recurse=False)})
        elif isinstance(module, _ConvTransposeNd):
            _check_transposed(name, module, infshape(module.weight))
        elif isinstance(module, torch.nn.Bilinear) and infshape(module.weight).ninf():
            raise UserError(f"{name}: there is no rule for a Bilinear that grows, whose fan-in is a product of sizes")
        elif isinstance(module, (torch.nn.Linear, _ConvNd)) or is_transposed(module):
            fan_in, fan_out = infshape(module.weight).fanin_fanout()
            known = isinstance(module, MuReadout) or id(module) in without_multiplier
            if fan_in.grows and not fan_out.grows and not known:
                readout = "a MuReadout" if not isinstance(module, _ConvNd) else "a MuReadout over the channels"
                raise UserError(
                    f"{name}: its input grows with the family and its output does not, but it is no MuReadout; make "
                    f"it {readout}, or let the base and delta models differ in its output too"
                )


def _check_matrices_of(name: str, infshapes: Mapping[str, InfShape]) -> None:
    """Refuses a matrix of a layer of many from a size that grows to one that does not: a readout with no multiplier."""
    for key, infshape in infshapes.items():
        if len(infshape) == 2 and infshape[1].grows and not infshape[0].grows:
            raise UserError(
                f"{name}.{key}: its input grows with the family and its output does not; expected an output that grows "
                "too (an LSTM's proj_size, the size of a recurrent layer's states or of attention), or a MuReadout "
                "before it"
            )


def _check_tied(model: torch.nn.Module) -> None:
    """Refuses a MuReadout that was given an embedding's weight: its values do not shrink with width as a layer's do."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, module in model.named_modules():
        if (
            not isinstance(module, MuReadout)
            or isinstance(module, MuSharedReadout)
            or id(module.weight) not in embedded
        ):
            continue
        if not drawn.as_a_layers(own_values(module.weight), module.in_features):
            raise UserError(
                f"{name}: has an embedding's weight, which would be rescaled as a layer's; expected "
                "MuSharedReadout(embedding.weight)"
            )


def _check_drawn(model: torch.nn.Module, infshape: Any) -> None:
    """Refuses layers of which torch draws tensors that width must not move by a size that grows."""
    for name, module in model.named_modules():
        recurrent = isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase))
        attention = isinstance(module, torch.nn.MultiheadAttention) and (
            not module._qkv_same_embed_dim or module.bias_k is not None
        )
        grows = (recurrent or attention) and any(infshape(p).ninf() for p in module.parameters(recurse=False))
        if grows:
            raise UserError(
                f"{name}: torch draws every tensor of this {type(module).__name__} by a size that grows, and no rule "
                "rescales them; draw them with mup_megatron.mup.init, and pass rescale_params=False"
            )


def _check_transposed(name: str, module: _ConvTransposeNd, infshape: InfShape) -> None:
    """Refuses a transposed convolution whose sizes do not grow alike: its weight is [fan-in, fan-out, ...].

    Where they do, both readings say the same. Where every channel is a group, its fan-in is one channel.
    """
    if module.groups < module.in_channels and infshape[0].ratio != infshape[1].ratio:
        raise UserError(
            f"{name}: channels in grow {float(infshape[0].ratio):g} times and channels out "
            f"{float(infshape[1].ratio):g} times; of a transposed convolution there is a rule where both grow alike"
        )


def check_not_rescaled(model: torch.nn.Module) -> None:
    """Refuses a model whose init was rescaled before.

    Raises:
        UserError: names the layer.
    """
    for name, module in model.named_modules():
        if getattr(module, "_has_rescaled_params", False):
            raise UserError(
                f"{name or 'the model'}: its init was rescaled to µP's before; pass rescale_params=False to set base "
                "shapes anew, or for weights from a checkpoint"
            )


def _shapes(source: Source) -> dict[str, Any]:
    """Shapes of a model, InfShapes of a file, or the given dictionary; without the prefixes that wrappers add."""
    if isinstance(source, torch.nn.Module):
        return dict(get_shapes(source))
    if isinstance(source, (str, Path)):
        return dict(load_base_shapes(source))
    if not isinstance(source, Mapping):
        raise UserError(f"expected a model, shapes by name or a .bsh file, not {type(source).__name__}")
    clean = clean_names(source)
    return {clean[name]: shape for name, shape in source.items()}


def _check_names(base: set[str], target: set[str]) -> None:
    problems = []
    for names, problem in ((target - base, "the base shapes lack"), (base - target, "the model lacks")):
        if names:
            shown = sorted(names)[:5] + (["..."] if len(names) > 5 else [])
            problems.append(f"{problem} {', '.join(shown)}")
    if problems:
        raise UserError(f"the base shapes are another model's: {'; '.join(problems)}")


def _infshapes(model: torch.nn.Module, base: Source, delta: Source | None) -> dict[str, InfShape]:
    specs = _specs(model)
    if specs is not None:
        return _of_shims(specs, base, delta)
    return zip_infshapes(base if delta is None else zip_infshapes(base, delta), model)


def _specs(source: Any) -> dict[str, TensorSpec] | None:
    """The TensorSpecs that the shims of megatron-core's layers set; None for a model without them."""
    if not isinstance(source, torch.nn.Module):
        return None
    clean = clean_names(name for name, _ in source.named_parameters())
    specs = {clean[name]: spec_of(parameter) for name, parameter in source.named_parameters()}
    if not any(specs.values()):
        return None
    lacking = [name for name, spec in specs.items() if spec is None]
    if lacking:
        raise UserError(
            f"{lacking[0]}: its layer does not say its global shape (no TensorSpec), so no rule can be applied to it"
        )
    return {name: spec for name, spec in specs.items() if spec is not None}


def _of_shims(target: dict[str, TensorSpec], base: Source, delta: Source | None) -> dict[str, InfShape]:
    """Infinite shapes of a model of megatron-core's layers: fan-in, fan-out and blocks are those of the TensorSpecs."""
    if isinstance(base, (str, Path)):
        joined = files.join_base_shapes(target, files.load_base_shapes(base), str(base))
    else:
        base_specs, delta_specs = _specs(base), _specs(delta)
        if base_specs is None or delta_specs is None:
            raise UserError(
                "a model of megatron-core's layers needs a base and a delta model of the same layers (on the meta "
                "device, unsharded), or a .bsh file"
            )
        joined = shapes.join_shapes(target, base_specs, delta_specs)
    return {name: _of_tensor(tensor) for name, tensor in joined.items()}


def _of_tensor(tensor: TensorShape) -> InfShape:
    return InfShape((InfDim(*dim) for dim in tensor.infshape), tensor.name, tensor)
