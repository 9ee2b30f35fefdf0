"""What a coordinate check is asked, and which parametrizations it measures.

Public names: `Check`, `MeasuredParametrization`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from mup_megatron.config import PARAMETRIZATIONS, PLANE, Config
from mup_megatron.proof.controls import Break, Control, control
from mup_megatron.util.errors import UserError


@dataclass(frozen=True, kw_only=True)
class MeasuredParametrization:
    """A parametrization that models of the family are trained in: the one that is judged, or one to compare it with.

    Args:
        label: for people.
        name: of the config's `parametrization.name`.
        break_: what is done to its rules.
        broken: name of the control that does it, if one does.
    """

    label: str
    name: str = "mup"
    break_: Break | None = None
    broken: str | None = None


_KNOWN = {name: MeasuredParametrization(label=name, name=name) for name in PARAMETRIZATIONS}


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is asked.

    Args:
        factors: sizes over the base's; the config's own path from the base to its target unless given.
        growth: key of `base:` to factors of its own, instead.
        steps: optimizer steps.
        seeds: repetitions, with seeds from the config's on.
        point: the parametrization that is judged: a `parametrization.name`; the config's own unless given.
        broken: a rule to take out of µP (`controls.CONTROLS`), in the regime that excites it.
        regime: under which µP is judged (`regimes.REGIMES`); the broken rule's own where one is broken.
        compare: also measure another parametrization, for the picture: standard beside µP, µP beside all others.
        own_batch: the config's own batch, length and rate, which may hide what happens as widths grow.
        ranges: also measure the range of values of every tensor, and what formats of lower precision would lose.

    Raises:
        UserError: no steps, or no seeds.
    """

    factors: Sequence[int] = ()
    growth: Mapping[str, Sequence[int | Fraction]] = field(default_factory=dict)
    steps: int = 4
    seeds: int = 3
    point: str | None = None
    broken: str | None = None
    regime: str = "plain"
    compare: bool = True
    own_batch: bool = False
    ranges: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps: {self.steps}: nothing changes in no steps; expected 1 or more")
        if self.seeds < 1:
            raise UserError(f"--seeds: {self.seeds}: expected 1 or more")

    @property
    def control(self) -> Control | None:
        """What takes the rule out. Raises UserError where there is none of that name."""
        return None if self.broken is None else control(self.broken)

    @property
    def in_regime(self) -> str:
        """Name of the regime that is measured."""
        return self.regime if self.control is None else self.control.regime

    @property
    def processes(self) -> int | None:
        """Number of processes that it needs; None where the config's own layout is enough.

        A control whose tensor-parallel size grows with the width needs one process per factor.
        """
        if self.control is None or not self.control.growing_tensor:
            return None
        return max(self.factors or self.control.factors)

    def measured(self, config: Config) -> list[MeasuredParametrization]:
        """The parametrization that is judged, and behind it the one to compare it with.

        Args:
            config: the run.

        Raises:
            UserError: no such parametrization, or one beside a rule that is taken out.
        """
        judged = self._judged(config)
        beside = _KNOWN["standard" if judged.label == "mup" else "mup"]
        return [judged, beside] if self.compare else [judged]

    def refuse_thorough(self, config: Config) -> None:
        """Raises UserError for what `--thorough` does not take."""
        if config.tuning.command:
            raise UserError("--thorough: its regimes are measured by this project's engines; expected no --megatron")
        if self.broken or self.point:
            option = "--break" if self.broken else "--parametrization"
            raise UserError(f"--thorough: judges mup; expected no {option}")
        if self.ranges:
            raise UserError("--thorough: judges slopes in every regime; expected no --ranges")

    def _judged(self, config: Config) -> MeasuredParametrization:
        if self.control is not None:
            if self.point not in (None, "mup"):
                raise UserError(
                    f"--break {self.broken}: takes a rule out of mup; expected no --parametrization {self.point}"
                )
            label = f"mup without {self.control.taken_out}"
            return MeasuredParametrization(label=label, break_=self.control.break_, broken=self.broken)
        point = self.point or config.parametrization.name
        if point in _KNOWN:
            return _KNOWN[point]
        if re.match(PLANE, point):
            return MeasuredParametrization(label=point, name=point)
        raise UserError(f"--parametrization {point}: expected {', '.join(_KNOWN)}, or interpolate:0.5,1")
