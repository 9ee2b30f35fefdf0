"""Shims of megatron-core's mixture of experts: the router and the shared experts' gate.

The experts themselves are the linear shims (linear.py) inside megatron-core's SequentialMLP or TEGroupedMLP. Router and
gate are output-like without a forward multiplier: their fan-out, experts or one, is no width. What more experts do is
rules/apply.py's.
Public names: `TopKRouter`, `SharedExpertMLP`, `OneExpertMLP`, `global_expert_names`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import router, shared_experts
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.rules.shapes import Init, TensorSpec

_OF_GROUPED = re.compile(r"(?P<experts>.+)\.(?P<layer>linear_fc[12])\.(?P<kind>weight|bias)(?P<number>\d+)")
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(router.TopKRouter):
    """megatron-core's TopKRouter, [experts, hidden], with its TensorSpec; every rank holds the whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts, hidden = self.config.num_moe_experts, self.config.hidden_size
        set_spec(
            self.weight,
            TensorSpec(shape=(experts, hidden), fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out="output_like"),
        )
        if self.bias is not None:
            # megatron-core draws it as it draws the weight.
            set_spec(self.bias, TensorSpec(shape=(experts,), fan_in=None, fan_out=0, init=Init.WEIGHT))

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Router logits [s, b, experts], by torch.

        megatron-core's own goes through Transformer Engine if that is importable, and 0.16.1 asks for it where it is
        not (NameError); both also move a weight on a CPU to the current CUDA device.
        """
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    def _maintain_float32_expert_bias(self) -> None:
        """Also keeps the counts in float32: bfloat16, to which a cast of the model moves them, is exact to 256."""
        super()._maintain_float32_expert_bias()
        for name in ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"):
            buffer = getattr(self, name, None)
            if buffer is not None and buffer.dtype != torch.float32:
                buffer.data = buffer.data.float()


class SharedExpertMLP(shared_experts.SharedExpertMLP):
    """megatron-core's SharedExpertMLP with its gate, [1, hidden], which has a TensorSpec."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.gate_weight is not None:
            shape = (1, self.config.hidden_size)
            set_spec(
                self.gate_weight,
                TensorSpec(shape=shape, fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out="output_like"),
            )


class OneExpertMLP(SequentialMLP):
    """megatron-core's SequentialMLP with the first expert alone, whatever number it is asked for: for shapes."""

    def __init__(self, num_local_experts: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(min(1, num_local_experts), *args, **kwargs)


def global_expert_names(model: torch.nn.Module) -> Callable[[str], str]:
    """From a parameter's name in `model` to the one whose expert is counted over all expert-parallel ranks.

    A weight of grouped experts (`experts.linear_fc1.weight3`) has the name that it has where experts are layers of
    their own (`experts.local_experts.3.linear_fc1.weight`).
    """
    first, grouped = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, SequentialMLP):
            first[f"{name}.local_experts."] = module.ep_group.rank() * module.num_local_experts
        elif isinstance(module, TEGroupedMLP):
            grouped[name] = module.ep_group.rank() * module.num_local_experts

    def rename(name: str) -> str:
        found = _OF_GROUPED.fullmatch(name)
        if found is not None and found["experts"] in grouped:
            number = int(found["number"]) + grouped[found["experts"]]
            return f"{found['experts']}.local_experts.{number}.{found['layer']}.{found['kind']}"
        before, marker, after = name.partition(".local_experts.")
        offset = first.get(before + marker, 0)
        if not offset:
            return name
        number, _, rest = after.partition(".")
        return f"{before}{marker}{int(number) + offset}.{rest}"

    return rename
