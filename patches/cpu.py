"""What megatron-core needs to train on a machine without CUDA: three symbols that assume a current CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mup_megatron.patches.record import Patch


def _cpu_device(_original: Callable[[], int]) -> Callable[[], torch.device]:
    def current_device() -> torch.device:
        return torch.device("cpu")

    return current_device


def _get_cpu_rng_state(_original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    return get_cuda_rng_state


def _set_cpu_rng_state(_original: Callable[..., None]) -> Callable[..., None]:
    def set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_cuda_rng_state


CPU_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cpu-current-device",
        distribution="megatron-core",
        versions=">=0.16.1,<0.20",
        symbol="torch:cuda.current_device",
        parameters=(),
        why="GlobalMemoryBuffer.get_tensor and RotaryEmbedding allocate on torch.cuda.current_device(), which raises "
        "where there is no CUDA",
        lower_rung="neither takes a device: there is no argument, field or spec to pass one",
        until="megatron-core allocates these on the device of their inputs",
        when="cpu",
        wrap=_cpu_device,
    ),
    Patch(
        name="cpu-get-rng-state",
        distribution="megatron-core",
        versions=">=0.16.1,<0.20",
        symbol="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        parameters=("device", "clone", "graph_safe"),
        why="the RNG tracker forks CUDA's generator around attention, even with dropout 0; on a CPU the generator that "
        "dropout draws from is torch's own",
        lower_rung="the tracker's class is fixed inside initialize_rng_tracker and calls this function by name",
        until="megatron-core's tracker knows devices other than CUDA",
        when="cpu",
        wrap=_get_cpu_rng_state,
    ),
    Patch(
        name="cpu-set-rng-state",
        distribution="megatron-core",
        versions=">=0.16.1,<0.20",
        symbol="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        parameters=("new_state", "device", "graph_safe"),
        why="the counterpart of cpu-get-rng-state",
        lower_rung="as there",
        until="as there",
        when="cpu",
        wrap=_set_cpu_rng_state,
    ),
)
