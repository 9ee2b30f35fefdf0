"""What must hold of the rules over batch, tokens and weight decay. Public name: `CHECKS`."""

from __future__ import annotations

import math
from fractions import Fraction

from mup_megatron.config.schema import Config
from mup_megatron.config.training import BETAS, one_minus

_MOST_OCTAVES = 100
"""By which a rule may move the rate; more leaves the numbers that a rate may have."""


def _check_octaves(config: Config) -> None:
    for axis, ratio in (("batch", config.batch_ratio), ("tokens", config.tokens_ratio)):
        rule = getattr(config.parametrization, axis)
        moved = math.log2(ratio) * float(rule.partition(":")[2] or 0.0)
        if abs(moved) > _MOST_OCTAVES:
            raise config.error(
                f"parametrization.{axis}",
                f"{rule} multiplies the rate by 2^{moved:.0f}, since the run has {float(ratio):.3g} times a trial's; "
                f"expected at most 2^{_MOST_OCTAVES} (a trial's are tuning.global_batch_size, seq_length, train_steps)",
            )


def _check_decay_rule(config: Config) -> None:
    rules, optimizer = config.parametrization, config.optimizer.name
    if rules.weight_decay != "sqrt":
        return
    if optimizer not in ("adamw", "adam"):
        raise config.error(
            "parametrization.weight_decay",
            f"sqrt is known of AdamW alone (arXiv 2510.15262), not of {optimizer}; expected independent, or "
            "optimizer.name: adamw",
        )
    if rules.depth_exponent not in (None, 1.0):
        raise config.error(
            "parametrization.weight_decay",
            f"sqrt is known over width alone (arXiv 2510.15262), and parametrization.depth {rules.depth} also moves "
            "the rate; expected independent, or depth: none or completep",
        )


_RATIOS = {"sqrt_sde": "the ratio of the batches", "complete_d": "the ratio of the batches over that of the tokens"}


def _check_horizon(config: Config) -> None:
    """The rules over batch and tokens."""
    rules, optimizer = config.parametrization, config.optimizer
    if rules.has_horizon_rule and config.tuning.command:
        name = next((axis for axis in ("batch", "tokens") if getattr(rules, axis) != "none"), "weight_decay")
        raise config.error(
            f"parametrization.{name}",
            f"{getattr(rules, name)} is of this project's own runs, and those of tuning.command are "
            f"megatron.training's; expected {'independent' if name == 'weight_decay' else 'none'}, and the target's "
            "own values on its command line",
        )
    _check_octaves(config)
    if rules.batch not in ("sqrt_sde", "complete_d"):
        return
    if optimizer.name not in ("adamw", "adam"):
        raise config.error(
            "parametrization.batch",
            f"{rules.batch} is derived for Adam, not for {optimizer.name}; expected power:NUMBER",
        )
    ratio = config.batch_ratio
    if rules.batch == "complete_d":
        ratio /= config.tokens_ratio
        if rules.tokens != "none":
            raise config.error(
                "parametrization.tokens",
                f"{rules.tokens} beside batch: complete_d, which is over tokens too; expected none",
            )
    searched = (config.tuning.search[name].named for name in BETAS if name in config.tuning.search)
    lowest = min(
        *optimizer.betas, *(one_minus(value) for values in searched for value in values if not isinstance(value, str))
    )
    if ratio * (1 - Fraction(str(lowest))) >= 1:
        raise config.error(
            "parametrization.batch",
            f"{rules.batch} multiplies 1 - beta by {_RATIOS[rules.batch]}, {float(ratio):.4g}, which leaves none of "
            f"beta {lowest}; expected tuning.global_batch_size nearer to the target's, or power:0.5, "
            "which leaves the betas",
        )


CHECKS = (_check_decay_rule, _check_horizon)
"""In this order; each takes a config and raises ConfigError."""
