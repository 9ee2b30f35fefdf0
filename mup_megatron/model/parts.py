"""What a rank holds of a tensor that ranks share, and what it counts for in a sum over all of them.

Public names: `Part`, `holders`, `counts`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import TensorSpec
from mup_megatron.rules.table import is_copied


class Part(NamedTuple):
    """What this rank holds of a parameter, or of its gradient.

    Args:
        name: the parameter's global name.
        values: consecutive elements, in any shape.
        start: index of the first of them within this rank's slice of the parameter.
        holders: how many ranks hold the same elements. Tensor-parallel duplicates and copies on other pipeline stages
            are not among them: `counts` leaves those out.
    """

    name: str
    values: torch.Tensor
    start: int = 0
    holders: int = 1


def holders(spec: TensorSpec, layout: Layout) -> int:
    """How many ranks hold the same slice of a parameter: the data- and context-parallel ranks, or for an expert's
    parameter the expert-data-parallel ranks."""
    if spec.expert:
        return layout.world_size // (layout.pipeline * layout.expert * layout.expert_tensor)
    return layout.data * layout.context


def counts(name: str, spec: TensorSpec, layout: Layout, rank: int) -> bool:
    """Whether a rank's slice of a tensor is one of those that sums over all ranks are made of.

    Not where every tensor-parallel rank holds the same, and this is not the first; nor where another pipeline stage has
    the same (a tied head, multi-token prediction, a table of relative positions), and this is not the first stage.

    Args:
        name: of the tensor.
        spec: of the tensor.
        layout: how ranks split the model.
        rank: that holds the slice.
    """
    if spec.partition_dim is None and layout.slice_of(spec, rank)[0] != 0:
        return False
    return not (is_copied(name) and layout.pipeline_rank(rank) != 0)
