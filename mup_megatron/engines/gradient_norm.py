"""Norms of whole gradients and clipping by them, for engines that hand the gradients out.

Two norms: `global`, the plain one; and `invariant`, N² = Σ m_out/(A² m_in) |grad|², block by block, which width leaves
alone. A threshold on the plain norm is right where everything grows in proportion; where a tensor of the trunk has a
growing fan-in and a fixed fan-out, its plain norm grows as width^1/2 (docs/parametrization.md, section 6).
Sums are in float64: DeepSpeed's own stage-0 clipping sums in float32, off by 1e-5 of the norm already in small models.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed
from megatron.core import parallel_state

from mup_megatron import rules
from mup_megatron.init import local_rows
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
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    gradients = {name: parameter.grad for name, parameter in named_parameters if parameter.grad is not None}
    total = torch.zeros((), dtype=torch.float64, device=next(iter(gradients.values())).device)
    for name, gradient in gradients.items():
        tensor = parametrization.tensors[name]
        if tensor.shape.spec.partition_dim is None and tensor_rank != 0:
            continue  # every tensor-parallel rank holds the same gradient
        squares = gradient.double().square()
        total += _weighted(squares, tensor, tensor_rank, layout.tensor) if invariant else squares.sum()
    torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    norm = float(total.sqrt())
    factor = limit / (norm + 1e-6)
    if limit and factor < 1.0:
        for gradient in gradients.values():
            gradient.mul_(factor)
    return norm


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
