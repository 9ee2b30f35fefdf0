"""A point of the plane between the standard parametrization and µP: `parametrization.name: interpolate:INIT,LR`.

Public names: `Plane`, `multipliers_between`, `std_between`, `norm_between`, `softmax_between`, `readout_between`.
(0, 0) is standard, (1, 1) is µP (the plane of the µTransfer blog post). The readout is taken in the form without a
forward multiplier A, in which its init and rate have exponents of their own (Table 8 to Table 3, by abc-symmetry); a
tied one, whose init is the embedding's, takes the init's exponent in its forward multiplier.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple


class Plane(NamedTuple):
    """A point.

    Args:
        init: exponent on µP's multipliers of initial values.
        lr: exponent on µP's multipliers of rates, epsilons, decays, on the growth of the attention scale and on the
            weights of the invariant norm.
    """

    init: float
    lr: float


def multipliers_between(
    plane: Plane, multipliers: tuple[Fraction | float, ...], *, forward: Fraction, is_sgd: bool
) -> tuple[float, ...]:
    """Factors on rate, epsilon and decay of a tensor.

    Args:
        plane: the point.
        multipliers: µP's, of the same three; 0 for what does not learn or decay, and stays so.
        forward: A of the readout; 1 of any other tensor.
        is_sgd: whether a rate of W is worth A², not A.
    """
    of_rate = forward ** (2 if is_sgd else 1)
    worth = (of_rate, 1 / forward, 1 / of_rate)
    return tuple(
        float(each * factor) ** plane.lr if each else 0.0 for each, factor in zip(multipliers, worth, strict=True)
    )


def std_between(plane: Plane, multiplier: float, *, forward: Fraction) -> float:
    """Factor on the standard deviation of initial values, of µP's."""
    return (multiplier * float(forward)) ** plane.init


def norm_between(plane: Plane, weight: Fraction) -> float:
    """Weight of a tensor in the invariant gradient norm, of the one that it has in µP without a forward multiplier."""
    return float(weight) ** plane.lr


def softmax_between(plane: Plane, scale: float, *, head_size: int, base_head_size: int) -> float:
    """The scale of attention logits, of µP's: as 1/sqrt(d), times the growth of sqrt(d) to the rate's exponent."""
    growth = math.sqrt(base_head_size / head_size)
    return scale / growth * growth**plane.lr


def readout_between(plane: Plane, multiplier: float, *, tied: bool) -> float:
    """The readout's forward multiplier, of µP's without α_output."""
    return multiplier**plane.init if tied else 1.0
