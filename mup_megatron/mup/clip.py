"""Clipping of gradients by a norm that does not move with width.

Public name: `clip_grad_norm_`. The plain norm grows with width where a matrix from a dimension that grows to one that
does not carries no forward multiplier: heads of `prepare_hf`'s models, routers (docs/parametrization.md, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from mup_megatron.mup.parameters import infshape_of
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Any], max_norm: float) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, by N² = sum of m_out/(A² m_in) · |grad|², which at the base is the plain norm.

    Args:
        parameters: that have infinite shapes; those without a gradient are left out.
        max_norm: which N has after it at most.

    Returns:
        N before clipping.

    Raises:
        UserError: a parameter has no infinite shape, none has a gradient (DeepSpeed's engine keeps them), or FSDP1 has
            left each rank a part of them, of which torch knows no norm of the whole.
    """
    given = list(parameters)
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in given):
        raise UserError("clip_grad_norm_: parameters are parts under FullyShardedDataParallel; expected fully_shard")
    given = [parameter for parameter in given if parameter.grad is not None]
    if not given:
        raise UserError(
            "clip_grad_norm_: no parameter has a gradient; expected it behind backward(), and gradient_clipping of "
            "DeepSpeed's config under its engine"
        )
    norms = []
    for parameter in given:
        ratios = infshape_of(parameter).ratios
        weight = formulas.gradient_norm(m_in=ratios.m_in, m_out=ratios.m_out, forward=ratios.forward)
        norms.append(torch.nn.utils.get_total_norm([parameter.grad]) * math.sqrt(weight))
    total = torch.linalg.vector_norm(torch.stack(norms))
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total
