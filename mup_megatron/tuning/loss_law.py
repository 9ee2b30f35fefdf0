"""A law of the lowest loss over tokens, steps, width and layers: what is left at any size, and what falls with each.

Public names: `AXES`, `LossLaw`, `fit_loss_law`, `read_loss_law`. Factors are of the first rung of a
ladder: tokens D, sequences a step B, steps D/B, width w, layers l.

    L = floor + width · w^-a + data · D^-b + steps · (D/B)^-s

The floor, the width's and the data's term are the form of Hoffmann et al. (2203.15556, equation 2), the steps' term is
that of Kaplan et al. (2001.08361, equation 1.6). A larger batch takes fewer steps for the same tokens, and costs by
that term alone. Both sources found their forms at scales far from a ladder's: whether they hold here, its test says.
Where layers vary, log2(l) times a number of either sign is added, because in short runs a deeper model may be worse. It
is the first order of whatever the law in depth is, and holds near the rungs alone.
A ladder of too few lengths for these numbers has a product of powers instead: L = constant · B^g · D^-b · w^-a · l^d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AXES = ("batch", "tokens", "width", "layers")
"""What the rungs of a ladder differ in."""

_SIZES_FOR_A_FLOOR = 3
"""A power and a constant beside it need so many different sizes along one axis."""

# Of each number: where the search begins, the least and the most it may be.
_RANGES = {
    "floor": (1.0, 0.0, math.inf),
    "width": (1.0, 0.0, math.inf),
    "width_exponent": (0.3, 0.0, 3.0),
    "data": (1.0, 0.0, math.inf),
    "data_exponent": (0.3, 0.0, 3.0),
    "steps": (0.3, 0.0, math.inf),
    "steps_exponent": (1.0, 0.0, 3.0),
    "layers": (0.0, -math.inf, math.inf),
    "constant": (1.0, 0.0, math.inf),
    **{f"power_of_{axis}": (0.0, -3.0, 3.0) for axis in AXES},
}


@dataclass(frozen=True, kw_only=True)
class LossLaw:
    """The law, with the errors of its numbers.

    Args:
        terms: numbers by name, of those that the ladder determines: of `floor`, `width`, `width_exponent`, `data`,
            `data_exponent`, `steps`, `steps_exponent` and `layers`, or of `constant`, `power_of_batch`,
            `power_of_tokens`, `power_of_width` and `power_of_layers`.
        covariance: of the same, in their order.
        spread: standard deviation of a measured loss about the law (nats).
    """

    terms: Mapping[str, float]
    covariance: Sequence[Sequence[float]]
    spread: float

    def at(self, octaves: Mapping[str, float]) -> tuple[float, float]:
        """The loss there, and the standard error of a new measurement of it (nats).

        Args:
            octaves: log2 of the factors, by axis; an axis that is missing has factor 1.
        """
        factors = _factors(octaves)
        slope = _slopes(self.terms, factors)
        error = math.sqrt(self.spread**2 + float(slope @ np.array(self.covariance) @ slope))
        return _loss(self.terms, factors), error

    def as_json(self) -> dict[str, Any]:
        """Plain data, from which `read_loss_law` makes the same law."""
        errors = [math.sqrt(max(0.0, row[place])) for place, row in enumerate(self.covariance)]
        numbers = {
            name: {"value": value, "error": error}
            for (name, value), error in zip(self.terms.items(), errors, strict=True)
        }
        return {"terms": numbers, "covariance": [list(row) for row in self.covariance], "spread": self.spread}

    def __str__(self) -> str:
        terms = self.terms
        if "constant" in terms:
            powers = [f"{axis}^{terms[f'power_of_{axis}']:+.3f}" for axis in AXES if f"power_of_{axis}" in terms]
            return " · ".join([f"{terms['constant']:.3f}", *powers])
        said = [f"{terms['floor']:.3f}"] if "floor" in terms else []
        if "width" in terms:
            said.append(f"{terms['width']:.3f} · width^-{terms['width_exponent']:.3f}")
        said.append(f"{terms['data']:.3f} · tokens^-{terms['data_exponent']:.3f}")
        if "steps" in terms:
            said.append(f"{terms['steps']:.3f} · (tokens/batch)^-{terms['steps_exponent']:.3f}")
        if "layers" in terms:
            said.append(f"{terms['layers']:.3f} · log2(layers)")
        return " + ".join(said).replace("+ -", "- ")


def read_loss_law(plain: Mapping[str, Any]) -> LossLaw:
    """The law that `LossLaw.as_json` wrote.

    Raises:
        KeyError, TypeError: it is none.
    """
    return LossLaw(
        terms={name: float(number["value"]) for name, number in plain["terms"].items()},
        covariance=[[float(each) for each in row] for row in plain["covariance"]],
        spread=float(plain["spread"]),
    )


def fit_loss_law(points: Sequence[Mapping[str, float]], losses: Sequence[float], noise: float) -> LossLaw:
    """Least squares over the losses.

    Two widths do not tell the floor from the width's term, which then holds both, and falls to nothing at infinite
    width. So beyond the widths of such a ladder the loss is told too low.

    Args:
        points: log2 of the factors, by axis.
        losses: lowest loss of each (nats).
        noise: standard error of one of these, from seeds. The spread about the law is at least that.
    """
    factors, measured = [_factors(point) for point in points], np.array(losses)
    names = _determined(points)

    def residuals(values: Any) -> Any:
        terms = dict(zip(names, values, strict=True))
        return np.array([_loss(terms, each) for each in factors]) - measured

    found = _least(names, residuals, min(losses))
    freedom = len(points) - len(names)
    residual = math.sqrt(2 * found.cost / freedom) if freedom > 0 else 0.0
    spread = max(residual, noise)
    free = found.active_mask == 0  # a number at its bound is taken as known
    covariance = np.zeros((len(names), len(names)))
    covariance[np.ix_(free, free)] = spread**2 * np.linalg.pinv(found.jac[:, free].T @ found.jac[:, free])
    terms = dict(zip(names, found.x.tolist(), strict=True))
    return LossLaw(terms=terms, covariance=covariance.tolist(), spread=spread)


def _least(names: Sequence[str], residuals: Any, lowest: float) -> Any:
    """The best of searches that begin with a small, a middling and a large part of the lowest loss as the constant."""
    from scipy.optimize import least_squares

    start, low, high = (list(each) for each in zip(*(_RANGES[name] for name in names), strict=True))
    searches = []
    for share in (0.01, 0.5, 0.9):
        begin = [share * lowest, *start[1:]]
        searches.append(least_squares(residuals, begin, bounds=(low, high), xtol=1e-14, ftol=1e-14, gtol=1e-14))
    return min(searches, key=lambda each: each.cost)


def _determined(points: Sequence[Mapping[str, float]]) -> list[str]:
    """The numbers that sizes like these can tell, a constant first."""
    sizes = {axis: len({point.get(axis, 0.0) for point in points}) for axis in AXES}
    names = ["width", "width_exponent"] if sizes["width"] > 1 else []
    if not names or sizes["width"] >= _SIZES_FOR_A_FLOOR:
        names.insert(0, "floor")
    names += ["data", "data_exponent"] + (["steps", "steps_exponent"] if sizes["batch"] > 1 else [])
    names += ["layers"] if sizes["layers"] > 1 else []
    if sizes["tokens"] >= _SIZES_FOR_A_FLOOR and len(points) > len(names):
        return names
    return ["constant", *(f"power_of_{axis}" for axis in AXES if sizes[axis] > 1)]


def _factors(octaves: Mapping[str, float]) -> dict[str, float]:
    return {axis: 2.0 ** octaves.get(axis, 0.0) for axis in AXES}


def _loss(terms: Mapping[str, float], factors: Mapping[str, float]) -> float:
    if "constant" in terms:
        powers = (factors[axis] ** terms.get(f"power_of_{axis}", 0.0) for axis in AXES)
        return terms["constant"] * math.prod(powers)
    loss = terms.get("floor", 0.0)
    if "width" in terms:
        loss += terms["width"] * factors["width"] ** -terms["width_exponent"]
    loss += terms["data"] * factors["tokens"] ** -terms["data_exponent"]
    if "steps" in terms:
        loss += terms["steps"] * (factors["tokens"] / factors["batch"]) ** -terms["steps_exponent"]
    if "layers" in terms:
        loss += terms["layers"] * math.log2(factors["layers"])
    return loss


def _slopes(terms: Mapping[str, float], factors: Mapping[str, float]) -> Any:
    """Of the loss there, over the numbers, in their order: central differences."""
    slopes = []
    for name, value in terms.items():
        step = 1e-5 * max(abs(value), 1e-3)
        above, below = _loss({**terms, name: value + step}, factors), _loss({**terms, name: value - step}, factors)
        slopes.append((above - below) / (2 * step))
    return np.array(slopes)
