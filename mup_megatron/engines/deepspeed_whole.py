"""One parameter that DeepSpeed's ZeRO stages partition, put together: weight, moments, and the groups that hold it.

Public names: `inner`, `whole`, `groups_of`, `link_moments`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from mup_megatron.engines import WEIGHT


def inner(optimizer: Any, stage: int) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed has wrapped; at stage 0 none is."""
    return optimizer if stage == 0 else optimizer.optimizer


@torch.no_grad()
def whole(
    optimizer: Any, parameter: torch.nn.Parameter, stage: int, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """The master weight (`WEIGHT`) and the moments of a parameter by torch's names. Collective from stage 1 on.

    Args:
        optimizer: the engine's.
        parameter: of its model.
        stage: of ZeRO.
        wanted: kinds of moments. DeepSpeed's Lion for CPUs allocates one that it never uses.
    """
    if stage == 0:
        return {WEIGHT: parameter, **_moments(optimizer.state[parameter], wanted)}
    if not parameter.requires_grad:  # no optimizer has it
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            return {WEIGHT: parameter.detach().float().clone()}
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None and not mapping.optim_fragment:
        link_moments(optimizer)
    found = {WEIGHT: safe_get_full_fp32_param(parameter)}
    states = inner(optimizer, stage).state.values()
    for kind in _moments(next(iter(states)), wanted) if states else ():
        found[kind] = safe_get_full_optimizer_state(parameter, kind)
    return found


def _moments(state: Any, wanted: Collection[str]) -> dict[str, torch.Tensor]:
    return {kind: value for kind, value in state.items() if torch.is_tensor(value) and kind in wanted}


def groups_of(optimizer: Any, parameter: torch.nn.Parameter, stage: int) -> list[dict[str, Any]]:
    """The groups that hold a parameter, by the lists that DeepSpeed's partitions are made of.

    Args:
        optimizer: the engine's.
        parameter: of its model.
        stage: of ZeRO.
    """
    found = inner(optimizer, stage).param_groups
    if stage == 0:
        lists = [group["params"] for group in found]
    elif stage == 3:
        found = [found[optimizer.sub_group_to_group_id[number]] for number in range(len(optimizer.fp16_groups))]
        lists = optimizer.fp16_groups
    else:  # BF16_Optimizer, where the JSON has gradients accumulated in float32, has a name of its own
        lists = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    return [group for group, held in zip(found, lists, strict=True) if any(each is parameter for each in held)]


def link_moments(optimizer: Any) -> None:
    """Lets DeepSpeed's stages 1 and 2 find the moments of every group.

    DeepSpeed 0.19 links them once, when the first group has stepped and the others have no moments yet
    (stage_1_and_2.py, _optimizer_step), so that with several groups its own accessors find none of theirs.
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
