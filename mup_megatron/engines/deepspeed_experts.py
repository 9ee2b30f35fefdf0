"""Expert parallelism in DeepSpeed's engine, for experts that are megatron-core's and not DeepSpeed's own.

DeepSpeed knows experts by its own layer class, by names of groups that its layers register, and by marks on parameters
and optimizer groups; here megatron-core's are told to it so. Public names: `announce_experts`, `mark_expert_groups`.
ZeRO 3 has no expert parallelism (parallel/layout.py refuses it).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from megatron.core import parallel_state

from mup_megatron.parallel.layout import Layout


class _Announcement(MoE):
    """A DeepSpeed MoE layer that computes nothing: its being in the model tells the engine that there are experts."""

    def __init__(self, num_experts: int) -> None:
        torch.nn.Module.__init__(self)
        self.num_experts = num_experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """The groups are there already."""


def announce_experts(model: torch.nn.Module, layout: Layout) -> None:
    """Tells DeepSpeed the groups of megatron-core's experts, before `deepspeed.initialize`.

    Args:
        model: this rank's; gets a submodule without parameters.
        layout: its expert-parallel size names the groups.
    """
    name = _group_name(layout)
    for group, members, ranks in (
        (
            parallel_state.get_expert_model_parallel_group(),
            groups._get_expert_parallel_group_dict(),
            groups._EXPERT_PARALLEL_GROUP_RANKS,
        ),
        (
            parallel_state.get_expert_data_parallel_group(),
            groups._get_expert_data_parallel_group_dict(),
            groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        ),
    ):
        members.clear()
        members[name] = group
        ranks[name] = torch.distributed.get_process_group_ranks(group)
    for parameter in model.parameters():
        if not getattr(parameter, "allreduce", True):
            parameter.group_name = name  # type: ignore[attr-defined]
    model.add_module("deepspeed_experts", _Announcement(layout.expert))


def mark_expert_groups(given: list[dict[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    """Splits optimizer groups into dense ones and, marked as DeepSpeed wants them, experts.

    Args:
        given: from `optim.parameter_groups`.
        layout: its expert-parallel size names the groups.
    """
    result = []
    for group in given:
        pairs = list(zip(group["names"], group["params"], strict=True))
        for experts, marks in ((False, {}), (True, {"moe": True, "name": _group_name(layout)})):
            kept = [(name, p) for name, p in pairs if getattr(p, "allreduce", True) is not experts]
            if kept:
                names, parameters = zip(*kept, strict=True)
                result.append({**group, "names": list(names), "params": list(parameters), **marks})
    return result


def _group_name(layout: Layout) -> str:
    return f"ep_size_{layout.expert}"
