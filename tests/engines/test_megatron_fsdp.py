"""Megatron-FSDP, which computes on CUDA alone, with CUDA's names in its functions replaced by the CPU's: the groups of
the Megatron engine over its sharded parameters train as one process does.

`mup-megatron run --use-megatron-fsdp` stays on CUDA: seven modules are changed here, for the life of the ranks, and
streams and events do nothing. What is compared is what the rules need: that each sharded parameter is in the group of
the one whose place it took (`orig_param`), and that its gradient and its update are whole.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.version import Version

from mup_megatron.data.prepare import prepare
from mup_megatron.parallel.ranks import Rank
from tests.helpers import bodies
from tests.helpers.breakages import replaced
from tests.helpers.comparison import Difference, compare_curves, compare_groups
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import STEPS, Split
from tests.helpers.matrix import config_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(importlib.metadata.version("megatron-core")) < Version("0.19"), reason="compared with 0.19 alone"
    ),
]
_FSDP = "megatron.core.distributed.fsdp"
_MODULES = (
    f"{_FSDP}.mcore_fsdp_adapter",
    *(
        f"{_FSDP}.src.megatron_fsdp.{name}"
        for name in ("megatron_fsdp", "param_and_grad_buffer", "utils", "uneven_dtensor", "mixed_precision")
    ),
    *(f"megatron.core.optimizer{name}" for name in ("", ".optimizer", ".distrib_optimizer", ".clip_grads")),
)


class _Device(str):
    """The CPU, and number 0 where its number is asked for."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


def _for_cpu(code: types.CodeType) -> types.CodeType:
    from mup_megatron.patches.cpu import _code_for_cpu

    def colon(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return constant.replace(co_consts=tuple(colon(part) for part in constant.co_consts))
        return constant.replace("cuda:", "cpu:") if isinstance(constant, str) else constant

    changed: types.CodeType = colon(_code_for_cpu(code))
    return changed


def _functions(module: Any) -> Iterator[Any]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for part in vars(value).values() if inspect.isclass(value) else [value]:
            found = inspect.unwrap(getattr(part, "__func__", getattr(part, "fget", part) or part))
            if inspect.isfunction(found):
                yield found


def _without_cuda() -> None:
    import torch

    for name in _MODULES:
        for function in _functions(importlib.import_module(name)):
            function.__code__ = _for_cpu(function.__code__)
    torch.cpu.current_device = lambda: _Device("cpu")
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state
    for name in ("empty_cache", "memory_allocated", "max_memory_allocated", "is_current_stream_capturing"):
        setattr(torch.cpu, name, lambda *arguments: 0)
    for kind in (torch.cpu.Stream, torch.cpu.Event):
        for name in ("wait_event", "record_event", "wait_stream", "record", "wait", "query", "synchronize"):
            setattr(kind, name, lambda self, *arguments, **keys: self)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment,method-assign]
    # On CUDA a stream keeps what is freed until its collectives have read it. gloo's threads may read what is freed.
    torch.distributed.distributed_c10d._CoalescingManager.append = _append_ended  # type: ignore[assignment,method-assign]


def _append_ended(manager: Any, work: Any = None) -> None:
    if work:
        work.wait()
        manager.works.append(work)


def train(rank: Rank, *, config: Any, steps: int, broken: str = "nothing") -> dict[str, Any]:
    """As bodies.train, with Megatron-FSDP in the place of DistributedDataParallel; parameters are sharded too."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    from mup_megatron.engines import megatron

    _without_cuda()
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        gradient_reduce_div_fusion=False,  # by an operation of NCCL's
    )

    def wrap(config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False) -> Any:
        return FullyShardedDataParallel(
            config=config, ddp_config=ddp_config, module=module, device=torch.device("cpu:0")
        )

    with (
        replaced(megatron, "DistributedDataParallel", wrap),
        replaced(megatron, "ddp_config", lambda config, layout: settings),
    ):
        return bodies.train(rank, config=config, steps=steps, broken=broken)


@pytest.fixture(scope="module")
def own() -> Iterator[Ranks]:
    """Ranks that nobody else uses afterwards."""
    ranks = Ranks()
    yield ranks
    ranks.close()


CELLS = [
    ("llama", Split("distributed", data=2)),
    ("llama", Split("distributed", data=4)),
    ("qk-norm", Split("distributed", tensor=2, data=2)),
]


@pytest.mark.parametrize(("model", "split"), CELLS, ids=str)
def test_it_is_one_process(model: str, split: Split, own: Ranks, ranks: Ranks) -> None:
    """The same rate, epsilon and decay of every tensor; 20 losses and gradient norms."""
    config = config_of(model)
    prepare(config)
    whole = ranks.run(1, bodies.train, config=config, steps=STEPS)[0]
    results = own.run(split.processes, train, config=config_of(model, split), steps=STEPS)
    compare_groups(results, whole)
    assert {name for result in results for name in result["groups"]} == set(whole["groups"])
    compare_curves(results, whole)


def test_without_groups_of_its_own_it_differs(own: Ranks, ranks: Ranks) -> None:
    """Negative control: the optimizer without the rules' overrides; the groups say why."""
    model, split = CELLS[0]
    whole = ranks.run(1, bodies.train, config=config_of(model), steps=STEPS)[0]
    results = own.run(split.processes, train, config=config_of(model, split), steps=STEPS, broken="no_config_overrides")
    with pytest.raises(Difference, match=r"group of .*weight on rank 0"):
        compare_groups(results, whole)
    with pytest.raises(Difference, match=r"losses\[\d+\] on rank 0"):
        compare_curves(results, whole, tolerance=1e-3)
