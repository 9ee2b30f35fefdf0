"""How a parameter keeps its infinite shape through everything that shards, wraps or replaces it.

Public names: `attach`, `infshape_of`, `global_shape`, `clean_names`, `own_values`, `scale_`.

DistributedDataParallel and DeepSpeed's ZeRO 3 keep a module's Parameter objects; `fully_shard`, `parallelize_module`,
`to_empty`, `load_state_dict(assign=True)` and `copy.deepcopy` put others in their place, without the attributes of the
old ones, and some swap the insides of two tensors. So the shapes live in the module too: its dictionary of parameters
is replaced by one that hands each parameter its shape (DeepSpeed does the same for ZeRO 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from mup_megatron.model.layers.tensor_spec import spec_of
from mup_megatron.mup.infshape import InfShape
from mup_megatron.util.errors import UserError

# What wrappers put into the names of parameters: torch.compile, activation checkpointing, FSDP 1.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class InfParameters(dict[str, Any]):
    """A module's own parameters; each is given its infinite shape whenever it is put in or read out."""

    infshapes: Mapping[str, InfShape] = MappingProxyType({})

    def __setitem__(self, name: str, parameter: Any) -> None:
        super().__setitem__(name, self._shaped(name, parameter))

    def __getitem__(self, name: str) -> Any:
        return self._shaped(name, super().__getitem__(name))

    def items(self) -> Any:
        """The same, of each."""
        return {name: self._shaped(name, parameter) for name, parameter in super().items()}.items()

    def values(self) -> Any:
        """The same, of each."""
        return dict(self.items()).values()

    def _shaped(self, name: str, parameter: Any) -> Any:
        if parameter is not None and name in self.infshapes and not hasattr(parameter, "infshape"):
            parameter.infshape = self.infshapes[name]
        return parameter


def attach(model: torch.nn.Module, infshapes: Mapping[str, InfShape]) -> None:
    """Gives every parameter its infinite shape, for good.

    Args:
        model: on it, names as `model.named_parameters` has them.
        infshapes: by name; a parameter that several modules share needs one name only.
    """
    by_identity = {id(parameter): infshapes[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for parameter in own.values():
            parameter.infshape = by_identity[id(parameter)]  # type: ignore[attr-defined]
        if own and not _is_deepspeeds(module._parameters):
            parameters = InfParameters(module._parameters)
            parameters.infshapes = {name: infshape_of(parameter) for name, parameter in own.items()}
            module._parameters = parameters


def _is_deepspeeds(parameters: Any) -> bool:
    """Whether ZeRO 3 has put its own dictionary in; it keeps Parameter objects, and so what they carry."""
    return type(parameters).__module__.startswith("deepspeed.")


def infshape_of(parameter: Any) -> InfShape:
    """The infinite shape that a parameter carries.

    Raises:
        UserError: it carries none, or microsoft/mup's.
    """
    infshape = getattr(parameter, "infshape", None)
    if infshape is None:
        raise UserError(
            f"a parameter of shape {list(global_shape(parameter))} has no infinite shape; call "
            "mup_megatron.mup.set_base_shapes on the model first"
        )
    if not isinstance(infshape, InfShape):
        raise UserError(
            f"a parameter of shape {list(global_shape(parameter))} carries an infinite shape of "
            f"{type(infshape).__module__}; import set_base_shapes from mup_megatron.mup"
        )
    return infshape


def global_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of the whole parameter, however it is split: by its TensorSpec, ZeRO 3's own note, or a DTensor."""
    spec = spec_of(parameter)
    if spec is not None:
        return spec.shape
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # a DTensor's shape is global already


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Names without what wrappers put into them (DistributedDataParallel, torch.compile, ...), by those names."""
    names = list(names)
    result = {}
    for name in names:
        clean = name
        for wrapper in _WRAPPERS:
            clean = clean.replace(wrapper, "")
        result[name] = clean
    if result and all(clean.startswith("module.") for clean in result.values()):
        result = {name: clean.removeprefix("module.") for name, clean in result.items()}
    return result


def own_values(parameter: Any) -> torch.Tensor:
    """What this process holds of a parameter: the whole, its shard (DTensor), or its partition, flat (ZeRO 3)."""
    partitioned = hasattr(parameter, "ds_tensor") and parameter.numel() == 0
    values: torch.Tensor = parameter.ds_tensor if partitioned else parameter
    return values.data


@torch.no_grad()
def scale_(parameter: Any, factor: float) -> None:
    """Multiplies a parameter in place, or what this process holds of it."""
    own_values(parameter).mul_(factor)
