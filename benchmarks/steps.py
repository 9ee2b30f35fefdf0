"""A training step of ours over one of plain megatron-core and of its native MuP: all in one process, in turn."""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.contenders import Bench, Contender
from benchmarks.harness import alternate_clocks, contenders_of, over, ratios, spread
from benchmarks.native import logits_multiplier
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import read_rank


def measure(architecture: str, engine: str, vocabulary: int, runs: int) -> dict[str, Any]:
    """`compare` in process groups of its own, of as many tensor-parallel ranks as a launcher started."""
    bench = contenders.start(vocabulary, engine, architecture, rank=read_rank())
    result = compare(bench, runs)
    runtime.stop_distributed()
    return result


def compare(bench: Bench, runs: int) -> dict[str, Any]:
    """Seconds per step of each contender and ours over each, pair by pair; CPU seconds too.

    `plain_again` is the plain contender a second time in every round: its ratio to itself is the noise.
    """
    config = bench.config
    with_native = config.parallel.engine == "deepspeed" and config.model.architecture == "gpt3"
    names = contenders_of(native=with_native and bench.layout.world_size == 1)
    built = {name: contenders.build(name, bench) for name in names}
    multipliers = {name: logits_multiplier(contender.model, contender.step) for name, contender in built.items()}
    check_logits(multipliers, bench.width)

    def run(contender: Contender) -> None:
        contender.step()
        if bench.device.type == "cuda":
            torch.cuda.synchronize()

    bodies = {name: functools.partial(run, contender) for name, contender in built.items()}
    seconds, cpu_seconds = alternate_clocks({**bodies, "plain_again": bodies["plain"]}, runs, warmup=2)
    again = ratios(seconds, "plain_again", "plain")
    del seconds["plain_again"], cpu_seconds["plain_again"]
    return {
        "vocabulary": bench.vocabulary,
        **bench.describe(),
        "threads": torch.get_num_threads(),
        "logits_multiplied_by": {name: round(multiplier, 6) for name, multiplier in multipliers.items()},
        "seconds_per_step": {name: spread(values) for name, values in seconds.items()},
        "ours_over": over(seconds),
        "cpu_ours_over": over(cpu_seconds),
        "plain_again_over_plain": again,
    }


def check_logits(multipliers: dict[str, float], width: float) -> None:
    """That the comparison is the one it says: only the native contender multiplies its logits, by one over the width.

    Raises:
        ValueError: it is not.
    """
    expected = {"ours": 1.0, "plain": 1.0, "native": 1 / width}
    wrong = {name: value for name, value in multipliers.items() if abs(value - expected[name]) > 1e-3}
    if wrong:
        raise ValueError(f"logits are multiplied by {wrong}; expected {expected}")
