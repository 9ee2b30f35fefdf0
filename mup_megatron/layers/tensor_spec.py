"""How a parameter carries its TensorSpec, and the init methods that only name a distribution.

Public names: `InitMethod`, `set_spec`, `spec_of`.
"""

from __future__ import annotations

import dataclasses

import torch

from mup_megatron.shapes import Init, TensorSpec

_ATTRIBUTE = "mup_spec"


@dataclasses.dataclass(frozen=True)
class InitMethod:
    """What goes into TransformerConfig's `init_method` fields: the name of a distribution, and no draw.

    megatron-core hands it to the layers it builds; the shim records which one it was given, and init.py fills the
    weight later from its global name and shape, since upstream's draws depend on the layout.
    """

    init: Init

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leaves the tensor alone."""
        return tensor


def set_spec(parameter: torch.nn.Parameter, spec: TensorSpec) -> None:
    """Records `spec` on the parameter, and tells megatron-core how it is split.

    megatron-core 0.16 sets `tensor_model_parallel` and its kin only if it initialises the weight itself, which it is
    told not to; gradient norms and checkpoints read them.
    """
    setattr(parameter, _ATTRIBUTE, spec)
    if spec.partition_dim is not None and not hasattr(parameter, "tensor_model_parallel"):
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = spec.partition_dim  # type: ignore[attr-defined]
        parameter.partition_stride = spec.partition_stride  # type: ignore[attr-defined]


def spec_of(parameter: torch.nn.Parameter) -> TensorSpec | None:
    """What was recorded on the parameter, or None."""
    return getattr(parameter, _ATTRIBUTE, None)
