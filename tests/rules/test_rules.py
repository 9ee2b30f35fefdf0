"""The rule table, against numbers worked out by hand from docs/parametrization.md, section 2."""

from __future__ import annotations

import math
from fractions import Fraction as F

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mup_megatron.rules import formulas

sizes = st.integers(min_value=1, max_value=1 << 20)


def test_input_like() -> None:
    """Embedding, position, gain, bias at 8x width: m_in 1, m_out 8."""
    assert formulas.init_std(m_in=F(1)) == 1
    assert formulas.learning_rate("adam", m_in=F(1), m_out=F(8)) == 1
    assert formulas.learning_rate("sgd", m_in=F(1), m_out=F(8)) == 8
    assert formulas.epsilon(m_out=F(8)) == F(1, 8)


def test_hidden() -> None:
    """fc1 at 4x hidden and 9x FFN: fan-in 4, fan-out 9."""
    assert formulas.init_std(m_in=F(4)) == 0.5
    assert formulas.learning_rate("adam", m_in=F(4), m_out=F(9)) == F(1, 4)
    assert formulas.learning_rate("sgd", m_in=F(4), m_out=F(9)) == F(9, 4)
    assert formulas.learning_rate("muon", m_in=F(4), m_out=F(9)) == 1.5
    assert formulas.learning_rate("soap", m_in=F(4), m_out=F(9)) == 1.5
    assert formulas.epsilon(m_out=F(9)) == F(1, 9)
    assert formulas.basis_epsilon(m_in=F(4), m_out=F(9)) == pytest.approx(2 / 3)


def test_output_like_without_a_multiplier() -> None:
    """Router, K and V with fixed KV heads at 16x width: m_in 16, fan-out fixed."""
    assert formulas.is_output_like(True, False, "output_like")
    assert formulas.init_std(m_in=F(16), output_like=True) == 1 / 16
    assert formulas.learning_rate("adam", m_in=F(16), m_out=F(1)) == F(1, 16)
    assert formulas.learning_rate("sgd", m_in=F(16), m_out=F(1)) == F(1, 16)
    assert formulas.epsilon(m_out=F(1)) == 1


def test_hidden_like_leaves_g_out() -> None:
    assert not formulas.is_output_like(True, False, "hidden_like")
    assert formulas.init_std(m_in=F(16), output_like=False) == 1 / 4


def test_readout_in_the_form_of_table_8() -> None:
    """A = 1/m_in at 16x width: constant init and Adam rate, SGD rate times 16, epsilon a 16th."""
    forward = formulas.readout_multiplier(F(16))
    assert forward == F(1, 16)
    assert formulas.init_std(m_in=F(16), forward=forward, output_like=True) == 1
    assert formulas.learning_rate("adam", m_in=F(16), m_out=F(1), forward=forward) == 1
    assert formulas.learning_rate("sgd", m_in=F(16), m_out=F(1), forward=forward) == 16
    assert formulas.epsilon(m_out=F(1), forward=forward) == F(1, 16)
    assert formulas.gradient_norm(m_in=F(16), m_out=F(1), forward=forward) == 16


def test_a_growing_dimension_of_ratio_one_is_not_a_fixed_one() -> None:
    assert formulas.is_output_like(True, False, "output_like")
    assert not formulas.is_output_like(True, True, "output_like")
    assert not formulas.is_output_like(False, False, "output_like")


def test_narrower_than_the_base() -> None:
    """A quarter of the base width: everything the other way round."""
    assert formulas.init_std(m_in=F(1, 4)) == 2
    assert formulas.learning_rate("adam", m_in=F(1, 4), m_out=F(1, 4)) == 4
    assert formulas.epsilon(m_out=F(1, 4)) == 4


def test_weight_decay() -> None:
    assert formulas.weight_decay("independent", F(1, 4)) == 4
    assert formulas.weight_decay("coupled", F(1, 4)) == 1
    assert formulas.weight_decay("sqrt", F(1, 4)) == 2


def test_softmax_scale() -> None:
    assert formulas.softmax_scale(64, 64) == 1 / 8
    assert formulas.softmax_scale(64, 16) == 1 / 16  # 1/sqrt(64) · sqrt(16/64)
    assert formulas.softmax_scale(64, 16, attention_multiplier=3.0) == 3 / 16
    assert formulas.softmax_scale(16, 64) == 1 / 2


@given(sizes)
def test_softmax_scale_at_the_base_is_upstreams_to_the_last_bit(head_size: int) -> None:
    assert formulas.softmax_scale(head_size, head_size) == 1.0 / math.sqrt(head_size)


