"""The multiplier on a residual branch's output: α_residual times the depth factor.

It is applied in the bias-dropout-add of the layer spec, a public part of it; scaling the branch's last weight instead
would change that weight's own parametrization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add


def scaled_bias_dropout_add(multiplier: float) -> Callable[[bool, bool], Callable[..., Any]]:
    """megatron-core's `get_bias_dropout_add` for a branch whose output and bias are multiplied first.

    Args:
        multiplier: on (x + bias), before it is added to the residual; both are [s, b, h].
    """
    return get_bias_dropout_add if multiplier == 1.0 else scaled_branch(get_bias_dropout_add, multiplier)


def scaled_branch(get_add: Callable[[bool, bool], Callable[..., Any]], multiplier: float) -> Callable[..., Any]:
    """What adds a branch to the residual stream, with the branch's output and bias multiplied first.

    Args:
        get_add: megatron-core's `get_bias_dropout_add`, or a function of its kind.
        multiplier: on (x + bias); both are [s, b, h].
    """

    def get_scaled_add(training: bool, fused: bool) -> Callable[..., Any]:
        add = get_add(training, fused)

        def scaled(x_with_bias: Any, residual: Any, prob: float) -> Any:
            output, bias = x_with_bias
            scaled_bias = None if bias is None else bias * multiplier
            return add((output * multiplier, scaled_bias), residual, prob)

        return scaled

    return get_scaled_add
