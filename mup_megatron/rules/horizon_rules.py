"""What each known rule over batch and tokens says of a run's own step from its trials, side by side.

Public names: `Said`, `side_by_side`, `lines_of`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mup_megatron.config import Config
from mup_megatron.rules import formulas
from mup_megatron.rules.horizon import horizon

_OF_TOKENS = -0.32
_STEP_LAW_RATE, _STEP_LAW_BATCH = 0.307, 0.571


@dataclass(frozen=True, kw_only=True)
class Said:
    """One rule's factors, from the trials to the run.

    Args:
        rule: as `parametrization:` takes it; in words where it is no key.
        source: where it is from.
        factors: on rate, epsilon, decay and 1 - beta.
        remark: what must be known beside them; empty where nothing must.
    """

    rule: str
    source: str
    factors: formulas.HorizonFactors
    remark: str = ""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def side_by_side(config: Config) -> list[Said]:
    """The config's own rules first, then every other; ratios are those of the config's trials and run.

    Raises:
        ConfigError: the config takes an exponent from a ladder, and no ladder has said it.
    """
    ratios: Any = {"m_batch": config.batch_ratio, "m_tokens": config.tokens_ratio}
    rules = config.parametrization
    own = f"batch: {rules.batch}, tokens: {rules.tokens}, weight_decay: {rules.weight_decay}"
    of_law = float(config.tokens_ratio) ** _STEP_LAW_BATCH
    of = formulas.horizon_factors
    found = [
        ("the config's own", own, horizon(config), ""),
        ("none", "the default: nothing moves", formulas.HorizonFactors(), ""),
        ("batch: sqrt_sde", "Malladi et al., 2205.10287", of(**ratios, batch="sqrt_sde"), ""),
        (
            f"tokens: power:{_OF_TOKENS}",
            "Bjorck et al., 2409.19913",
            of(**ratios, tokens=_OF_TOKENS),
            "",
        ),
        (
            f"batch: sqrt_sde, tokens: power:{_OF_TOKENS}",
            "both",
            of(**ratios, batch="sqrt_sde", tokens=_OF_TOKENS),
            "",
        ),
        (
            "weight_decay: timescale",
            "Wang & Aitchison, 2405.13698",
            of(**ratios, keeps_timescale=True),
            "",
        ),
        ("batch: complete_d", "Complete(d)P, 2512.22382", of(**ratios, batch="complete_d"), ""),
        (
            "Step Law's rate",
            "2503.04715",
            of(**ratios, tokens=_STEP_LAW_RATE),
            f"no key; at the batch that it says, {of_law:.3g} times a trial's (here {float(config.batch_ratio):.3g})",
        ),
    ]
    betas = config.optimizer.betas
    return [
        Said(rule=rule, source=source, factors=factors, remark=remark or _of_betas(factors.forgetting, betas))
        for rule, source, factors, remark in found
    ]


def _of_betas(forgetting: float, betas: Sequence[float]) -> str:
    """What a factor on 1 - beta leaves."""
    if forgetting * (1 - min(betas)) >= 1:
        return f"leaves none of beta {min(betas):g}"
    return "" if forgetting == 1 else "betas " + " and ".join(f"{1 - forgetting * (1 - each):.6g}" for each in betas)


def lines_of(config: Config, found: Sequence[Said]) -> Iterator[str]:
    """A table for a terminal, and how far the rules are apart."""
    steps = float(config.tokens_ratio / config.batch_ratio)
    yield (
        f"a step has {float(config.batch_ratio):.4g} times a trial's tokens, the run {float(config.tokens_ratio):.4g} "
        f"times, in {steps:.4g} times the steps"
    )
    width = max(len(each.rule) for each in found)
    yield f"{'rule':<{width}}  {'lr ×':>8} {'eps ×':>8} {'decay ×':>8}  source"
    for each in found:
        of = each.factors
        remark = f" ({each.remark})" if each.remark else ""
        yield f"{each.rule:<{width}}  {of.lr:>8.4g} {of.eps:>8.4g} {of.weight_decay:>8.4g}  {each.source}{remark}"
    rates = [each.factors.lr for each in found]
    yield (
        f"rates are {math.log2(max(rates) / min(rates)):.2g} octaves apart, from {min(rates):.4g} to {max(rates):.4g}; "
        "mup-megatron ladder CONFIG measures your own"
    )
