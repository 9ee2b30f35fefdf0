"""Slopes of log size over log width, with their errors, and the verdict on each.

Public names: `BOUNDS`, `Slope`, `Fit`, `fit`, `slope_of`, `judge`, `overall`, `verdict_of`, `together`, `advice`. A
slope is fitted by least squares over the sizes of the family, with an intercept per seed. Its 95 % interval (Student's
t) comes from the residuals of the fit: the noise of the seeds, and the bend of a quantity that is no power of width.

A slope whose whole interval is within its bounds is ok, one whose whole interval is outside is out of bounds, and one
whose interval reaches a bound is undecided. theory.py says what a slope should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

BOUNDS = {"initial": 0.2, "output": 0.25, "change": 0.25, "gradient": 0.4, "update": 0.25, "rate": 0.1, "copies": 1e-3}
"""How far a slope may be from what it should be; docs/proof.md says from which noise the bounds were set. `rate` is not
a slope: it is the share by which Adam's first update may be larger than its rate, part of which is decay. The share by
which initial values may be larger or smaller than the config says depends on how many there are (sizes.py). `copies` is
no slope either: copies of a parameter on tensor-parallel ranks may be as far apart as this share of an update."""

State = Literal["ok", "undecided", "out of bounds", "not judged"]
_WORST: tuple[State, ...] = ("ok", "undecided", "out of bounds")
Verdict = Literal["passed", "undecided", "failed"]

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""0.975 quantiles of Student's t for 1 to 9 degrees of freedom."""

_BENT = 0.7
"""Where seeds have more than this share of their residuals in common, the points are bent and not noisy."""

_MOST_SEEDS = 30


class Fit(NamedTuple):
    """A fitted line.

    Args:
        slope: mean over seeds; NaN where some value is no positive number.
        confidence: half width of its 95 % interval; None where there are no more points than the line needs.
        bend: share of the residuals that seeds have in common; 0 with one seed.
    """

    slope: float
    confidence: float | None
    bend: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One slope and what it should be.

    Args:
        name: module or part of a parameter.
        quantity: initial, output, change, gradient, update, rate, drawn (initial values over what the
            config says) or copies (how far they are apart, over an update).
        step: before which the coordinates were looked at; of an update the one that made it.
        slope: of the size over the width, with `confidence` and `bend` as `Fit` has them; of `rate`, `drawn` and
            `copies` a number that has no error.
        expected: what it should be.
        low: how far below that it may be; None: as far as it likes.
        high: how far above; None: as far as it likes.
        zero: some size is exactly 0: a parameter that does not move, an activation that is not there.
    """

    name: str
    quantity: str
    step: int
    slope: float
    confidence: float | None = 0.0
    expected: float
    low: float | None
    high: float | None
    bend: float = 0.0
    zero: bool = False

    @classmethod
    def of(cls, verdict: Mapping[str, Any]) -> Slope:
        """The worst slope of a verdict of `judge`, as that says it or as it was written; without the name."""
        held = {key: value for key, value in verdict.items() if key != "verdict"}
        return cls(**held | {"name": "", "slope": math.nan if held["slope"] is None else held["slope"]})

    @property
    def state(self) -> State:
        """The verdict."""
        if self.low is None and self.high is None:
            return "not judged"
        if not math.isfinite(self.slope):
            return "out of bounds"
        within, half = self.within, math.inf if self.confidence is None else self.confidence
        return "ok" if half < within else "out of bounds" if half < -within else "undecided"

    @property
    def within(self) -> float:
        """How far inside its bounds the slope is; negative outside."""
        off = self.slope - self.expected
        above = math.inf if self.high is None else self.high - off
        below = math.inf if self.low is None else off + self.low
        return min(above, below)

    @property
    def order(self) -> tuple[int, float, float]:
        """What is worse sorts higher; how far inside its bounds each is counts in units of the narrower one."""
        if not math.isfinite(self.slope):
            return len(_WORST), math.inf, math.inf
        bound = min(each for each in (self.low, self.high) if each is not None)
        room = ((self.confidence or 0.0) - self.within) / bound
        return _WORST.index(self.state), room, abs(self.slope - self.expected)


def fit(sizes: Sequence[float], values: Sequence[Sequence[float]]) -> Fit:
    """Slope of log(value) over log(size), with an intercept per seed.

    Args:
        sizes: of the family, two or more.
        values: per seed, a value per size.
    """
    if any(not math.isfinite(value) or value <= 0 for seed in values for value in seed):
        return Fit(math.nan, None)
    slope = sum(slope_of(sizes, seed) for seed in values) / len(values)
    x = _centred(sizes)
    left = [[b - slope * a for a, b in zip(x, _centred(seed), strict=True)] for seed in values]
    total = sum(each * each for seed in left for each in seed)
    freedom = len(values) * (len(sizes) - 1) - 1
    if freedom < 1:
        return Fit(slope, None)
    spread = math.sqrt(total / freedom / (len(values) * sum(a * a for a in x)))
    common = sum(sum(points) ** 2 for points in zip(*left, strict=True)) / len(values)
    return Fit(slope, _student(freedom) * spread, common / total if total and len(values) > 1 else 0.0)


def slope_of(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of one line, by least squares; NaN where a value is no positive number."""
    if any(not math.isfinite(value) or value <= 0 for value in values):
        return math.nan
    x, y = _centred(sizes), _centred(values)
    return sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)


