"""Where DeepSpeed's ZeRO stages keep gradients between the last backward pass of a step and the step.

Public name: `gradient_parts`. DeepSpeed's own accessors (`safe_get_full_grad`) put every gradient together on every
rank, which is what partitioning is there to avoid; here each rank sees its partitions, with their place in the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from mup_megatron.engines.gradient_norm import GradientPart, whole_gradients
from mup_megatron.model.global_names import Named
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError


def gradient_parts(
    optimizer: Any, named: Named, parametrization: Parametrization, layout: Layout
) -> list[GradientPart]:
    """This rank's gradients, after the last backward pass of a step.

    Args:
        optimizer: DeepSpeed's; torch's own at stage 0.
        named: parameters of this rank.
        parametrization: of the same model.
        layout: how ranks split the model; its ZeRO stage.

    Raises:
        UserError: an optimizer of DeepSpeed's that keeps gradients elsewhere.
    """
    if layout.zero_stage == 0:
        return whole_gradients(((n, p.grad) for n, p in named), parametrization, layout)
    wanted = "fp32_partitioned_groups_flat" if layout.zero_stage == 3 else "params_in_partition"
    if not hasattr(optimizer, wanted):
        raise UserError(
            f"{parametrization.config.weighing_key} with DeepSpeed's "
            f"{type(optimizer).__name__} is not known here; expected no data_types in the DeepSpeed JSON"
        )
    names = {id(parameter): name for name, parameter in named}
    held = _stage_3(optimizer) if layout.zero_stage == 3 else _stages_1_and_2(optimizer)
    return [GradientPart(names[id(parameter)], gradient, start) for parameter, gradient, start in held]


def _stages_1_and_2(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """(parameter, elements of its gradient, the first one's number) of this rank's partition of each group."""
    if optimizer.cpu_offload:
        optimizer._wait_for_offload_copies()
    for number, parameters in enumerate(optimizer.params_in_partition):
        places = [(parameter, parameter._hp_mapping) for parameter in parameters]
        if optimizer.cpu_offload:
            flat = optimizer.single_partition_of_fp32_groups[number].grad.view(-1)
            gradients = [
                flat.narrow(0, place.hp_fragment_address.start, place.hp_fragment_address.numel) for _, place in places
            ]
        else:
            # Between and behind the parameters' own there may be padding.
            held = optimizer.averaged_gradients[number]
            gradients = [gradient for gradient in held if not getattr(gradient, "_zero_padding", False)]
        for (parameter, place), gradient in zip(places, gradients, strict=False):
            yield parameter, gradient, place.lp_fragment_address.start


def _stage_3(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """As `_stages_1_and_2`; every parameter is cut into as many parts as there are ranks, the last one padded."""
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    for number, parameters in enumerate(optimizer.fp16_groups):
        at = 0
        for index, parameter in enumerate(parameters):
            size = parameter.partition_numel()
            if optimizer.offload_optimizer:
                gradient = optimizer.fp32_partitioned_groups_flat[number].grad.narrow(0, at, size)
            else:
                gradient = optimizer.averaged_gradients[number][index].view(-1)
            at += size
            count = min(size, parameter.ds_numel - rank * size)
            if count > 0:
                yield parameter, gradient[:count], rank * size
