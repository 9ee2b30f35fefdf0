"""How runs in different layouts are compared.

What differs is named, so that a negative control can assert why its comparison failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

TOLERANCE = 2e-5


class Difference(AssertionError):
    """Two runs differ; the message names the quantity, the tensor where it is one's, and the rank."""


def deviation(values: list[float], expected: list[float]) -> float:
    """Largest relative deviation."""
    return float(np.max(np.abs(np.array(values) / np.array(expected) - 1)))


def compare_curves(results: list[dict[str, Any]], whole: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Losses and gradient norms of every rank against one process, in the order of steps. Raises Difference."""
    for rank, result in enumerate(results):
        for step in range(len(whole["losses"])):
            for quantity in ("losses", "grad_norms"):
                found, expected = result[quantity][step], whole[quantity][step]
                off = abs(found / expected - 1)
                if not off <= tolerance:  # what is not a number differs too
                    raise Difference(
                        f"{quantity}[{step}] on rank {rank}: {found} instead of {expected}, off by {off:.1e} "
                        f"(tolerance {tolerance})"
                    )
        if len(result["losses"]) != len(whole["losses"]):
            raise Difference(f"rank {rank} trained {len(result['losses'])} steps instead of {len(whole['losses'])}")


def compare_groups(results: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Multipliers of rate, epsilon and weight decay of every tensor that a rank holds. Raises Difference."""
    for rank, result in enumerate(results):
        for name, group in result["groups"].items():
            if group != whole["groups"][name]:
                raise Difference(f"group of {name} on rank {rank}: {group} instead of {whole['groups'][name]}")


def compare_initial(
    results: list[dict[str, Any]], whole: dict[str, Any], slices: Callable[[str, np.ndarray, int], np.ndarray]
) -> None:
    """Initial values to the last bit. Raises Difference.

    Args:
        results: of every rank.
        whole: of one process.
        slices: from a tensor's name, its whole value and a rank to what that rank must hold, worked out by hand.
    """
    for rank, result in enumerate(results):
        for name, value in result["initial"].items():
            expected = slices(name, whole["initial"][name], rank)
            if not np.array_equal(value, expected):
                raise Difference(f"initial value of {name} on rank {rank}: {value.shape}, {expected.shape} expected")
