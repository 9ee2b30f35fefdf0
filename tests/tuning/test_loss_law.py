"""The law of the loss: numbers that were put in come out, its interval holds, and what is not told is not claimed."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from mup_megatron.tuning.loss_law import LossLaw, fit_loss_law, read_loss_law

Point = dict[str, float]
FAR = {"batch": 4.0, "tokens": 6.0, "width": 2.0}


def points(batch: int, tokens: int, width: int) -> list[Point]:
    """A grid of octaves, the tokens two apart."""
    grid = itertools.product(range(batch), range(0, 2 * tokens, 2), range(width))
    return [{"batch": float(b), "tokens": float(d), "width": float(w)} for b, d, w in grid]


def loss(point: Point) -> float:
    """1.5 + 0.8 · width^-0.4 + 2.5 · tokens^-0.25 + 0.4 · (tokens / batch)^-1.2, written out."""
    batch, tokens, width = (2.0 ** point[axis] for axis in ("batch", "tokens", "width"))
    return 1.5 + 0.8 / width**0.4 + 2.5 / tokens**0.25 + 0.4 * (batch / tokens) ** 1.2


def fitted(grid: list[Point], scatter: float = 0.0, seed: int = 1) -> LossLaw:
    generator = random.Random(seed)
    return fit_loss_law(grid, [loss(point) + generator.gauss(0, scatter) for point in grid], noise=0.0)


def test_numbers_that_were_put_in_come_out() -> None:
    law = fitted(points(4, 3, 3))
    assert dict(law.terms) == pytest.approx(
        {
            "floor": 1.5,
            "width": 0.8,
            "width_exponent": 0.4,
            "data": 2.5,
            "data_exponent": 0.25,
            "steps": 0.4,
            "steps_exponent": 1.2,
        },
        rel=1e-5,
    )
    assert law.at(FAR)[0] == pytest.approx(loss(FAR), rel=1e-6)
    assert law.at({})[0] == pytest.approx(1.5 + 0.8 + 2.5 + 0.4)


def test_two_widths_do_not_tell_the_floor() -> None:
    """On the widths that were measured the law is right; on a wider one the width's term falls on, so it is low."""
    law = fitted(points(4, 3, 2))
    assert "floor" not in law.terms
    assert law.terms["width"] == pytest.approx(2.3)  # 1.5 + 0.8
    assert law.at(FAR | {"width": 1.0})[0] == pytest.approx(loss(FAR | {"width": 1.0}), rel=1e-6)
    assert law.at(FAR | {"width": 6.0})[0] < loss(FAR | {"width": 6.0}) - 0.1


def test_layers_add_their_logarithm() -> None:
    """0.03 nats more per doubling of the layers are found as such, and as a power where lengths are too few."""
    grid = [{**point, "layers": float(depth)} for point in points(4, 3, 3) for depth in range(3)]
    law = fit_loss_law(grid, [loss(point) + 0.03 * point["layers"] for point in grid], noise=0.0)
    assert law.terms["layers"] == pytest.approx(0.03, rel=1e-5)
    assert law.terms["floor"] == pytest.approx(1.5, rel=1e-5)
    assert law.at(FAR | {"layers": 4.0})[0] == pytest.approx(loss(FAR) + 0.12, rel=1e-6)
    assert str(law).endswith(" + 0.030 · log2(layers)")
    falls = fit_loss_law(grid, [loss(point) - 0.03 * point["layers"] for point in grid], noise=0.0)
    assert str(falls).endswith(" - 0.030 · log2(layers)")
    few = [{**point, "layers": float(depth)} for point in points(3, 2, 1) for depth in range(2)]
    powers = fit_loss_law(few, [loss(point) * 2 ** (0.1 * point["layers"]) for point in few], noise=0.0)
    assert powers.terms["power_of_layers"] == pytest.approx(0.1, abs=1e-3)


def test_two_lengths_make_a_product_of_powers() -> None:
    """Then a target of many more tokens is told too low: a product of powers knows no floor."""
    law = fitted(points(3, 2, 1))
    assert list(law.terms) == ["constant", "power_of_batch", "power_of_tokens"]
    far = {"batch": 0.0, "tokens": 14.0, "width": 0.0}
    assert law.at(far)[0] < loss(far) - 0.2
    assert fitted(points(3, 3, 1)).at(far)[0] == pytest.approx(loss(far), rel=1e-5)


def test_the_interval_holds_a_new_measurement() -> None:
    """Of 100 ladders with noise, a new measurement beyond lies within two standard errors as often as it should."""
    within, generator = 0, random.Random(7)
    for seed in range(100):
        expected, error = fitted(points(4, 3, 2), 0.01, seed).at({"batch": 3.0, "tokens": 6.0, "width": 1.0})
        measured = loss({"batch": 3.0, "tokens": 6.0, "width": 1.0}) + generator.gauss(0, 0.01)
        within += abs(measured - expected) < 2 * error
    assert 88 <= within <= 99  # Student's t with 19 degrees of freedom: 94 of 100


def test_noise_of_seeds_is_the_least_error() -> None:
    grid = points(4, 3, 1)
    sure, unsure = (fit_loss_law(grid, [loss(point) for point in grid], noise=noise) for noise in (0.0, 0.05))
    assert sure.at(FAR)[1] < 1e-6
    assert unsure.at({})[1] > 0.05


def test_a_term_that_has_no_part_does_no_harm() -> None:
    """Where batch has no part, the steps' numbers are not determined; the loss and its interval are."""
    grid = points(3, 3, 1)
    law = fit_loss_law(grid, [2 + 2.0 ** (-0.2 * point["tokens"]) for point in grid], noise=0.01)
    assert law.at(FAR)[0] == pytest.approx(2 + 2.0**-1.2, abs=1e-3)
    assert 0.01 < law.at(FAR)[1] < 1.0


def test_the_law_goes_through_json() -> None:
    law = fitted(points(4, 3, 3), 0.01)
    again = read_loss_law(json.loads(json.dumps(law.as_json())))
    assert again.at(FAR) == pytest.approx(law.at(FAR))
    assert str(again) == str(law)
    assert str(law).count(" + ") == 3  # floor, width's, data's, steps'
    with pytest.raises(KeyError):
        read_loss_law({"constant": 1.0, "spread": 0.1})


def test_errors_of_the_numbers_are_theirs() -> None:
    """By hand: of y = c · x^p at x = 1 and 2, twice each, c's error is that of a mean of two."""
    grid = [{"batch": 0.0, "tokens": octave, "width": 0.0} for octave in (0.0, 0.0, 1.0, 1.0)]
    law = fit_loss_law(grid, [4.0, 4.2, 3.0, 3.2], noise=0.0)
    spread = math.sqrt(4 * 0.1**2 / 2)
    assert law.spread == pytest.approx(spread)
    assert law.as_json()["terms"]["constant"] == pytest.approx({"value": 4.1, "error": spread / math.sqrt(2)}, rel=1e-5)
