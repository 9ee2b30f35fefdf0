"""Norms: torch's and Apex's, with TensorSpecs. Transformer Engine's is in transformer_engine.py; spec.py chooses.

megatron-core picks its norm class when it is imported (Apex's if Apex is importable), and its torch norm refuses
sequence parallelism although torch's norms compute it well. Here the config names the class, and gains are marked
`sequence_parallel` as megatron-core's own fused norms mark them. Public names: `LayerNorm`, `RMSNorm`, `apex_norm`,
`set_gain_specs`, `Gains`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.rules.shapes import Init, TensorSpec

Gains = Literal["trained", "frozen", "none"]


def set_gain_specs(
    norm: Any, size: int, sequence_parallel: bool, gains: Gains, per_head: bool, zero_centered: bool = False
) -> None:
    """Records what a norm scales (and shifts) by, and marks it as megatron-core's own norms do.

    Args:
        norm: with `weight` and `bias`, either of which may be absent.
        size: of the last dimension.
        sequence_parallel: whether it sees a part of the sequence on each tensor-parallel rank.
        gains: whether they are trained, kept at their initial values, or absent.
        per_head: whether it is of single heads, as a norm of queries or keys.
        zero_centered: whether it scales by 1 + gain.
    """
    gain = Init.ZEROS if zero_centered else Init.ONES
    for name, init in (("weight", gain), ("bias", Init.ZEROS)):
        parameter = getattr(norm, name, None)
        if parameter is not None:
            frozen = gains == "frozen"
            set_spec(parameter, TensorSpec(shape=(size,), fan_in=None, fan_out=0, init=init, frozen=frozen))
            parameter.requires_grad_(not frozen)
            # A norm of single heads sees a part of the heads on each tensor-parallel rank: its gradients are summed
            # over them as those of a part of the sequence are.
            parameter.sequence_parallel = sequence_parallel or per_head


def _gain(norm: Any) -> torch.Tensor | None:
    """What a norm multiplies with."""
    return norm.weight if norm.weight is None or not norm.zero_centered else norm.weight + 1


class _Norm:
    """What torch's norms get here: megatron-core's constructor, and TensorSpecs."""

    gains: Gains = "trained"
    per_head = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, elementwise_affine=self.gains != "none")  # type: ignore[call-arg]
        self.zero_centered = config.layernorm_zero_centered_gamma
        set_gain_specs(self, hidden_size, config.sequence_parallel, self.gains, self.per_head, self.zero_centered)


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension, with megatron-core's constructor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed x, of its shape."""
        return torch.nn.functional.layer_norm(x, self.normalized_shape, _gain(self), self.bias, self.eps)


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, with megatron-core's constructor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normed x, of its shape."""
        return torch.nn.functional.rms_norm(x, self.normalized_shape, _gain(self), self.eps)


def apex_norm() -> Any:
    """NVIDIA Apex's LayerNorm by megatron-core, with TensorSpecs; Apex is imported only where a config asks for it."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    class ApexLayerNorm(FusedLayerNorm):
        """NVIDIA Apex's fused LayerNorm, with TensorSpecs."""

        gains: Gains = "trained"
        per_head = False

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__(config, hidden_size, eps)
            zero_centered = config.layernorm_zero_centered_gamma
            set_gain_specs(self, hidden_size, config.sequence_parallel, self.gains, self.per_head, zero_centered)

    return ApexLayerNorm
