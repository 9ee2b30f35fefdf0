"""Published rules over batch and tokens, and what each says of a run's own step from its trials, side by side.

Public names: `Published`, `PUBLISHED`, `Said`, `side_by_side`, `lines_of`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mup_megatron.config import Config
from mup_megatron.rules import formulas
from mup_megatron.rules.horizon import horizon


@dataclass(frozen=True, kw_only=True)
class Published:
    """How others let the best rate go with batch and tokens, at one model.

    Args:
        batch: exponent of the tokens of a step.
        tokens: exponent of the tokens of the run.
        source: where it is from.
        whole: the rule over batch that moves epsilon, decay and betas too; None where the rate alone is told.
        own_batch: exponent over the run's tokens of the batch that the source tells with the rate; None of others.
        remark: what must be known beside it; empty where nothing must.
    """

    batch: float
    tokens: float
    source: str
    whole: formulas.BatchRule | None = None
    own_batch: float | None = None
    remark: str = ""

    @property
    def exponents(self) -> str:
        """Of the rate, in words."""
        named = {"batch": self.batch, "tokens": self.tokens}
        return " ".join(f"{axis}^{power:g}" for axis, power in named.items() if power) or "no rule"

    @property
    def rule(self) -> str:
        """As `parametrization:` takes it."""
        over_batch = self.whole or (f"power:{self.batch:g}" if self.batch else None)
        over_tokens = f"power:{self.tokens:g}" if self.tokens and self.whole != "complete_d" else None
        named = {"batch": over_batch, "tokens": over_tokens}
        return ", ".join(f"{axis}: {rule}" for axis, rule in named.items() if rule) or "none"

    def factors(self, **ratios: Any) -> formulas.HorizonFactors:
        """Its factors (`formulas.horizon_factors`), from `m_batch` and `m_tokens`."""
        tokens = 0.0 if self.whole == "complete_d" else self.tokens
        return formulas.horizon_factors(**ratios, batch=self.whole or self.batch, tokens=tokens)


_OF_MODEL = "its power of the model's size is left out"
PUBLISHED = (
    Published(batch=0.0, tokens=0.0, source="the default: nothing moves"),
    Published(batch=0.5, tokens=0.0, whole="sqrt_sde", source="Malladi et al., 2205.10287"),
    Published(batch=0.0, tokens=-0.32, source="Bjorck et al., 2409.19913"),
    Published(batch=0.5, tokens=-0.32, whole="sqrt_sde", source="both"),
    Published(batch=0.5, tokens=-0.5, whole="complete_d", source="Complete(d)P, 2512.22382"),
    Published(batch=0.5, tokens=-0.32, source="HyperP, 2603.28743", remark="for Muon on a sphere"),
    Published(
        batch=0.5,
        tokens=-0.3,
        source="Delphi, marin pull request 3292",
        remark="for AdamH; beta2 becomes beta2^(batch ratio)",
    ),
    Published(batch=0.5, tokens=-0.2813, source="Marin's fit, issue 5818", remark=f"for AdamH; {_OF_MODEL}"),
    Published(batch=0.5, tokens=-0.395, source="Marin's fit, issue 5951", remark=f"for MuonH; {_OF_MODEL}"),
    Published(batch=0.0, tokens=-0.3509, source="2601.05049", remark=_OF_MODEL),
    Published(batch=0.0, tokens=0.307, source="Step Law, 2503.04715", own_batch=0.571, remark=_OF_MODEL),
)
"""One after the other, those that `parametrization:` names first."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """One rule's factors, from the trials to the run.

    Args:
        rule: as `parametrization:` takes it.
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


def side_by_side(config: Config, measured: Published | None = None) -> list[Said]:
    """The config's own rules first, then what was measured, then every other.

    Args:
        config: the run; ratios are those of its trials and itself.
        measured: what a ladder of its family says.

    Raises:
        ConfigError: the config takes an exponent from a ladder, and no ladder has said it.
    """
    ratios: Any = {"m_batch": config.batch_ratio, "m_tokens": config.tokens_ratio}
    rules, betas = config.parametrization, config.optimizer.betas
    own = f"batch: {rules.batch}, tokens: {rules.tokens}, weight_decay: {rules.weight_decay}"
    timescale = formulas.horizon_factors(**ratios, keeps_timescale=True)
    return [
        _said("the config's own", own, horizon(config), betas),
        *(
            _said(each.rule, each.source, each.factors(**ratios), betas, _remark(each, config))
            for each in ([measured] if measured else []) + list(PUBLISHED)
        ),
        _said("weight_decay: timescale", "Wang & Aitchison, 2405.13698", timescale, betas),
    ]


def _said(rule: str, source: str, factors: formulas.HorizonFactors, betas: Sequence[float], remark: str = "") -> Said:
    of_betas = _of_betas(factors.forgetting, betas)
    return Said(rule=rule, source=source, factors=factors, remark="; ".join(filter(None, (of_betas, remark))))


def _remark(found: Published, config: Config) -> str:
    """What must be known of a rule, with the batch that it tells beside the run's."""
    if found.own_batch is None:
        return found.remark
    told, own = float(config.tokens_ratio) ** found.own_batch, float(config.batch_ratio)
    return f"at the batch that it tells, {told:.3g} times a trial's (here {own:.3g}); {found.remark}"


def _of_betas(forgetting: float, betas: Sequence[float]) -> str:
    """What a factor on 1 - beta leaves."""
    if forgetting * (1 - min(betas)) >= 1:
        return f"leaves none of beta {min(betas):g}"
    return "" if forgetting == 1 else "betas " + " and ".join(f"{1 - forgetting * (1 - each):.6g}" for each in betas)


def lines_of(config: Config, found: Sequence[Said], *, has_ladder: bool) -> Iterator[str]:
    """A table for a terminal, how far the rules are apart, and which to take."""
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
    take = (
        "take your ladder's if it passed: parametrization.batch: fitted, parametrization.tokens: fitted"
        if has_ladder
        else "the default is none; mup-megatron ladder CONFIG measures your own, and tuning.ladder: PATH puts it here"
    )
    yield (
        f"rates are {math.log2(max(rates) / min(rates)):.2g} octaves apart, from {min(rates):.4g} to {max(rates):.4g}; "
        f"{take}"
    )
