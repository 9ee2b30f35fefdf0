"""The rank processes that tests share: nothing that torch keeps for a process's life reaches the next body."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.distributed import Ranks


def _emptied(_rank: Any, *, groups: int) -> list[float]:
    """An empty tensor over both ranks, made through DTensor's dispatch, and what its mesh's group sums up."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(groups):
        torch.distributed.new_group([0, 1])
    mesh = DeviceMesh.from_group(torch.distributed.new_group([0, 1]), "cpu")
    made = torch.empty_like(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    again = distribute_tensor(torch.ones(4, 2), made.device_mesh, made.placements)
    return [float(value) for value in again.full_tensor().sum(dim=1)]


def test_no_mesh_of_an_earlier_body_is_met_again(ranks: Ranks) -> None:
    """DTensor keeps the specs of results by those of arguments, meshes included, and equal meshes are one to it."""
    assert ranks.run(2, _emptied, groups=3) == [[2.0] * 4] * 2
    assert ranks.run(2, _emptied, groups=0) == [[2.0] * 4] * 2
