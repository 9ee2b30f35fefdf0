"""Layer specs as a user writes them: an MLP with one more linear layer, norms at other places."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class ExtraMLP(MLP):
    """An MLP with a linear layer beside it, and a gain of its own on that layer's output."""

    def __init__(self, config: Any, submodules: Any, **said_since_019: Any) -> None:
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size)
        hidden = config.hidden_size
        self.beside = ColumnParallelLinear(
            hidden, hidden, config=config, init_method=config.init_method, bias=False, gather_output=True
        )
        self.beside_gain = torch.nn.Parameter(torch.ones(hidden))

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """The MLP's output with the layer's added."""
        output, bias = super().forward(hidden_states, *args, **kwargs)
        beside, _ = self.beside(hidden_states)
        return output + beside * self.beside_gain, bias


def _local(config: Any) -> ModuleSpec:
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    return get_gpt_layer_local_spec(**({"normalization": config.normalization} if "normalization" in known else {}))


def extra_mlp(config: Any) -> ModuleSpec:
    """megatron-core's local layer with `ExtraMLP`."""
    layer = _local(config)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer.submodules.mlp = ModuleSpec(module=ExtraMLP, submodules=parts)
    return layer


def normed_queries(config: Any) -> ModuleSpec:
    """megatron-core's local layer with a norm of queries, and none of keys."""
    layer = _local(config)
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = WrappedTorchNorm, IdentityOp
    return layer
