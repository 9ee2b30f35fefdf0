"""What the groups of a plain torch model's optimizer should hold, and what they hold.

Public names: `Group`, `NAMES`, `AGREES`, `expected_values`, `compared`, `decay_of`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from mup_megatron.audit.findings import Finding
from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.mup.in_place import rule_of
from mup_megatron.mup.optim import MULTIPLIER, SCALES_EPS, SOURCE
from mup_megatron.rules import formulas

Group = Mapping[str, Any]
Held = Mapping[str, tuple[torch.nn.Parameter, Group]]
"""By name of a tensor, the tensor and the one group that holds it."""

AGREES = 1e-6
"""Relative, of what a group holds."""
NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "eps": "epsilon"}


def expected_values(held: Held, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """What each tensor's group should hold: its multiplier times the base value, each source's own.

    A base value is the optimizer's default where any group agrees with that, as a schedule moves rates alone; otherwise
    the one that the middle tensor has.
    """
    rows = _rows(held, optimizer)
    expected: dict[str, dict[str, float]] = {name: {} for name in held}
    for source in {group.get(SOURCE) for _, group in held.values()}:
        names = [name for name, (_, group) in held.items() if group.get(SOURCE) == source]
        for quantity in NAMES:
            factors = {name: getattr(rows[name], quantity) for name in names if quantity in held[name][1]}
            factors = {name: factor for name, factor in factors.items() if factor is not None}
            bases = [float(held[name][1][quantity]) / factor for name, factor in factors.items() if factor]
            base, default = statistics.median_low(bases or [0.0]), float(optimizer.defaults.get(quantity) or 0.0)
            if quantity != "lr" and any(_same(default, each) for each in bases):
                base = default
            for name, factor in factors.items():
                expected[name][quantity] = base * factor
    return expected


def compared(name: str, quantity: str, expected: float, found: float, within: str) -> Finding:
    """What a tensor's group should hold beside what it holds."""
    return Finding(
        tensor=name, quantity=quantity, expected=expected, found=found, within=within, right=_same(expected, found)
    )


def decay_of(group: Group) -> float:
    """Weight decay of a group; 0 where it has none."""
    return float(group.get("weight_decay", 0.0))


class _Multipliers(NamedTuple):
    """What multiplies base values for one tensor; None where the rules are not known.

    Args:
        lr: of the learning rate.
        weight_decay: of the decay.
        eps: of Adam's epsilon.
    """

    lr: float
    weight_decay: float | None
    eps: float | None


def _rows(held: Held, optimizer: torch.optim.Optimizer) -> dict[str, _Multipliers]:
    """By the rule of the optimizer's class; where that is not known, by the one that fits more groups."""
    known = rule_of(optimizer)
    rules: Iterable[formulas.UpdateRule] = ("adam", "sgd") if known is None else (known,)
    found = [{name: _multipliers(rule, *each) for name, each in held.items()} for rule in rules]

    def fitting(rows: Mapping[str, _Multipliers]) -> int:
        said = {name: float(group.get(MULTIPLIER, 1.0)) for name, (_, group) in held.items()}
        return sum(_same(row.lr, said[name]) for name, row in rows.items())

    return max(found, key=fitting)


def _multipliers(rule: formulas.UpdateRule, parameter: torch.nn.Parameter, group: Group) -> _Multipliers:
    infshape = getattr(parameter, "infshape", None)
    if infshape is None or (MULTIPLIER in group and SOURCE not in group):  # of another model's, or by other rules
        return _Multipliers(float(group.get(MULTIPLIER, 1.0)), None, None)
    ratios, own = infshape.ratios, infshape.per_tensor or PerTensor()
    lr = formulas.learning_rate(rule, m_in=ratios.m_in, m_out=ratios.m_out, forward=ratios.forward)
    decay = float(formulas.weight_decay("independent", lr)) * own.weight_decay if SOURCE in group else None
    # MuAdam leaves epsilon alone, as microsoft/mup does.
    eps = float(formulas.epsilon(m_out=ratios.m_out, forward=ratios.forward)) if group.get(SCALES_EPS) else 1.0
    return _Multipliers(float(lr) * own.lr, decay, eps if SCALES_EPS in group else None)


def _same(expected: float, found: float) -> bool:
    return abs(found - expected) <= AGREES * abs(expected)
