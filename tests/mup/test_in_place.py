"""`split_in_place`: which optimizers of others it takes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from mup_megatron import mup
from mup_megatron.mup import MuAdamW
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.mup.optim import other_ratio
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


def test_the_rules_hold_once() -> None:
    """On groups that are µP's they would divide a rate by its ratio again, and the audit compares with the group's."""
    net = bodies.model()
    mixed = MuAdamW([net.fc1.weight], lr=LR)
    mixed.add_param_group({"params": [net.fc2.weight]})
    twice = torch.optim.AdamW(net.parameters(), lr=LR)
    split_in_place(net, twice)
    for optimizer in (mixed, twice, MuAdamW(net.parameters(), lr=LR)):
        before = [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
        with pytest.raises(UserError, match=r"^optimizer: the rates of its group 0 are µP's already"):
            split_in_place(net, optimizer)
        assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == before
    with pytest.raises(UserError, match="µP's already"):
        MuAdamW(twice.param_groups, lr=LR)


def test_without_a_rate() -> None:
    """A group's own is enough."""
    first, *others = bodies.model().parameters()
    with pytest.raises(UserError, match=r"^optimizer: its group 1 has no learning rate; expected lr=\.\.\."):
        MuAdamW([{"params": [first], "lr": LR}, {"params": others}])
    assert MuAdamW([{"params": [first], "lr": LR}, {"params": others, "lr": LR}]).param_groups[0]["lr"] > 0


@pytest.mark.parametrize("split", [False, True])
def test_a_schedule_of_one_rate_for_all_is_told(split: bool, recwarn: pytest.WarningsRecorder) -> None:
    """OneCycleLR sets its `max_lr` in every group; LambdaLR multiplies each, also by zero."""

    def optimizer(net: torch.nn.Module) -> torch.optim.Optimizer:
        if not split:
            return MuAdamW(net.parameters(), lr=LR)
        result = torch.optim.AdamW(net.parameters(), lr=LR)
        split_in_place(net, result)
        return result

    net = bodies.model()
    healthy = optimizer(net)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(healthy, lambda step: step / 2)
    for _ in range(3):
        bodies.train(net, healthy, 1)
        schedule.step()
    assert not [each for each in recwarn if "learning rates" in str(each.message)]
    net = bodies.model()
    torch.optim.lr_scheduler.OneCycleLR(wrong := optimizer(net), max_lr=LR, total_steps=9)
    with pytest.warns(UserWarning, match=r"the learning rates are no longer µP's: a group has .* such as LambdaLR"):
        bodies.train(net, wrong, 1)
    net = bodies.model()
    (stopped := optimizer(net)).param_groups[0]["lr"] = 0.0
    assert "a group has" in (other_ratio(stopped) or "")


def test_a_group_that_is_added_later_is_told() -> None:
    """As torch adds it, it has the base's rate: at eight times the width eight times too much. A µP group is taken."""
    net = bodies.model()
    first, *others = net.parameters()
    optimizer = MuAdamW([first], lr=LR)
    wrong = MuAdamW([first], lr=LR)
    wrong.add_param_group({"params": others})
    with pytest.warns(UserWarning, match="one has no multiplier; .* or a group was added; expected groups as MuAdam"):
        bodies.train(net, wrong, 1)
    for group in MuAdamW(others, lr=LR / 2).param_groups:
        optimizer.add_param_group({**group, "source": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bodies.train(net, optimizer, 1)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    whole = {id(p): group["lr"] for group in MuAdamW(net.parameters(), lr=LR).param_groups for p in group["params"]}
    assert rates == {name: rate if name == id(first) else rate / 2 for name, rate in whole.items()}
    assert len(set(rates.values())) > 2


def test_one_rate_for_groups_of_the_users_own() -> None:
    """A group per tensor tells no ratio between groups, but they had different rates. A rate of 0 erases nothing."""
    net = bodies.model()
    optimizer = torch.optim.AdamW([{"params": [each]} for each in net.parameters()], lr=LR)
    split_in_place(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (0.0, 1.0):
            for group in optimizer.param_groups:
                group["lr"] = factor * LR * group["lr_multiplier"]
            bodies.train(net, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] = LR
    with pytest.warns(UserWarning, match=r"all groups have 0\.01, and their rates differed at the start; a scheduler"):
        bodies.train(net, optimizer, 1)
    assert other_ratio(optimizer) is None  # groups that were given one rate on purpose
    net = bodies.model()
    by_hand = [
        {"params": [each], "lr": LR / group["lr_multiplier"]}
        for group in MuAdamW(net.parameters(), lr=LR).param_groups
        for each in group["params"]
    ]
    optimizer = torch.optim.AdamW(by_hand, lr=LR)
    split_in_place(net, optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {LR}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bodies.train(net, optimizer, 1)


def test_named_parameters_keep_their_names() -> None:
    net = bodies.model()
    wanted = {id(parameter): name for name, parameter in net.named_parameters()}
    split = torch.optim.AdamW(net.named_parameters(), lr=LR)
    split_in_place(net, split)
    for optimizer in (
        split,
        MuAdamW(net.named_parameters(), lr=LR),
        MuAdamW([{"params": net.named_parameters()}], lr=LR),
    ):
        found = [
            pair for group in optimizer.param_groups for pair in zip(group["params"], group["param_names"], strict=True)
        ]
        assert {id(parameter): name for parameter, name in found} == wanted
        assert {group["lr"] for group in optimizer.param_groups} == {LR, LR / 3, LR / 4}


def test_a_schedule_that_was_there_before() -> None:
    """One that is built on the groups afterwards begins at each group's own rate; at the second step it halves all."""
    net = bodies.model(mup)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    split_in_place(net, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert len(set(rates)) > 1
    assert [group["initial_lr"] for group in optimizer.param_groups] == rates
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert [group["lr"] for group in optimizer.param_groups] == rates
    bodies.train(net, optimizer, 1)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [rate / 2 for rate in rates]
    assert other_ratio(optimizer) is None
