"""What the audit recomputes of one tensor's step, and what it says of what it cannot."""

from __future__ import annotations

import torch

from mup_megatron.audit.findings import Audit
from mup_megatron.audit.update import WEIGHT, expected_update
from mup_megatron.engines.setup import resolve
from mup_megatron.rules.table import TensorHyperparameters
from tests.helpers.configs import MIXED, make

FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
FIRST, SECOND = 0.9, 0.99


def lion_row() -> TensorHyperparameters:
    config = make(MIXED, optimizer__name="lion", hparams__weight_decay=0.0)
    return resolve(config, 1).parametrization(256).tensors[FC2]


def moved(row: TensorHyperparameters, gradient: torch.Tensor, average: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By Algorithm 2 of Chen et al. (arXiv 2302.06675) in float32, without decay; and as the audit recomputes it."""
    update = -row.lr * (FIRST * average + (1 - FIRST) * gradient).sign()
    after = {WEIGHT: update.double(), "exp_avg": (SECOND * average + (1 - SECOND) * gradient).double()}
    before = {WEIGHT: torch.zeros_like(gradient).double(), "exp_avg": average.double()}
    again = expected_update(
        "lion", before, after, lr=row.lr, eps=0.0, decay=row.weight_decay, betas=(FIRST, SECOND), updates=9
    )
    assert again is not None
    return after[WEIGHT], again


def test_lions_sign_of_nothing_is_not_told() -> None:
    """Gradients that cancel the average to the last bits of float32; signs of others are all told."""
    row, generator = lion_row(), torch.Generator().manual_seed(3)
    average, noise = (torch.randn(1_000_000, generator=generator) for _ in range(2))
    found, expected = moved(row, -FIRST / (1 - FIRST) * average * (1 + 1e-5 * noise), average)
    told = ~expected.isnan()
    assert (found - expected)[told].abs().max() < 1e-6 * row.lr
    assert 0.5 < told.float().mean() < 1

    found, expected = moved(row, noise, average)
    told = ~expected.isnan()
    assert torch.equal(found[told].float(), expected[told].float())
    assert told.float().mean() > 0.9999
    assert (2 * found - expected)[told].abs().min() > 0.99 * row.lr  # twice the rate: every element


def test_no_gradient_is_a_sign_of_0() -> None:
    _, expected = moved(lion_row(), torch.zeros(4), torch.zeros(4))
    assert torch.equal(expected, torch.zeros(4, dtype=torch.float64))


def test_the_line_says_what_was_not_seen() -> None:
    assert Audit(unseen=["update of a"]).line == "audit: 0 tensors, 0 right (1 not seen)"
