"""Faults of a plain model's optimizer or readout that an audit must name (tests/mup/, tests/deepspeed/)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tests.helpers.torch_bodies import LR


class PlainFault(NamedTuple):
    """One fault.

    Args:
        named: tensor, or module, and quantity that must be named.
        plant: what is done to the model and to the optimizer, whose groups have one tensor each.
    """

    named: frozenset[tuple[str, str]]
    plant: Callable[[Any, Any], None]


def one_group_each(net: Any, optimizer: Any) -> None:
    """Takes the groups apart: one per tensor, which says whose it is; nothing else changes."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    optimizer.param_groups[:] = [
        {**group, "params": [parameter], "tensor": names[id(parameter)]}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def group_of(optimizer: Any, name: str) -> Any:
    """The group of a tensor, whatever the optimizer made of its parameter."""
    (group,) = [group for group in optimizer.param_groups if group["tensor"] == name]
    return group


TENSORS = (
    "embedding.weight",
    *(f"{layer}.{kind}" for layer in ("fc1", "fc2", "norm", "readout") for kind in ("weight", "bias")),
)
WIDENING = ("fc1.weight", "fc2.weight")
"""Whose rates are not the base's."""


def times(name: str, key: str, factor: float) -> Callable[[Any, Any], None]:
    """Another value in one tensor's group."""

    def plant(net: Any, optimizer: Any) -> None:
        group_of(optimizer, name)[key] *= factor

    return plant


def exchanged(one: str, other: str) -> Callable[[Any, Any], None]:
    """Two tensors in each other's groups."""

    def plant(net: Any, optimizer: Any) -> None:
        groups = [group_of(optimizer, name) for name in (one, other)]
        values = [{key: group[key] for key in ("lr", "eps", "weight_decay")} for group in groups]
        groups[0].update(values[1])
        groups[1].update(values[0])

    return plant


def everywhere(**values: Any) -> Callable[[Any, Any], None]:
    """Keys of every group."""

    def plant(net: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return plant


def rate_of_its_own(net: Any, optimizer: Any) -> None:
    """A step that takes the base's rate, whatever its groups say."""

    class Stepping(type(optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = LR
            unhooked = getattr(super().step, "__wrapped__", None)
            unhooked(self) if unhooked else super().step()
            for group, own in zip(self.param_groups, rates, strict=True):
                group["lr"] = own

    Stepping.__name__ = type(optimizer).__name__  # the audit knows optimizers by name
    optimizer.__class__ = Stepping
    optimizer._patch_step_function()


def without_multiplier(net: Any, optimizer: Any) -> None:
    """A readout that lost its multiplier."""
    readout = net.readout
    readout.forward = lambda x: nn.functional.linear(x, readout.weight, readout.bias)


def divided_twice(net: Any, optimizer: Any) -> None:
    """A readout that takes the width twice."""
    readout = net.readout
    forward = readout.forward
    readout.forward = lambda x: forward(x / readout.width_mult())


_OF_GROUPS = {
    "twice the rate": ("lr", 2.0, "learning rate"),
    "a rate 1 % off": ("lr", 1.01, "learning rate"),
    "another epsilon": ("eps", 4.0, "epsilon"),
    "half the decay": ("weight_decay", 0.5, "weight decay"),
}
_RATES = frozenset((name, "learning rate") for name in WIDENING)
_UPDATES = frozenset((name, "update over the table's") for name in WIDENING)
FAULTS = {
    **{
        f"{name}: {fault}": PlainFault(frozenset({(name, quantity)}), times(name, key, factor))
        for fault, (key, factor, quantity) in _OF_GROUPS.items()
        for name in TENSORS
    },
    "two tensors in each other's groups": PlainFault(
        frozenset({("embedding.weight", "learning rate"), ("fc1.weight", "learning rate")}),
        exchanged("embedding.weight", "fc1.weight"),
    ),
    "one rate for all": PlainFault(_RATES, everywhere(lr=LR)),
    "decay in the gradient": PlainFault(
        frozenset((name, "update over the table's") for name in TENSORS if name != "norm.bias"),  # which is 0
        everywhere(decoupled_weight_decay=False),
    ),
    "a step that has a rate of its own": PlainFault(_UPDATES, rate_of_its_own),
    "a readout without a multiplier": PlainFault(frozenset({("readout", "readout multiplier")}), without_multiplier),
    "a readout that divides twice": PlainFault(frozenset({("readout", "readout multiplier")}), divided_twice),
}
