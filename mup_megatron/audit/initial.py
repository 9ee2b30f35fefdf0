"""Initial values: size and mean against the table, one row against the run's seed; copies against each other.

Public names: `initial_values`, `copies`, `Values`, `NOT_THE_SEEDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed

from mup_megatron.audit.findings import Finding
from mup_megatron.audit.sums import over_ranks, share_of
from mup_megatron.model.init import _standard_normal, local_ranges, local_rows
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import Parametrization, TensorHyperparameters

_DEVIATIONS = 6.0
"""How many standard errors a mean, or the normal quantity of Wilson and Hilferty, may be off: 2e-9 of all draws are."""

NOT_THE_SEEDS = "ranks whose first row is not the seed's"
_CONSTANTS = {Init.ONES: 1.0, Init.ZEROS: 0.0}

Values = Callable[[torch.nn.Parameter], torch.Tensor]
"""From a parameter to this rank's whole slice of it, in the optimizer's precision; may be collective."""


@torch.no_grad()
def initial_values(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    values: Values,
    table: Parametrization,
    layout: Layout,
    device: torch.device,
) -> list[Finding]:
    """Whether every tensor starts as the table says. Collective.

    One row of each rank's slice is drawn again from the seed, so that other numbers of the right size are seen too. The
    mean square of n normal numbers over σ² is a chi-square quantity over n. How far that is from 1 is bounded by Wilson
    and Hilferty's approximation. What a layer drew by itself (`Init.OWN`) is in no table.

    Args:
        named: this rank's parameters by global name.
        values: of a parameter.
        table: of the run.
        layout: how ranks split the model.
        device: where ranks exchange.
    """
    rank = torch.distributed.get_rank()
    sums: dict[tuple[str, str | None], list[float]] = {}
    strange: dict[str, list[float]] = {}
    for name, parameter in named:
        row = table.tensors[name]
        spec, value = row.shape.spec, values(parameter)
        own, slices = layout.slice_of(spec, rank)
        share = share_of(name, spec, layout, rank)
        if spec.init is Init.OWN:
            continue
        if spec.init not in _CONSTANTS:
            drawn = _first_row(name, row, table.config.run.seed, own, slices, device).to(parameter.dtype)
            strange[name] = [float(not torch.equal(drawn.float(), value[0].flatten().float().to(device)))]
        if not share:
            continue
        constant = _CONSTANTS.get(spec.init)
        blocks = list(row.init_std)
        rows = value.reshape(value.shape[0], -1) if value.dim() else value.reshape(1, 1)
        of_row = local_rows(spec, {block: float(i) for i, block in enumerate(blocks)}, own, slices, value.device)
        for number, block in enumerate(blocks):
            part = rows[of_row == number].float()
            expected = constant if constant is not None else 0.0 if row.init_std[block] == 0 else None
            unequal = 0 if expected is None else int((part != expected).sum())
            exact = torch.float64
            numbers = (part.numel(), float(part.sum(dtype=exact)), float(part.square().sum(dtype=exact)), unequal)
            sums[name, block] = [share * number for number in numbers]
    keys = [(name, block) for name, row in table.tensors.items() for block in row.init_std]
    found = over_ranks(sums, keys, 4, device)
    apart = over_ranks(strange, list(table.tensors), 1, device)
    return [
        *(finding for key in keys if found[key][0] for finding in _judged(table, *key, found[key])),
        *(
            Finding(
                tensor=name,
                quantity=NOT_THE_SEEDS,
                expected=0.0,
                found=ranks[0],
                within="exactly",
                right=ranks[0] == 0,
            )
            for name, ranks in apart.items()
            if table.tensors[name].shape.spec.init not in (*_CONSTANTS, Init.OWN)
        ),
    ]


def _judged(table: Parametrization, name: str, block: str | None, sums: list[float]) -> Iterator[Finding]:
    """One block's numbers against the table's."""
    row = table.tensors[name]
    count, total, squares, unequal = sums
    part = f" of {block}" if block else ""
    constant, std = _CONSTANTS.get(row.shape.spec.init), row.init_std[block]
    if constant is not None or std == 0:
        yield Finding(
            tensor=name,
            quantity=f"initial values{part} that are not {constant or 0.0:g}",
            expected=0.0,
            found=unequal,
            within="exactly",
            right=unequal == 0,
        )
        return
    mean, found = total / count, math.sqrt(squares / count)
    low, high = _bounds(count)
    yield Finding(
        tensor=name,
        quantity=f"initial std{part}",
        expected=std,
        found=found,
        within=f"{low:.4g} to {high:.4g} times, of {count:.0f} values",
        right=low <= found / std <= high,
    )
    allowed = _DEVIATIONS * std / math.sqrt(count)
    yield Finding(
        tensor=name,
        quantity=f"initial mean{part}",
        expected=0.0,
        found=mean,
        within=f"±{allowed:.3g}, of {count:.0f} values",
        right=abs(mean) <= allowed,
    )


def _bounds(count: float) -> tuple[float, float]:
    """Between which factors the root of the mean square of `count` normal numbers lies (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * count)
    low, high = (max(0.0, 1 - spread + sign * _DEVIATIONS * math.sqrt(spread)) ** 3 for sign in (-1, 1))
    return math.sqrt(low), math.sqrt(high)


