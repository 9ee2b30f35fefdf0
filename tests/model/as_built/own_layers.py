"""Layer specs as a user writes them: an MLP with one more linear layer, norms at other places, experts in a loop."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


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

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Upstream's MLP writes the modules in it, and no parameter of its own."""
        gain = {"beside_gain": self.beside_gain}
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return found | make_sharded_tensors_for_checkpoint(gain, prefix, {}, sharded_offsets)


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


class LoopedLinear(torch.nn.Module):
    """A linear layer for each of several experts, which runs on a CPU: what TEGroupedMLP is built of."""

    def __init__(self, experts: int, rows_in: int, rows_out: int, **given: Any) -> None:
        super().__init__()
        self._bias = given["skip_bias_add"]
        for number in range(experts):
            weight = torch.nn.Parameter(torch.empty(rows_out, rows_in))
            given["init_method"](weight)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        """Each expert's tokens times its weight; [tokens, rows_in] to [tokens, rows_out]."""
        parts = torch.split(tokens, [int(count) for count in counts])
        weights = list(self.parameters())
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)]), None

    def backward_dw(self) -> None:
        """Nothing is put off."""


LOOPED = """
- {module: TEGroupedMLP, parameter: linear_fc1.weight*, kind: gate_up}
- {module: TEGroupedMLP, parameter: linear_fc2.weight*, kind: output_projection}
"""


def looped_experts(config: Any) -> ModuleSpec:
    """megatron-core's local layer with experts, which are its TEGroupedMLP over `LoopedLinear`."""
    from megatron.core.transformer.moe import experts

    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    parts = experts.GroupedMLPSubmodules(linear_fc1=LoopedLinear, linear_fc2=LoopedLinear)
    of_moe = layer.submodules.mlp.keywords["submodules"]
    of_moe.experts = functools.partial(experts.TEGroupedMLP, submodules=parts)
    return layer


class DuplicatedLinear(torch.nn.Module):
    """A whole linear layer on every rank, which runs on a CPU: what Transformer Engine's is with `duplicated`."""

    def __init__(self, rows_in: int, rows_out: int, *, init_method: Any, bias: bool = False, **_given: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows_out, rows_in))
        init_method(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(rows_out))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., rows_in] to [..., rows_out]."""
        return torch.nn.functional.linear(inputs, self.weight, getattr(self, "bias", None)), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Whole on every rank."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )


LATENT = """
- {module: MoELayer, parameter: fc1_latent_proj.weight, kind: matrix}
- {module: MoELayer, parameter: fc2_latent_proj.weight, kind: output_projection}
"""


class LatentMoE(MoELayer):
    """megatron-core's MoELayer, whose projections to the experts' latent are `DuplicatedLinear`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        before = moe_layer.HAVE_TE, moe_layer.TELinear
        moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear
        try:
            super().__init__(*given, **named)
        finally:
            moe_layer.HAVE_TE, moe_layer.TELinear = before


def latent_experts(config: Any) -> ModuleSpec:
    """megatron-core's local layer with experts on a latent."""
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    mlp = layer.submodules.mlp
    layer.submodules.mlp = functools.partial(LatentMoE, *mlp.args, **mlp.keywords)
    return layer


def sparse_attention(config: Any) -> ModuleSpec:
    """megatron-core's local layer with sparse attention (DSA), whose indexer's layers are `DuplicatedLinear`."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    class Provider(LocalSpecProvider):
        def linear(self) -> type:
            return DuplicatedLinear

    attention = variants.get_dsa_module_spec_for_backend(config, Provider())
    down = attention.submodules
    down.linear_q_down_proj = down.linear_kv_down_proj = ColumnParallelLinear
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.self_attention = attention
    return layer
