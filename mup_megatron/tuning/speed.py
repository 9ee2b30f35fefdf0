"""How fast this machine is, as it is now: matrix products of a model's size, timed. Public names: `process_speed`,
`speed_of`, `Speed`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from mup_megatron.config import Config


class Speed(NamedTuple):
    """FLOP/s of one process in matrix products: of nearly all of them, of half of them, of the fastest."""

    least: float
    typical: float
    most: float


def process_speed(config: Config, workers: int) -> Speed:
    """Of matrix products as large as the model's own, in one of some processes that share this machine.

    On a GPU it is measured in a process of its own, for this one will start trials there and holds no context. On a CPU
    a process of a run takes its share of the cores; where others keep them busy, its threads wait for each other, and
    one thread is faster. The faster counts.

    Args:
        config: of the model.
        workers: processes.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    # Larger products are no faster per FLOP, and on a CPU each takes seconds.
    most_rows, most_hidden, most_ffn = (8192, 4096, 16384) if on_gpu else (512, 1024, 4096)
    rows = min(config.training.micro_batch_size * config.training.seq_length, most_rows)
    hidden, ffn = min(config.model.hidden_size, most_hidden), min(config.model.ffn_size, most_ffn)
    if not on_gpu:
        counts = sorted({1, max(1, (os.cpu_count() or 1) // workers)})
        return max((_timed(rows, hidden, ffn, "cpu", count) for count in counts), key=lambda each: each.typical)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_timed, rows, hidden, ffn, "cuda", 1).result()


@functools.cache
def _timed(rows: int, hidden: int, ffn: int, device: str, threads: int) -> Speed:
    """Of [rows, hidden] @ [hidden, ffn], for a quarter of a second, without the first; once in a process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        left = torch.randn(rows, hidden, device=device, dtype=dtype)
        right = torch.randn(hidden, ffn, device=device, dtype=dtype)
        rounds: list[float] = []
        until = time.perf_counter() + 0.25
        while len(rounds) < 4 or time.perf_counter() < until:
            began = time.perf_counter()
            product = left @ right
            float(product[0, 0])  # waits for the device
            rounds.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return speed_of(2.0 * rows * hidden * ffn, rounds[1:])


def speed_of(flops: float, rounds: Sequence[float]) -> Speed:
    """From the seconds of products of equal size.

    Args:
        flops: of one.
        rounds: seconds of each, in any order.
    """
    times = sorted(rounds)
    return Speed(flops / times[math.ceil(0.9 * len(times)) - 1], flops / statistics.median(times), flops / times[0])
