"""A training step of ours over one of plain megatron-core and of its native MuP: all in one process, in turn."""

from __future__ import annotations

import functools
from typing import Any

import torch

from benchmarks import contenders
from benchmarks.contenders import Bench, Contender
from benchmarks.harness import CONTENDERS, absent, alternate, over, ratios, spread
from benchmarks.native import logits_multiplier
from mup_megatron.parallel import runtime

# A body of some tenths of a second: long enough for the clock, short enough that neighbours disturb a pair alike.
_STEPS_A_RUN = {4096: 2}


def measure(vocabulary: int, runs: int) -> dict[str, Any]:
    """`compare` in process groups of its own."""
    bench = contenders.start(vocabulary)
    result = compare(bench, runs, steps_a_run=_STEPS_A_RUN.get(vocabulary, 1))
    runtime.stop_distributed()
    return result


def compare(bench: Bench, runs: int, steps_a_run: int = 1) -> dict[str, Any]:
    """Seconds per step of each contender and ours over each, pair by pair.

    `plain_again` is the plain contender a second time in every round: its ratio to itself is the noise.
    """
    built = {name: contenders.build(name, bench) for name in CONTENDERS if name not in absent()}
    multipliers = {name: logits_multiplier(contender.model, contender.step) for name, contender in built.items()}
    check_logits(multipliers, bench.width)

    def run(contender: Contender) -> None:
        for _ in range(steps_a_run):
            contender.step()
        if bench.device.type == "cuda":
            torch.cuda.synchronize()

    bodies = {name: functools.partial(run, contender) for name, contender in built.items()}
    seconds = alternate({**bodies, "plain_again": bodies["plain"]}, runs, warmup=2)
    again = ratios(seconds, "plain_again", "plain")
    del seconds["plain_again"]
    return {
        "vocabulary": bench.vocabulary,
        **bench.describe(),
        "logits_multiplied_by": {name: round(multiplier, 6) for name, multiplier in multipliers.items()},
        "seconds_per_step": {name: spread([s / steps_a_run for s in values]) for name, values in seconds.items()},
        "ours_over": over(seconds),
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
