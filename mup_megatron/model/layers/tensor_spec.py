"""How a parameter carries its TensorSpec, and the init methods that only name a distribution.

Public names: `InitMethod`, `set_spec`, `spec_of`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mup_megatron.rules.shapes import Init, TensorSpec

_ATTRIBUTE = "mup_spec"


class InitMethod(NamedTuple):
    """What goes into TransformerConfig's `init_method` fields: the name of a distribution, and no draw.

    megatron-core hands it to the layers that it builds, and the shim notes in the TensorSpec which one it was given.
    model/init.py fills the weight later from its global name and shape, because upstream's own draws depend on the
    layout. Upstream copies a config by dataclasses.asdict, which would make a mapping of a dataclass, and keeps this.
    """

    init: Init

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leaves the tensor alone."""
        return tensor


def set_spec(parameter: torch.nn.Parameter, spec: TensorSpec) -> None:
    """Sets the spec of a parameter, and tells megatron-core how tensor parallelism splits it.

    megatron-core's gradient norms and checkpoints read `tensor_model_parallel` and two more attributes. Version 0.16
    sets them only if it initialises the weight itself, which it is told not to do.
    """
    setattr(parameter, _ATTRIBUTE, spec)
    if spec.partition_dim is not None and not hasattr(parameter, "tensor_model_parallel"):
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = spec.partition_dim  # type: ignore[attr-defined]
        parameter.partition_stride = spec.partition_stride  # type: ignore[attr-defined]


def spec_of(parameter: torch.nn.Parameter) -> TensorSpec | None:
    """The spec that a shim set on the parameter, or on the one whose place it took in Megatron-FSDP; or None."""
    spec: TensorSpec | None = getattr(parameter, _ATTRIBUTE, None)
    if spec is None:
        spec = getattr(getattr(parameter, "orig_param", None), _ATTRIBUTE, None)
    return spec
