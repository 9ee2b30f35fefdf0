"""Of runs that follow one another in the processes of one torchrun (megatron_training/forked.py)."""

from __future__ import annotations

from types import ModuleType

from .patch import Patch


def torchrun_patches(watched: ModuleType) -> tuple[Patch, ...]:
    """What such runs need, beside what is watched of them.

    Args:
        watched: mup_megatron.megatron_training.watched.
    """
    return (
        Patch(
            name="torchrun-store",
            distribution="torch",
            versions=">=2.4",
            symbol="torch.distributed.rendezvous:_create_c10d_store",
            parameters=("hostname", "port", "rank", "world_size", "timeout", "use_libuv"),
            why="runs that follow one another under one torchrun meet in its one store, where the addresses of ranks "
            "that have ended still are",
            lower_rung="megatron.training starts its groups from the environment, which knows no prefix of the store",
            until="torchrun's store can be asked for under a prefix",
            when="always",
            wrap=watched.meets_apart,
        ),
    )
