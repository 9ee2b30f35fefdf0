"""Steps of whole matrices, recomputed from what the optimizer keeps: Muon's and SOAP's.

Public names: `Orthogonal`, `muon_direction`, `soap_direction`, `ERROR_OF_SOAP`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from mup_megatron.audit.update import ERROR

_ERROR_OF_BFLOAT16 = 5e-2
"""Share of a step that five steps of Newton and Schulz in bfloat16 may be off."""

ERROR_OF_SOAP = 1e-2
"""The same of SOAP, whose products on CUDA are in TF32."""


@dataclass(frozen=True)
class Orthogonal:
    """How a Muon of megatron-core's orthogonalises (`TensorParallelMuon` in its optimizer/emerging_optimizers.py).

    Args:
        steps: of Newton and Schulz.
        coefficients: of these steps, by emerging_optimizers' name.
        factor: on the step, beside the root of the matrix's larger side.
        nesterov: whether the gradient is ahead of its average.
        error: share of a step by which its rounding may be off.
    """

    steps: int
    coefficients: str
    factor: float
    nesterov: bool
    error: float

    @classmethod
    def of(cls, optimizer: Any) -> Orthogonal | None:
        """As a torch optimizer was built; None where it is no such Muon."""
        try:
            kept = inspect.getclosurevars(optimizer.scaled_orthogonalize_fn).nonlocals
            # At less than the highest precision it multiplies in bfloat16.
            error = ERROR if optimizer.fp32_matmul_prec == "highest" else _ERROR_OF_BFLOAT16
            steps, coefficients, factor = (kept[f] for f in ("num_ns_steps", "coefficient_type", "extra_scale_factor"))
            return cls(steps, coefficients, factor, optimizer.nesterov, error)
        except (AttributeError, TypeError, KeyError):
            return None


def muon_direction(
    average: torch.Tensor,
    gradient: torch.Tensor,
    how: Orthogonal,
    *,
    momentum: float,
    blocks: torch.Tensor | None,
    dimension: int | None,
    group: torch.distributed.ProcessGroup | None,
) -> torch.Tensor:
    """Of a step of Muon, what the rate multiplies: the average orthogonalised, in scale mode `spectral`.

    Collective over `group`.

    Args:
        average: this rank's slice of the gradients' average behind the step, float32.
        gradient: the same of the step's gradient.
        how: it orthogonalises.
        momentum: share of the average before the step in the one behind it.
        blocks: a number per row of the slice, of matrices that are orthogonalised each for itself; None for one matrix.
        dimension: along which ranks split the matrix; None where this rank has it whole.
        group: of these ranks, in the order of their slices.
    """
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from emerging_optimizers.utils import fp32_matmul_precision

    if how.nesterov:
        average = momentum * average + (1 - momentum) * gradient
    direction = torch.empty_like(average)
    for rows in _each(blocks):
        part = average[rows].contiguous()
        parts, own = [part], 0
        if dimension is not None and group is not None:
            parts, own = [torch.empty_like(part) for _ in range(group.size())], group.rank()
            torch.distributed.all_gather(parts, part, group=group)
        whole = torch.cat(parts, dimension or 0)
        with fp32_matmul_precision("highest"):
            step = newton_schulz(whole, how.steps, how.coefficients)
        direction[rows] = how.factor * max(whole.shape) ** 0.5 * step.chunk(len(parts), dimension or 0)[own]
    return direction


def _each(blocks: torch.Tensor | None) -> Iterator[Any]:
    """What picks the rows of one matrix after the other."""
    if blocks is None:
        yield slice(None)
        return
    for number in blocks.unique():
        yield blocks == number


def soap_direction(
    held: Mapping[str, torch.Tensor], *, eps: float, betas: tuple[float, float], updates: int
) -> torch.Tensor | None:
    """Of a step of SOAP, what the rate multiplies: Adam's step in the eigenbases, turned back.

    Args:
        held: what the optimizer keeps of a matrix behind the step (`MOMENTS` in engines/optim.py).
        eps: of Adam there.
        betas: of the optimizer.
        updates: in its averages, this one among them.
    """
    if "Q_L" not in held:
        return None
    first, second = betas
    left, right = held["Q_L"].double(), held["Q_R"].double()
    mean = held["exp_avg"].double() / (1 - first**updates)
    size = (held["exp_avg_sq"].double() / (1 - second**updates)).sqrt() + eps
    return left @ (mean / size) @ right.T
