"""Which power of two a tensor is stored over where weights are kept at a standard deviation near 1.

Public name: `unit_scale`. docs/parametrization.md, section 11, says what follows from it for rate, epsilon, decay and
the gradient norm (`TensorHyperparameters.stored_over`); model/layers/unit_scaling.py multiplies it back in.
"""

from __future__ import annotations

import math
from fractions import Fraction

from mup_megatron.rules import formulas
from mup_megatron.rules.shapes import Init
from mup_megatron.rules.table import TensorHyperparameters

_OTHERS = (".router.weight", ".gate_weight")
"""Ends of names of matrices that no layer of megatron-core's multiplies with: the router and the shared experts' gate
compute by themselves."""


def unit_scale(tensor: TensorHyperparameters) -> Fraction:
    """θ: the standard deviation of a tensor's initial values, rounded to a power of two; of all its blocks together.

    1 for what starts at a constant, for what has one dimension, and for routers, gates and relative positions.
    """
    spec, fan_outs = tensor.shape.spec, tensor.shape.fan_outs
    if len(spec.shape) < 2 or spec.init is Init.RELATIVE_BIAS or tensor.shape.name.endswith(_OTHERS):
        return formulas.ONE
    squares = sum(fan_outs[block].dim * std**2 for block, std in tensor.init_std.items())
    if not squares:
        return formulas.ONE
    mean = squares / sum(dim.dim for dim in fan_outs.values())
    return Fraction(2) ** round(math.log2(mean) / 2)