def _first_row(
    name: str, row: TensorHyperparameters, seed: int, own: int, slices: int, device: torch.device
) -> torch.Tensor:
    """The first row of a rank's slice as it is drawn from the seed, on the device that the model is made on."""
    spec = row.shape.spec
    columns = math.prod(spec.shape[1:])
    first = 0
    if spec.partition_dim == 0:
        first = local_ranges(spec.shape[0], spec.partition_stride, own, slices)[0][0]
    drawn = _standard_normal(seed, name, first * columns, (first + 1) * columns, device)
    if spec.partition_dim == 1:
        ranges = local_ranges(spec.shape[1], spec.partition_stride, own, slices)
        drawn = torch.cat([drawn[low:high] for low, high in ranges])
    return drawn * local_rows(spec, row.init_std, own, slices, device)[0]


@torch.no_grad()
def copies(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    values: Values,
    table: Parametrization,
    layout: Layout,
    device: torch.device,
) -> Iterator[Finding]:
    """Whether what several ranks hold of a tensor is the same on all of them. Collective.

    Args:
        named: this rank's parameters by global name.
        values: of a parameter.
        table: of the run.
        layout: how ranks split the model.
        device: where ranks exchange.
    """
    rank = torch.distributed.get_rank()
    held: dict[tuple[str, int], list[float]] = {}
    for name, parameter in named:
        spec = table.tensors[name].shape.spec
        at = layout.slice_of(spec, rank)[0] if spec.partition_dim is not None else 0
        found = _fingerprint(values(parameter))
        held.setdefault((name, at), found)  # a second one of that name is on this rank, summed in another order
    keys = [
        (name, at)
        for name, row in table.tensors.items()
        for at in range(layout.slice_of(row.shape.spec, 0)[1] if row.shape.spec.partition_dim is not None else 1)
    ]
    largest = over_ranks(held, keys, 2, device, torch.distributed.ReduceOp.MAX, -math.inf)
    smallest = over_ranks(held, keys, 2, device, torch.distributed.ReduceOp.MIN, math.inf)
    for name, at in keys:
        apart = max(high - low for high, low in zip(largest[name, at], smallest[name, at], strict=True))
        yield Finding(
            tensor=name,
            quantity=f"sums of copies apart{f' (slice {at})' if at else ''}",
            expected=0.0,
            found=apart,
            within="exactly",
            right=apart == 0,
        )


def _fingerprint(value: torch.Tensor) -> list[float]:
    """Two sums that copies share, one of which depends on where each number stands."""
    flat = value.detach().float().flatten()
    weights = torch.arange(flat.numel(), device=flat.device, dtype=torch.int32) % 509 + 1
    return [float(flat.sum(dtype=torch.float64)), float((flat * weights).sum(dtype=torch.float64))]
