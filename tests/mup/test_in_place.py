"""`split_in_place`: which optimizers of others it takes."""

from __future__ import annotations

import pytest
import torch

from mup_megatron.mup.in_place import split_in_place
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.helpers.torch_bodies import LR


def test_an_optimizer_that_makes_its_state_first() -> None:
    """torch's Adagrad; what it starts to sum from would count as an epsilon that no rule scales."""
    net = bodies.model()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=LR)
    split_in_place(net, optimizer)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(net.fc1.weight)] == pytest.approx(LR / 4)
    bodies.train(net, optimizer, 1)
    net = bodies.model()
    optimizer = torch.optim.Adagrad(net.parameters(), lr=LR)
    bodies.train(net, optimizer, 1)
    with pytest.raises(UserError, match=r"^optimizer: Adagrad has state already"):
        split_in_place(net, optimizer)
    with pytest.raises(UserError, match=r"^optimizer: initial_accumulator_value of Adagrad: .* expected 0"):
        split_in_place(net, torch.optim.Adagrad(net.parameters(), lr=LR, initial_accumulator_value=0.1))
