"""Sums over a model's tensors, made once and good for every layout: what memory, FLOPs and bytes are counted from.

Public names: `Share`, `shares`, `on_stage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mup_megatron.config import Config
from mup_megatron.model.explain import holds
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import TensorShape, layer_number, without_numbers
from mup_megatron.rules.table import Parametrization


@dataclass(frozen=True, kw_only=True)
class Share:
    """Tensors that the same ranks hold: a layer's, all experts of a layer, or those of one name outside of the layers.

    Args:
        name: of one of them, by which `on_stage` finds them.
        expert: whether they are experts'.
        split: elements of those that tensor parallelism splits.
        whole: elements of the others.
        products: weights that a token is multiplied by, of experts' those of as many experts as see it; no readout.
        column: inputs per token of matrices whose outputs tensor-parallel ranks share; no experts, no readout.
        row: outputs per token of matrices whose inputs they share.
        gathered: outputs of the former that are then put together again.
        summed: elements that see a part of the sequence under sequence parallelism; no embedding.
    """

    name: str
    expert: bool
    split: int
    whole: int
    products: float
    column: int
    row: int
    gathered: int
    summed: int

    def elements_on(self, layout: Layout) -> float:
        """How many of the elements a rank has, if it has any."""
        if self.expert:
            return (self.split / layout.expert_tensor + self.whole) / layout.expert
        return self.split / layout.tensor + self.whole


def shares(parametrization: Parametrization) -> list[Share]:
    """Every tensor of a model, in few shares."""
    places: dict[tuple[int | str, bool], list[TensorShape]] = {}
    for name, shape in parametrization.shapes.items():
        layer = layer_number(name)
        places.setdefault((without_numbers(name) if layer is None else layer, shape.spec.expert), []).append(shape)
    return [_share(parametrization.config, expert, tensors) for (_, expert), tensors in places.items()]


def on_stage(held: Sequence[Share], config: Config, layout: Layout, stage: int) -> list[Share]:
    """What ranks of a pipeline stage hold; of the experts' shares each rank has its part."""
    rank = layout.first_rank(stage)
    return [share for share in held if holds(config, layout, rank, share.name)]


def _share(config: Config, expert: bool, tensors: Iterable[TensorShape]) -> Share:
    first, *_ = tensors
    split = whole = products = column = row = gathered = summed = 0
    for shape in tensors:
        spec, size = shape.spec, math.prod(shape.spec.shape)
        if spec.partition_dim is not None:
            split += size
        else:
            whole += size
            summed += 0 if spec.is_lookup else size
        if spec.fan_in is None or spec.is_lookup or spec.readout:
            continue
        products += size
        if expert or spec.partition_dim is None:
            continue
        if spec.partition_dim == spec.fan_in:
            row += spec.shape[spec.fan_out]
        else:
            column += spec.shape[spec.fan_in]
            gathered += spec.shape[spec.fan_out] if "_down_proj." in shape.name or ".eh_proj." in shape.name else 0
    seen = config.model.moe_router_topk / (config.model.num_moe_experts or 1) if expert else 1.0
    return Share(
        name=first.name,
        expert=expert,
        split=split,
        whole=whole,
        products=products * seen,
        column=column,
        row=row,
        gathered=gathered,
        summed=summed,
    )
