"""Learning-rate schedules that keep the ratios between groups. Public names: `per_group`, `refuse_auto`, `guard`.

DeepSpeed's own schedules set one rate for all groups (WarmupLR with a scalar `warmup_max_lr` turns rates of 1e-3 and
1.25e-4 into 1e-3 and 1e-3), but take a list with a rate per group, which is what they are given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mup_megatron.mup.optim import MULTIPLIER, SOURCE, other_ratio, without_multiplier
from mup_megatron.util.errors import UserError

# Parameters that are rates, with DeepSpeed's defaults (None: it takes the groups' own, or the key is required).
_RATES: dict[str, dict[str, float | None]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001},
    "OneCycle": {"cycle_min_lr": None, "cycle_max_lr": None},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
    "WarmupCosineLR": {},  # ratios
}
_AUTO = "auto"  # for Hugging Face's Trainer, which puts a number in its place
_AUTO_RATES = {"warmup_min_lr", "warmup_max_lr"}  # 0 there, and the optimizer's own rate
_TORCH_RATES = ("eta_min", "min_lr", "max_lr", "base_lr", "swa_lr")


def per_group(settings: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Turns the base rates of the config's `scheduler` block into a rate per group.

    Args:
        settings: DeepSpeed's config, changed in place.
        groups: that the optimizer will have, in order.

    Raises:
        UserError: a schedule of torch's that is given rates, a list that fits no groups, or another "auto".
    """
    block = settings.get("scheduler")
    if not block or block.get("type") is None:
        return
    kind, keys = block["type"], block.setdefault("params", {})
    known = _AUTO_RATES & set(_RATES.get(kind, ()))
    refuse_auto("scheduler.params", {key: value for key, value in keys.items() if key not in known})
    if kind not in _RATES:
        given = [key for key in _TORCH_RATES if keys.get(key)]
        if given:
            raise UserError(
                f"scheduler.params.{given[0]}: one rate for all groups, which would erase µP's; expected another "
                f"schedule, e.g. {', '.join(_RATES)}"
            )
        return
    for key, default in _RATES[kind].items():
        value = keys.get(key, default)
        if value is not None:
            keys[key] = [_rate(value, group, groups, key) for group in groups]


def refuse_auto(source: str, keys: Mapping[str, Any]) -> None:
    """Refuses "auto" where a number is needed that nobody has here. Raises UserError.

    Args:
        source: the block, for the message.
        keys: of the block.
    """
    for key, value in keys.items():
        if value == _AUTO:
            raise UserError(
                f'{source}.{key}: "auto" is for Hugging Face\'s Trainer, which puts a number in its place; expected '
                "the number"
            )


def _rate(value: Any, group: dict[str, Any], groups: list[dict[str, Any]], key: str) -> float:
    """Of a group, from the base's; of "auto" what Hugging Face's Trainer makes of it."""
    if value == _AUTO:
        return 0.0 if key == "warmup_min_lr" else float(group["lr"])
    return _base_rate(value, group, groups, key) * group[MULTIPLIER]


def _base_rate(value: Any, group: dict[str, Any], groups: list[dict[str, Any]], key: str) -> float:
    if not isinstance(value, (list, tuple)):
        return float(value)
    sources = 1 + max(each.get(SOURCE, 0) for each in groups)
    if len(value) != sources:
        raise UserError(f"scheduler.params.{key}: {len(value)} rates for {sources} groups as they were given")
    return float(value[group.get(SOURCE, 0)])


def guard(engine: Any, *, apart: bool) -> None:
    """Looks before every forward pass whether a schedule has moved groups apart, and first now.

    Args:
        engine: DeepSpeed's.
        apart: whether the groups' rates differed before the schedule was made.

    Raises:
        UserError: now or from the engine; the rates are no longer in µP's ratios.
    """
    _check(engine, apart)
    engine.register_forward_pre_hook(lambda *_: _check(engine, apart))


def _check(engine: Any, apart: bool) -> None:
    if problem := without_multiplier(engine.basic_optimizer):
        raise UserError(problem)
    if problem := other_ratio(engine.basic_optimizer, apart=apart):
        raise UserError(f"{problem}, or the config's scheduler block")
