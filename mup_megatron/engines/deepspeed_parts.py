"""What DeepSpeed's ZeRO stages leave a rank of weights, and of gradients between the last backward pass and the step.

Public names: `gradient_parts`, `weight_parts`. DeepSpeed's own accessors (`safe_get_full_grad`) put every tensor
together on every rank, which is what partitioning is there to avoid; here each rank sees its partitions, with their
place in the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from mup_megatron.model.global_names import Named
from mup_megatron.model.parts import Part, holders
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError


def gradient_parts(optimizer: Any, named: Named, parametrization: Parametrization, layout: Layout) -> list[Part]:
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
        whole = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
        return [Part(name, grad, holders=_holders(name, parametrization, layout)) for name, grad in whole]
    if not _knows(optimizer, layout):
        raise UserError(
            f"{parametrization.config.weighing_key} with DeepSpeed's "
            f"{type(optimizer).__name__} is not known here; expected no data_types in the DeepSpeed JSON"
        )
    names = {id(parameter): name for name, parameter in named}
    held = _gradients_3(optimizer) if layout.zero_stage == 3 else _gradients_1_and_2(optimizer)
    return [Part(names[id(parameter)], gradient, start) for parameter, gradient, start in held]


def weight_parts(optimizer: Any, named: Named, parametrization: Parametrization, layout: Layout) -> list[Part]:
    """This rank's master weights, where it has their gradients; of what `gradient_parts` does not refuse."""
    if layout.zero_stage == 0:
        whole = [(name, parameter.detach()) for name, parameter in named if parameter.requires_grad]
        return [Part(name, weight, holders=_holders(name, parametrization, layout)) for name, weight in whole]
    names = {id(parameter): name for name, parameter in named}
    held = _weights_3(optimizer) if layout.zero_stage == 3 else _weights_1_and_2(optimizer)
    return [Part(names[id(parameter)], weight, start) for parameter, weight, start in held]


def _knows(optimizer: Any, layout: Layout) -> bool:
    """Whether what an optimizer of DeepSpeed's holds is found here; its BF16_Optimizer has a structure of its own."""
    wanted = "fp32_partitioned_groups_flat" if layout.zero_stage == 3 else "params_in_partition"
    return layout.zero_stage == 0 or hasattr(optimizer, wanted)


def _holders(name: str, parametrization: Parametrization, layout: Layout) -> int:
    return holders(parametrization.tensors[name].shape.spec, layout)


_Held = Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]
"""Parameters, elements of this rank's partition, and the first one's number."""


def _gradients_1_and_2(optimizer: Any) -> _Held:
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


def _weights_1_and_2(optimizer: Any) -> _Held:
    for parameters in optimizer.params_in_partition:
        for parameter in parameters:
            yield parameter, parameter._hp_mapping.hp_fragment.detach(), parameter._hp_mapping.lp_fragment_address.start


def _gradients_3(optimizer: Any) -> _Held:
    for number, index, parameter, at, count, start in _places_3(optimizer):
        if optimizer.offload_optimizer:
            gradient = optimizer.fp32_partitioned_groups_flat[number].grad.narrow(0, at, count)
        else:
            gradient = optimizer.averaged_gradients[number][index].view(-1)[:count]
        yield parameter, gradient, start


def _weights_3(optimizer: Any) -> _Held:
    for number, _, parameter, at, count, start in _places_3(optimizer):
        yield parameter, optimizer.fp32_partitioned_groups_flat[number].detach().narrow(0, at, count), start


def _places_3(optimizer: Any) -> Iterator[tuple[int, int, torch.nn.Parameter, int, int, int]]:
    """Stage 3 cuts every parameter into as many parts as there are ranks, and pads the last one.

    Yields the group's number, the parameter's in it, the parameter, and of its part on this rank: its place in the
    group's flat partition, the elements without padding, and the first one's number in the parameter.
    """
    rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
    for number, parameters in enumerate(optimizer.fp16_groups):
        at = 0
        for index, parameter in enumerate(parameters):
            size = parameter.partition_numel()
            count = min(size, parameter.ds_numel - rank * size)
            if count > 0:
                yield number, index, parameter, at, count, rank * size
            at += size
