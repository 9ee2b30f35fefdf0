"""Minima of loss curves: parabolas with known vertices, edges, divergence, noise."""

from __future__ import annotations

import math
import random

import pytest

from mup_megatron.proof.optimum import (
    Curve,
    drift,
    minimum,
    pooled_noise,
    transfer_cost,
    wider_is_worse,
)

VALUES = [2.0**power for power in range(-12, -3)]


def parabola(
    vertex: float, floor: float = 3.0, bend: float = 0.05, *, noise: float = 0.0, seeds: int = 3, drawn: int = 0
) -> Curve:
    """A curve over VALUES whose least point lies at 2^vertex."""
    draw = random.Random(drawn)
    return Curve(
        values=VALUES,
        losses=[
            {seed: floor + bend * (math.log2(value) - vertex) ** 2 + draw.gauss(0, noise) for seed in range(seeds)}
            for value in VALUES
        ],
    )


@pytest.mark.parametrize("vertex", [-8.0, -7.7, -10.49, -5.2])
def test_a_parabola_has_its_vertex(vertex: float) -> None:
    found = minimum(parabola(vertex))
    assert found.value is not None
    assert math.log2(found.value) == pytest.approx(vertex, abs=1e-9)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.tried == 2.0 ** round(vertex)
    assert found.edge is None


@pytest.mark.parametrize(("vertex", "edge"), [(-13.0, "low"), (-2.0, "high")])
def test_an_edge_is_no_minimum(vertex: float, edge: str) -> None:
    found = minimum(parabola(vertex))
    assert (found.value, found.edge) == (None, edge)
    assert drift(found, minimum(parabola(-8.0))) is None


def test_a_diverged_neighbor_leaves_the_tried_value() -> None:
    curve = parabola(-8.0)
    losses = [*curve.losses[:5], {**curve.losses[5], 1: math.inf}, *curve.losses[6:]]
    found = minimum(Curve(values=VALUES, losses=losses))
    assert (found.tried, found.value, found.edge) == (2.0**-8, None, None)


def test_the_error_is_that_of_repeated_experiments() -> None:
    """Over many draws the vertex scatters as much as its error says, within a factor of two."""
    found = []
    for drawn in range(200):
        draw = minimum(parabola(-8.0, noise=0.005, drawn=drawn))
        assert draw.value is not None
        assert draw.error is not None
        found.append((math.log2(draw.value) + 8, draw.error))
    scatter = math.sqrt(sum(off**2 for off, _ in found) / len(found))
    said = math.sqrt(sum(error**2 for _, error in found) / len(found))
    assert 0.5 < said / scatter < 2


def test_drift_and_its_sign() -> None:
    octaves, error = drift(minimum(parabola(-9.0)), minimum(parabola(-7.5))) or (0, 0)
    assert octaves == pytest.approx(1.5)
    assert error == pytest.approx(0, abs=1e-9)


def test_cost_of_the_smaller_size_s_value() -> None:
    small, large = parabola(-9.0), parabola(-7.0, floor=2.0)
    assert transfer_cost(small, small) == 0
    assert transfer_cost(small, large) == pytest.approx(0.05 * 4 / 2.0)
    diverged = Curve(values=VALUES, losses=[{0: math.inf} if v == 2.0**-9 else {0: 2.0} for v in VALUES])
    assert transfer_cost(small, diverged) == math.inf


def test_names_have_no_drift_but_a_cost() -> None:
    small = Curve(values=["linear", "cosine"], losses=[{0: 3.0, 1: 3.1}, {0: 3.2, 1: 3.3}])
    large = Curve(values=["linear", "cosine"], losses=[{0: 2.2}, {0: 2.0}])
    assert (minimum(small).tried, minimum(small).value, minimum(small).edge) == ("linear", None, None)
    assert drift(minimum(small), minimum(large)) is None
    assert transfer_cost(small, large) == pytest.approx(0.1)


def test_noise_is_pooled_near_the_minimum() -> None:
    assert pooled_noise([parabola(-8.0, noise=0.01, seeds=50)]) == pytest.approx(0.01, rel=0.2)
    assert pooled_noise([parabola(-8.0, seeds=1)]) is None


def test_wider_is_worse_only_beyond_noise() -> None:
    small, large = parabola(-8.0), parabola(-8.5, floor=2.99)
    assert wider_is_worse(small, large, None) == [v for v in VALUES if math.log2(v) >= -8]
    assert wider_is_worse(small, large, 10.0) == []