def _centred(values: Sequence[float]) -> list[float]:
    logs = [math.log(value) for value in values]
    return [log - sum(logs) / len(logs) for log in logs]


def _student(freedom: int) -> float:
    """0.975 quantile of Student's t; above the table by Fisher's expansion about the normal one (error below 0.003)."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def judge(slopes: Sequence[Slope]) -> dict[str, dict[str, Any]]:
    """A verdict per module and part of a parameter, with the worst slope.

    Args:
        slopes: of one line of a check.

    Returns:
        `verdict` is a `State`; with it what `Slope` holds.
    """
    by_name: dict[str, list[Slope]] = {}
    for each in slopes:
        by_name.setdefault(each.name, []).append(each)
    verdicts: dict[str, dict[str, Any]] = {}
    for name, held in by_name.items():
        judged = [each for each in held if each.state != "not judged"]
        if not judged:
            verdicts[name] = {"verdict": "not judged"}
            continue
        worst = max(judged, key=lambda each: each.order)
        told = {key: value for key, value in vars(worst).items() if key != "name"}
        verdicts[name] = {"verdict": worst.state, **told}
    return verdicts


def overall(verdicts: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """Of a whole line: failed where anything is out of bounds, else undecided where anything is."""
    states = {verdict["verdict"] for verdict in verdicts.values()}
    return verdict_of("out of bounds" in states, "undecided" in states)


def verdict_of(failed: object, undecided: object) -> Verdict:
    """Failed where something speaks against it, else undecided where something is open, else passed."""
    return "failed" if failed else "undecided" if undecided else "passed"


def together(verdicts: Iterable[str]) -> Verdict:
    """Of several checks: the worst verdict of any."""
    found = set(verdicts)
    return verdict_of("failed" in found, "undecided" in found)


def advice(verdicts: Mapping[str, Mapping[str, Any]], seeds: int, lr: float) -> str:
    """What decides the undecided.

    Args:
        verdicts: of `judge`.
        seeds: that were run.
        lr: base learning rate of the check.
    """
    open_ = [verdict for verdict in verdicts.values() if verdict["verdict"] == "undecided"]
    measured = [verdict for verdict in open_ if verdict["confidence"] is not None]
    words = ["more widths or a larger one (--widths)"]
    bent = [verdict for verdict in measured if verdict["bend"] > _BENT]
    if len(measured) > len(bent) or len(measured) < len(open_):
        # An interval goes as one over the square root of the seeds.
        needed = [_seeds(verdict, seeds) for verdict in measured if verdict not in bent]
        most = max([*needed, seeds + 1])
        costs = f"--seeds {most} (which costs {most / seeds:.2g} times as much)"
        words.insert(0, costs if most <= _MOST_SEEDS else "more seeds")
    if bent:
        what = "without the smallest width" if len(bent) == len(open_) else "or without the smallest width"
        words.append(f"a lower rate (hparams.lr={lr / 4:.3g}; points of all seeds bend alike) {what}")
    else:
        words.append(f"a lower rate (hparams.lr={lr / 4:.3g})")
    return "to decide: " + ", ".join(words[:-1]) + f", or {words[-1]}"


def _seeds(verdict: Mapping[str, Any], seeds: int) -> int:
    room = abs(Slope.of(verdict).within)
    return math.ceil(seeds * (verdict["confidence"] / room) ** 2) + 1 if room else _MOST_SEEDS + 1
