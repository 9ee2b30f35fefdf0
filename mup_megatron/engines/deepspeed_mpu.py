"""megatron-core's tensor parallelism as DeepSpeed wants to be told of it. Shared by `initialize` and the engine.

Public names: `Mpu`, `adapted`, `sum_sequence_parallel_gradients`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from mup_megatron.util.errors import UserError


class Mpu:
    """megatron-core's parallel_state with the three names that DeepSpeed asks an mpu for and it calls otherwise.

    Args:
        state: `megatron.core.parallel_state`, which it is unless told, or what has its names.
    """

    def __init__(self, state: Any = None) -> None:
        if state is None:
            from megatron.core import parallel_state

            state = parallel_state
        self._state = state

    def __getattr__(self, name: str) -> Any:
        if name == "_state":
            raise AttributeError(name)  # while it is being copied or unpickled
        return getattr(self._state, name)

    def get_model_parallel_rank(self) -> int:
        """Tensor-parallel rank."""
        return self._state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """Tensor-parallel size."""
        return self._state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Tensor-parallel group."""
        return self._state.get_tensor_model_parallel_group()


def adapted(mpu: Any) -> Any:
    """An mpu that DeepSpeed can use, from parallel_state or from one that is such already.

    DeepSpeed's own parallel_state_sp, of Ulysses, has nothing but groups of sequences; DeepSpeed knows it by its name.
    """
    if mpu is None or hasattr(mpu, "get_model_parallel_world_size") or hasattr(mpu, "initialize_sequence_parallel"):
        return mpu
    if hasattr(mpu, "get_tensor_model_parallel_world_size"):
        return Mpu(mpu)
    raise UserError(
        f"mpu: {mpu!r} has no get_model_parallel_world_size; expected megatron.core.parallel_state or an mpu"
    )


def tensor_parallel_size() -> int:
    """megatron-core's, of this process; 1 where it is not in use."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return 1
    return parallel_state.get_tensor_model_parallel_world_size()


def sum_sequence_parallel_gradients(model: torch.nn.Module) -> None:
    """Sums gradients of parameters that see a part of the sequence, or of the heads, over tensor-parallel ranks.

    megatron-core's finalize_model_grads does it for its own engine; DeepSpeed knows nothing of it.

    Raises:
        UserError: such a parameter has hooks, which may do the same.
    """
    if tensor_parallel_size() == 1:
        return
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()

    def hook() -> Callable[[torch.Tensor], torch.Tensor]:
        def all_reduce(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=group)
            return gradient

        return all_reduce

    split = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and getattr(parameter, "sequence_parallel", False)
    ]
    for name, parameter in split:
        if parameter._backward_hooks:
            raise UserError(
                f"{name}: has gradient hooks already; remove those that sum sequence-parallel gradients over "
                "tensor-parallel ranks, which is done here"
            )
    for _, parameter in split:
        parameter.register_hook(hook())
