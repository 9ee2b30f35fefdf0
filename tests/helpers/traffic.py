"""What a rank really sends and computes in an optimizer step: every collective is seen where torch dispatches it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.parallel.ranks import Rank
from tests.helpers import bodies

_FEW = 32
"""Messages of fewer numbers are norms, losses and counts, which are not what is looked for."""


class Traffic(TorchDispatchMode):
    """Counts bytes that this rank sends, by the kind of the process group.

    Of what ranks gather, scatter or all-reduce, rings are taken to be used. An operation that is not known here is an
    error, and so is a group of no kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)
        self._kinds = _kinds()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation; a collective is counted before."""
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: Any) -> None:
        group = next(torch.distributed.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        message = _tensors(args[1 if operation in _OF_INPUT else 0])
        if sum(tensor.numel() for tensor in message) < _FEW or not message[0].is_floating_point():
            return
        size, ranks = sum(tensor.nbytes for tensor in message), group.size()
        if operation in ("send", "recv_"):
            self.sent["pipeline"] += size if operation == "send" else 0
        elif operation == "alltoall_base_":
            shares = args[4] or [1] * ranks
            self.sent["expert"] += size * (sum(shares) - shares[group.rank()]) / max(1, sum(shares))
        elif ranks > 1:
            self.sent[self._kinds[group.group_name]] += _RINGS[operation] * size * (ranks - 1) / ranks


_OF_INPUT = ("alltoall_base_", "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
"""Collectives whose message is their second argument, what goes in."""
_RINGS = {
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "broadcast_": 1,
    "_allgather_base_": 1,
    "allgather_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}
"""How often a ring of n ranks moves (n-1)/n of the message."""


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for each in argument for tensor in _tensors(each)]


def _kinds() -> dict[str, str]:
    """The kind of each process group, by the group's name."""
    from megatron.core import parallel_state as state

    groups = {
        "tensor": [state.get_tensor_model_parallel_group()],
        "context": [state.get_context_parallel_group()],
        "pipeline": [state.get_pipeline_model_parallel_group(), state.get_embedding_group(check_initialized=False)],
        "expert": [
            state.get_expert_model_parallel_group(),
            state.get_expert_tensor_parallel_group(),
            state.get_expert_tensor_and_model_parallel_group(),
        ],
        "data": [
            state.get_data_parallel_group(),
            state.get_data_parallel_group(with_context_parallel=True),
            state.get_expert_data_parallel_group(),
        ],
    }
    return {group.group_name: kind for kind, found in groups.items() for group in found if hasattr(group, "group_name")}


def known(rank: Rank, *, config: Config) -> dict[str, float]:
    """What `Traffic` makes of collectives of 64 and 96 numbers in the tensor-parallel group of two ranks."""
    from megatron.core import parallel_state

    bodies.start(rank, config)
    group = parallel_state.get_tensor_model_parallel_group()
    half, whole = torch.zeros(32), torch.zeros(64)
    with Traffic() as traffic:
        torch.distributed.all_reduce(whole, group=group)
        torch.distributed.all_gather_into_tensor(whole, half, group=group)
        torch.distributed.reduce_scatter_tensor(half, whole, group=group)
        torch.distributed.all_reduce(half[:1], group=group)  # too few to count
        torch.distributed.all_to_all_single(whole, whole.clone(), [32, 32], [32, 32], group=group)
        if rank.rank == 0:
            torch.distributed.send(torch.zeros(96), 1, group=group)
        else:
            torch.distributed.recv(torch.zeros(96), 0, group=group)
    return dict(traffic.sent)


def step(rank: Rank, *, config: Config) -> tuple[dict[str, float], int]:
    """Bytes that this rank sends in the second step, by kind, and the operations of its matrix products."""
    config, layout, parametrization, chunks = bodies.start(rank, config)
    engine = bodies.build_engine(config, parametrization, chunks, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    engine.step(batches[0], config.hparams.lr)
    batch = batches[1]
    with Traffic() as traffic, FlopCounterMode(display=False) as counter:
        engine.step(batch, config.hparams.lr)
    engine.close()
    return dict(traffic.sent), counter.get_total_flops()
