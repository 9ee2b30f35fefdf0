"""Norms of whole gradients and clipping by them, for engines that hand the gradients out.

Two norms: `global`, the plain one; and `invariant`, N² = Σ m_out/(A² m_in) |grad|², block by block, which width leaves
alone. A threshold on the plain norm is right where everything grows in proportion; where a tensor of the trunk has a
growing fan-in and a fixed fan-out, its plain norm grows as width^1/2 (docs/parametrization.md, section 6).
Sums are in float64: DeepSpeed's own stage-0 clipping sums in float32, off by 1e-5 of the norm already in small models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state

from mup_megatron import rules
from mup_megatron.init import local_rows
from mup_megatron.layers.record import recorded
from mup_megatron.layout import Layout
from mup_megatron.parametrization import Parametrization, TensorHyperparameters


@torch.no_grad()
def clip_gradients(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    parametrization: Parametrization,
    layout: Layout,
    limit: float,
) -> float:
    """Scales whole gradients in place so that the norm is at most `limit` (0: no limit).

    Args:
        named_parameters: (global name, parameter) pairs of this rank.
        parametrization: of the same model; its config's `training.clip_norm` says which norm.
        layout: how ranks split the model.
        limit: threshold.

    Returns:
        The norm over all ranks before clipping; at the base shape both norms are the same.
    """
    invariant = parametrization.config.training.clip_norm == "invariant"
    rank = torch.distributed.get_rank()
    gradients = {name: parameter.grad for name, parameter in named_parameters if parameter.grad is not None}
    device = next(iter(gradients.values())).device
    dense, experts = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for name, gradient in gradients.items():
        tensor = parametrization.tensors[name]
        spec = tensor.shape.spec
        own, slices = layout.slice_of(spec, rank)
        if spec.partition_dim is None and own != 0:
            continue  # every tensor-parallel rank holds the same gradient
        squares = gradient.double().square()
        total = experts if spec.expert else dense
        total += _weighted(squares, tensor, own, slices) if invariant else squares.sum()
    torch.distributed.all_reduce(dense, group=parallel_state.get_tensor_model_parallel_group())
    torch.distributed.all_reduce(experts, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    norm = float((dense + experts).sqrt())
    _scale(gradients.values(), norm, limit)
    return norm


@torch.no_grad()
def clip_partitions(optimizer: Any, layout: Layout, limit: float) -> float:
    """The same for the gradients that DeepSpeed's ZeRO 1 and 2 have partitioned, by the plain norm.

    Args:
        optimizer: DeepSpeed's, after the last backward pass of a step.
        layout: how ranks split the model.
        limit: threshold; 0 is none.
    """
    rank = torch.distributed.get_rank()
    parts = [
        (gradient, recorded(parameter))
        for number in range(len(optimizer.params_in_partition))
        for gradient, parameter in zip(
            optimizer.averaged_gradients[number], optimizer.params_in_partition[number], strict=False
        )
    ]
    total = torch.zeros((), dtype=torch.float64, device=optimizer.device)
    for gradient, spec in parts:
        if spec is not None and (spec.partition_dim is not None or layout.slice_of(spec, rank)[0] == 0):
            total += gradient.double().square().sum()
    torch.distributed.all_reduce(total)  # each rank's partitions are of its own dense and expert parameters
    norm = float(total.sqrt())
    _scale((gradient for gradient, _ in parts), norm, limit)
    return norm


def _scale(gradients: Iterable[torch.Tensor], norm: float, limit: float) -> None:
    factor = limit / (norm + 1e-6)
    if limit and factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def _weighted(squares: torch.Tensor, tensor: TensorHyperparameters, rank: int, ranks: int) -> torch.Tensor:
    """Σ m_out/(A² m_in) · squares over the blocks of one tensor."""
    shape = tensor.shape
    forward = rules.readout_multiplier(shape.fan_in.ratio) if shape.spec.readout else rules.ONE
    weights = {
        block: float(rules.gradient_norm(m_in=shape.fan_in.ratio, m_out=dim.ratio, forward=forward))
        for block, dim in shape.fan_outs.items()
    }
    if shape.spec.fused is None:
        return squares.sum() * weights[None]
    rows = local_rows(shape.spec, weights, rank, ranks, squares.device).double()
    return (squares.reshape(len(rows), -1).sum(dim=1) * rows).sum()
