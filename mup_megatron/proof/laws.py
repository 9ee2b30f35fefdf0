"""Laws of a ladder: how they are fitted, and how far a measurement may lie from them.

Public names: `Law`, `determined`, `fit`, `bends`.
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


def determined(points: Sequence[Mapping[str, float]], names: Sequence[str]) -> bool:
    """Whether points determine a constant, a slope over each of `names`, and the spread about them."""
    return _determined(_rows(points, names))


def fit(points: Sequence[Mapping[str, float]], values: Sequence[float], noise: float) -> Law:
    """Least squares.

    Args:
        points: log2 of the factors, by name; a name whose values are all equal is left out.
        values: log2 of what is fitted.
        noise: standard error of one of these, from seeds. The spread about the law is at least that.
    """
    names = _varying(points)
    rows = _rows(points, names)
    found, covariance, spread = _least_squares(rows, values, noise)
    errors = [math.sqrt(each) for each in covariance.diagonal()]
    return Law(names=names, coefficients=found.tolist(), errors=errors, covariance=covariance, spread=spread)


def bends(points: Sequence[Mapping[str, float]], values: Sequence[float], noise: float) -> dict[str, dict[str, Any]]:
    """How far the law is from a straight one, over each factor that has three sizes or more.

    Of the best rate 2606.29158 found that it bends upward over model size, and less over tokens: far beyond what was
    measured, a straight law then says too low a rate.

    Args:
        points: as of `fit`.
        values: as of `fit`.
        noise: as of `fit`.

    Returns:
        By name, `octaves`: of the value per squared octave of the factor, fitted beside all slopes; `error`: its
        standard error; and `told`: whether it is more than two of these. Without a point to spare, nothing.
    """
    names, found = _varying(points), {}
    for name in names:
        rows = np.column_stack([_rows(points, names), [point[name] ** 2 for point in points]])
        if not _determined(rows):  # a bend needs three sizes
            continue
        coefficients, covariance, _ = _least_squares(rows, values, noise)
        octaves, error = float(coefficients[-1]), math.sqrt(covariance[-1, -1])
        found[name] = {"octaves": octaves, "error": error, "told": abs(octaves) > 2 * error}
    return found


def _rows(points: Sequence[Mapping[str, float]], names: Sequence[str]) -> Any:
    """One point a row: 1 for the constant, then what goes with each slope."""
    rows = [[1.0, *(point[name] for name in names)] for point in points]
    return np.array(rows).reshape(len(points), 1 + len(names))


def _determined(rows: Any) -> bool:
    return len(rows) > rows.shape[1] and bool(np.linalg.matrix_rank(rows) == rows.shape[1])


def _varying(points: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in AXES if len({point.get(name, 0.0) for point in points}) > 1]


def _least_squares(rows: Any, values: Sequence[float], noise: float) -> tuple[Any, Any, float]:
    """Coefficients, their covariance, and the spread about them."""
    found = np.linalg.lstsq(rows, np.array(values), rcond=None)[0]
    freedom = len(rows) - rows.shape[1]
    residual = math.sqrt(float(((rows @ found - values) ** 2).sum()) / freedom) if freedom > 0 else 0.0
    spread = max(residual, noise)
    return found, spread**2 * np.linalg.inv(rows.T @ rows), spread
