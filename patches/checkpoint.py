"""What megatron-core's dist_checkpointing needs to write in the process that calls it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from .patch import Patch


def _plain_queue(_original: Callable[..., Any]) -> Callable[..., Any]:
    results: queue.Queue[Any] = queue.Queue()

    def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
        return results

    return get_write_results_queue


def _in_this_process(_original: Any) -> Any:
    def write_preloaded_data_multiproc(
        transform_list: Any, use_msc: bool, rank: int, write_buckets: list[Any], global_results_queue: Any
    ) -> None:
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        outcome: Any = {}
        for number, bucket in enumerate(write_buckets):
            results: queue.Queue[Any] = queue.Queue()
            counter: queue.Queue[int] = queue.Queue()
            counter.put(number)
            FileSystemWriterAsync.write_preloaded_data(transform_list, number, bucket, results, counter, True)
            _, written = results.get()
            if isinstance(written, Exception):
                outcome = written
                break
            outcome[number] = written
        global_results_queue.put(outcome)

    return staticmethod(write_preloaded_data_multiproc)


def _no_server(symbol: str, parameters: tuple[str, ...], needed: str) -> Patch:
    return Patch(
        name=f"checkpoint-no-server-process{'' if needed.startswith('>') else '-0.16'}",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol=f"megatron.core.dist_checkpointing.strategies.filesystem_async:{symbol}",
        parameters=parameters,
        why="every rank spawns a server process for a queue that only saves in another process need; it re-imports the "
        "main script, and outlives a rank that is killed",
        lower_rung="the queue is made unconditionally in prepare_write_data; no argument chooses it",
        until="megatron-core makes the queue only for saves in another process",
        when="always",
        wrap=_plain_queue,
        needed=needed,
    )


CHECKPOINT_PATCHES: tuple[Patch, ...] = (
    _no_server("_get_write_results_queue", (), "<0.17"),
    _no_server("get_write_results_queue", ("mp_mode",), ">=0.17"),
    Patch(
        name="checkpoint-no-fork",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.dist_checkpointing.strategies.filesystem_async:"
        "FileSystemWriterAsync.write_preloaded_data_multiproc",
        parameters=None,
        why="0.16 forks a process per file. The process that forks runs threads of gloo and CUDA, so the copy can "
        "hang; later versions write in the process itself",
        lower_rung="a strategy's thread_count of 1 still forks once",
        until="megatron-core 0.16 is not supported any more",
        when="always",
        wrap=_in_this_process,
        needed="<0.17",
    ),
)