def test_depth() -> None:
    """Four times the base depth."""
    complete_p = formulas.depth_factors("adam", F(4), 1.0)
    assert (complete_p.branch, complete_p.lr, complete_p.eps) == (0.25, 1.0, 0.25)
    depth_mup = formulas.depth_factors("adam", F(4), 0.5)
    assert (depth_mup.branch, depth_mup.lr, depth_mup.eps) == (0.5, 0.5, 0.5)
    assert formulas.depth_factors("sgd", F(4), 1.0).lr == 4.0
    assert formulas.depth_factors("sgd", F(4), 0.5).lr == 1.0
    assert formulas.depth_factors("adam", F(4), None) == formulas.DepthFactors()


def test_depth_of_a_table_that_all_layers_share() -> None:
    """Four times the base depth: the gradient is four layers' sum, 4 · 4^-α."""
    complete_p = formulas.shared_depth_factors("adam", F(4), 1.0)
    assert (complete_p.lr, complete_p.eps) == (1.0, 1.0)
    depth_mup = formulas.shared_depth_factors("adam", F(4), 0.5)
    assert (depth_mup.lr, depth_mup.eps) == (0.5, 2.0)
    assert formulas.shared_depth_factors("sgd", F(4), 1.0).lr == 1.0
    assert formulas.shared_depth_factors("sgd", F(4), 0.5).lr == 0.25
    assert formulas.shared_depth_factors("adam", F(4), None) == formulas.DepthFactors()


@given(sizes, sizes, sizes, sizes, sizes)
def test_base_change(base: int, middle: int, target: int, base_out: int, target_out: int) -> None:
    """Base → A → B equals base → B, exactly, narrower targets included (section 7.3)."""
    outs = F(target_out, base_out)
    for rule in ("adam", "sgd"):
        first = formulas.learning_rate(rule, m_in=F(middle, base), m_out=F(1))
        second = formulas.learning_rate(rule, m_in=F(target, middle), m_out=outs)
        assert first * second == formulas.learning_rate(rule, m_in=F(target, base), m_out=outs)
    assert formulas.epsilon(m_out=F(middle, base)) * formulas.epsilon(m_out=F(target, middle)) == formulas.epsilon(
        m_out=F(target, base)
    )
    assert formulas.readout_multiplier(F(middle, base)) * formulas.readout_multiplier(
        F(target, middle)
    ) == formulas.readout_multiplier(F(target, base))
    product = formulas.init_std(m_in=F(middle, base)) * formulas.init_std(m_in=F(target, middle))
    assert product == pytest.approx(formulas.init_std(m_in=F(target, base)), rel=1e-12)


@given(sizes, sizes, sizes, st.integers(-20, 20))
def test_abc_symmetry(m_in: int, m_out: int, divisor: int, power: int) -> None:
    """(A, init, rate, eps) → (Aθ, init/θ, rate/θ, eps·θ) for Adam, rate/θ² for SGD (section 7.3)."""
    theta = F(2) ** power
    m = {"m_in": F(m_in, divisor), "m_out": F(m_out, divisor)}
    for forward in (F(1), formulas.readout_multiplier(m["m_in"])):
        scaled = forward * theta
        assert (
            formulas.learning_rate("adam", **m, forward=scaled)
            == formulas.learning_rate("adam", **m, forward=forward) / theta
        )
        assert formulas.learning_rate("sgd", **m, forward=scaled) == formulas.learning_rate(
            "sgd", **m, forward=forward
        ) / (theta**2)
        assert (
            formulas.epsilon(m_out=m["m_out"], forward=scaled)
            == formulas.epsilon(m_out=m["m_out"], forward=forward) * theta
        )
        assert formulas.init_std(m_in=m["m_in"], forward=scaled) == pytest.approx(
            formulas.init_std(m_in=m["m_in"], forward=forward) / float(theta), rel=1e-12
        )
        lr = formulas.learning_rate("adam", **m, forward=forward)
        assert formulas.weight_decay("independent", lr / theta) == formulas.weight_decay("independent", lr) * theta


@given(sizes)
def test_at_the_base_every_multiplier_is_exactly_one(size: int) -> None:
    m = F(size, size)
    forward = formulas.readout_multiplier(m)
    assert formulas.basis_epsilon(m_in=m, m_out=m) == 1
    for rule in ("adam", "sgd", "muon", "soap"):
        assert formulas.learning_rate(rule, m_in=m, m_out=m, forward=forward) == 1
    assert formulas.init_std(m_in=m, forward=forward, output_like=True) == 1.0
    assert formulas.epsilon(m_out=m, forward=forward) == 1
    assert formulas.depth_factors("adam", m, 1.0) == formulas.DepthFactors()
