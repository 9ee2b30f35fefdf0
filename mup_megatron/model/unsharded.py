"""Models built whole, on the meta device, by upstream's constructors: shapes without memory and without process groups.

Public names: `unsharded` (what holds while one is built), `one_rank_groups` (the process groups that it is handed).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.overrides import TorchFunctionMode

# What makes a tensor of no values that somebody says.
_STORAGE = (
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace, torch.rand, torch.randn),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
)
_BACKENDS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


class _OneRank:
    """Stands for a process group of one rank: what an unsharded build on the meta device divides by."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def one_rank_groups() -> ProcessGroupCollection:
    """Process groups of one rank each, for a model that is built and never run."""
    names = (
        *("tp", "pp", "cp", "ep", "dp", "dp_cp", "expt_tp", "expt_dp", "tp_cp", "tp_ep", "tp_ep_pp", "mp"),
        "tp_dp_cp",
    )
    return ProcessGroupCollection(embd=None, pos_embd=None, **dict.fromkeys(names, _OneRank()))


@contextlib.contextmanager
def unsharded(*, groups: bool = False) -> Iterator[None]:
    """While it holds, modules are built on the meta device, as on one pipeline stage, and nothing is drawn.

    Args:
        groups: modules that ask parallel_state for a process group get one of one rank too. Layers of upstream's are
            handed theirs (`one_rank_groups`); a user's own layers may not be.
    """
    # Multi-token prediction asks parallel_state for the pipeline stage, whatever groups the model is handed.
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    try:
        with torch.device("meta"), _DrawsNothing(), _without_backends(), _one_rank(groups):
            yield
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)


class _DrawsNothing(TorchFunctionMode):
    """Leaves initial values out, which such a tensor does not have, and storage where a layer names a device.

    On the meta device torch.nn.init computes values by operations written in Python, and loads torch._dynamo first.
    Transformer Engine's layers name the device of their weights: a whole model would be in memory.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        named = dict(kwargs or {})
        if function in _STORAGE and "device" in named and not _counts_on_cpu(function, named["device"]):
            named["device"] = "meta"
        if function is torch.Tensor.to and "device" in named:  # YaRN's numbers go to the GPU, and explain needs none
            named["device"] = args[0].device
        return function(*args, **named)


def _counts_on_cpu(function: Any, device: Any) -> bool:
    """Whether these are the few numbers of a rotary embedding, for which the meta device would load torch._dynamo."""
    return function is torch.arange and str(device) == "cpu"


@contextlib.contextmanager
def _without_backends() -> Iterator[None]:
    """Upstream's constructor pins Transformer Engine's attention backend for the process, which the real model does."""
    before = {name: os.environ.pop(name) for name in _BACKENDS if name in os.environ}
    try:
        yield
    finally:
        for name in _BACKENDS:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _one_rank(asked: bool) -> Iterator[None]:
    """Puts groups of one rank in the place of parallel_state's own."""
    names = [name for name in vars(parallel_state) if asked and re.fullmatch(r"_[A-Z_]+_GROUP(_WITH_[A-Z_]+)?", name)]
    before = {name: getattr(parallel_state, name) for name in names}
    try:
        for name in names:
            setattr(parallel_state, name, _OneRank())
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
