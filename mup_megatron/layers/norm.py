"""Norms of the local spec: torch's and Apex's, recorded.

megatron-core picks its norm class when it is imported (Apex's if Apex is importable), and its torch norm refuses
sequence parallelism although torch's norms compute it well; here the class is the config's, and gains are marked
`sequence_parallel` as megatron-core's own fused norms mark them. Public name: `norm_class`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.layers.record import record
from mup_megatron.shapes import Init, TensorSpec


def _record_gains(norm: torch.nn.Module, size: int, sequence_parallel: bool) -> None:
    for name, init in (("weight", Init.ONES), ("bias", Init.ZEROS)):
        parameter = getattr(norm, name, None)
        if parameter is not None:
            record(parameter, TensorSpec(shape=(size,), fan_in=None, fan_out=0, init=init))
            parameter.sequence_parallel = sequence_parallel


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm over the last dimension, with megatron-core's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        _record_gains(self, hidden_size, config.sequence_parallel)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm over the last dimension, with megatron-core's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        _record_gains(self, hidden_size, config.sequence_parallel)


def norm_class(normalization: str, implementation: str) -> Any:
    """The norm to put into a layer spec.

    Args:
        normalization: `LayerNorm` or `RMSNorm`.
        implementation: `torch` or `apex` (`auto` is resolved before, see runtime.py).
    """
    if implementation == "torch":
        return {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization]

    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    class ApexLayerNorm(FusedLayerNorm):
        """NVIDIA Apex's fused LayerNorm, recorded."""

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__(config, hidden_size, eps)
            _record_gains(self, hidden_size, config.sequence_parallel)

    return ApexLayerNorm
