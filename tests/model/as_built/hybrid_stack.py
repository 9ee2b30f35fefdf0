"""A hybrid stack as a user writes it for a CPU: megatron-core's layers of a pattern, without Transformer Engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class LocalStack(HybridStack):
    """HybridStack, whose final norm is Transformer Engine's, with torch's."""

    def __init__(self, config: Any, submodules: Any, **given: Any) -> None:
        super().__init__(config, submodules, **{**given, "post_layer_norm": False})
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


class Recurrence(MegatronModule):
    """A mixer that runs on a CPU, in the place of Mamba's: a gated linear recurrence whose decay is a parameter."""

    def __init__(self, config: Any, d_model: int, **_given: Any) -> None:
        super().__init__(config)
        whole = {"config": config, "bias": False, "skip_bias_add": True}
        self.in_proj = ColumnParallelLinear(
            d_model, 2 * d_model, init_method=config.init_method, gather_output=True, **whole
        )
        self.out_proj = RowParallelLinear(
            d_model, d_model, init_method=config.output_layer_init_method, input_is_parallel=False, **whole
        )
        self.A_log = torch.nn.Parameter(torch.empty(d_model).uniform_(1, 16).log())
        self.D = torch.nn.Parameter(torch.ones(d_model))

    def forward(self, hidden_states: torch.Tensor, **_given: Any) -> tuple[torch.Tensor, Any]:
        """[s, b, h] to [s, b, h]."""
        inputs, gate = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        kept, state, states = torch.exp(-self.A_log.exp() / 16), torch.zeros_like(inputs[0]), []
        for one in inputs:
            state = kept * state + one
            states.append(state)
        return self.out_proj((torch.stack(states) + self.D * inputs) * torch.nn.functional.silu(gate))


LOWEST, HIGHEST = math.log(1), math.log(16)
"""Between which `Recurrence` draws its decay."""

_dense = get_gpt_layer_local_spec().submodules
_attention = TransformerLayerSubmodules(
    input_layernorm=_dense.input_layernorm,
    self_attention=_dense.self_attention,
    self_attn_bda=get_bias_dropout_add,
)
_mlp = TransformerLayerSubmodules(
    pre_mlp_layernorm=_dense.pre_mlp_layernorm, mlp=_dense.mlp, mlp_bda=get_bias_dropout_add
)
_experts = TransformerLayerSubmodules(
    pre_mlp_layernorm=_dense.pre_mlp_layernorm,
    mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
    mlp_bda=get_bias_dropout_add,
)
_ahead = ModuleSpec(
    module=MultiTokenPredictionBlock,
    submodules=MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=MultiTokenPredictionLayer,
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=WrappedTorchNorm,
                    hnorm=WrappedTorchNorm,
                    eh_proj=ColumnParallelLinear,
                    mtp_model_layer=None,  # upstream builds it of the pattern behind /
                    layer_norm=WrappedTorchNorm,
                ),
            )
        ]
    ),
)
local_stack = ModuleSpec(
    module=LocalStack,
    submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm, mixer=ModuleSpec(module=Recurrence), mamba_bda=get_bias_dropout_add
            ),
        ),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=_attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_mlp),
        moe_layer=ModuleSpec(module=TransformerLayer, submodules=_experts),
        mtp_block_spec=_ahead,
    ),
)
