"""Laws of a ladder: how they are fitted, and how far a measurement may lie from them.

Public names: `Law`, `fit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mup_megatron.tuning.loss_law import AXES


@dataclass(frozen=True, kw_only=True)
class Law:
    """A value's logarithm, linear in those of the factors: log2 y = constant + sum of slope · log2 factor.

    Args:
        names: of the factors that vary.
        coefficients: the constant, then the slopes.
        errors: standard errors of the same.
        covariance: of the same.
        spread: standard deviation about the law.
    """

    names: Sequence[str]
    coefficients: Sequence[float]
    errors: Sequence[float]
    covariance: Any
    spread: float

    def at(self, octaves: Mapping[str, float]) -> tuple[float, float]:
        """log2 of the value there, and the standard error of a new measurement of it."""
        row = np.array([1.0, *(octaves[name] for name in self.names)])
        return float(row @ np.array(self.coefficients)), math.sqrt(self.spread**2 + float(row @ self.covariance @ row))

    def as_json(self) -> dict[str, Any]:
        """Slopes and errors by name."""
        slopes = dict(zip(self.names, zip(self.coefficients[1:], self.errors[1:], strict=True), strict=True))
        return {
            "constant": self.coefficients[0],
            "spread": self.spread,
            **{name: {"exponent": slope, "error": error} for name, (slope, error) in slopes.items()},
        }


def fit(points: Sequence[Mapping[str, float]], values: Sequence[float], noise: float) -> Law:
    """Least squares.

    Args:
        points: log2 of the factors, by name; a name whose values are all equal is left out.
        values: log2 of what is fitted.
        noise: standard error of one of these, from seeds. The spread about the law is at least that.
    """
    names = [name for name in AXES if len({point.get(name, 0.0) for point in points}) > 1]
    rows = np.array([[1.0, *(point[name] for name in names)] for point in points])
    found = np.linalg.lstsq(rows, np.array(values), rcond=None)[0]
    freedom = len(points) - rows.shape[1]
    residual = math.sqrt(float(((rows @ found - values) ** 2).sum()) / freedom) if freedom > 0 else 0.0
    spread = max(residual, noise)
    covariance = spread**2 * np.linalg.inv(rows.T @ rows)
    errors = [math.sqrt(each) for each in covariance.diagonal()]
    return Law(names=names, coefficients=found.tolist(), errors=errors, covariance=covariance, spread=spread)
