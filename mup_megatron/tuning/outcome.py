"""How a study came out: its trials, the best of them with their repetitions, the one that is chosen.

Public names: `Trial`, `State`, `FINISHED`, `Range`, `Candidate`, `Choice`, `best`, `ends_of`, `choose`,
`descent_of`, `range_of`, `open_sides`, `Side`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, model_validator

from mup_megatron.config import Config
from mup_megatron.tuning.descent import Descent, descend, pooled
from mup_megatron.tuning.space import Value
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_json

# The share of a range: values nearer than this to its end are at its end.
_NEAR = 0.1

State = Literal["waiting", "running", "complete", "stopped", "diverged", "failed"]
FINISHED: tuple[State, ...] = ("complete", "stopped", "diverged", "failed")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of the plan.

    Args:
        id: of the storage.
        slot: place in the plan, from 0; a repetition has that of the trial that it repeats.
        values: by hyperparameter; empty while a trial of a sampler that learns (tpe) waits.
        seed: of initial values and data order.
        repeats: whether it is a repetition with another seed.
        state: where it stands; `stopped` by halving, `diverged` when the loss was no finite number.
        loss: evaluation loss (nats per token) at the last step reached; infinite if it diverged.
        reports: evaluation loss by step.
        seconds: spent.
        reason: why it failed.
        attempts: processes that died while running it.
        varies: the hyperparameter that it varies, of coordinate descent; None for a trial of the joint search.
    """

    id: int
    slot: int
    values: dict[str, Value]
    seed: int
    repeats: bool
    state: State
    loss: float | None
    reports: dict[int, float]
    seconds: float
    reason: str | None
    attempts: int
    varies: str | None = None

    @property
    def name(self) -> str:
        """Of its folder, and for messages."""
        return f"trial-{self.slot:03d}" + (f"-seed-{self.seed}" if self.repeats else "")


class Range(BaseModel):
    """What was searched of a number.

    Args:
        low: lower end.
        high: upper end.
        log: whether by its logarithm.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    low: FiniteFloat
    high: FiniteFloat
    log: bool

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Range:
        if not self.low <= self.high or (self.log and self.low <= 0):
            raise ValueError("no range")
        return self


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trial with its repetitions.

    Args:
        slot: of the trial.
        values: its hyperparameters.
        losses: final evaluation losses, one per seed, the trial's own first.
        mean: of `losses`.
        within_noise: whether it cannot be told from the chosen one.
    """

    slot: int
    values: dict[str, Value]
    losses: list[float]
    mean: float
    within_noise: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the study found.

    Args:
        values: of the chosen trial.
        slot: the chosen trial.
        loss: mean over its seeds.
        noise: standard deviation of a loss over seeds, pooled over candidates; None without repetitions.
        candidates: the best trials, best first.
        interior: per number that was searched, whether enough was tried on both sides of it (`open_sides`).
        ranges: what was searched of each number.
        trials: every trial of the study.
        descent: what coordinate descent moved; None without it.
    """

    values: dict[str, Value]
    slot: int
    loss: float
    noise: float | None
    candidates: list[Candidate]
    interior: dict[str, bool]
    ranges: dict[str, Range]
    trials: list[Trial] = field(repr=False)
    descent: Descent | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data; a loss that is not finite is null. Of coordinate descent nothing is said where there is none."""
        found = asdict(self)
        found["ranges"] = {name: range_.model_dump() for name, range_ in self.ranges.items()}
        descent = found.pop("descent")
        if self.descent is None:
            for trial in found["trials"]:
                del trial["varies"]
        else:
            found["descent"] = {key: descent[key] for key in ("start", "noise", "moves", "count", "ended")}
        plain: dict[str, Any] = as_json(found)
        return plain


def best(trials: list[Trial]) -> list[Trial]:
    """Whole first trials of the joint search, best first."""
    whole = [trial for trial in trials if not trial.repeats and trial.varies is None and trial.state == "complete"]
    return sorted(whole, key=lambda trial: (trial.loss, trial.slot))


def ends_of(trials: Sequence[Trial]) -> list[str]:
    """How trials ended, in words; of ends that differ in numbers alone (a trial's own values) the first."""
    found: dict[str, str] = {}
    for trial in trials:
        end = trial.reason or trial.state
        found.setdefault(_NUMBER.sub("", end), end)
    return sorted(found.values())


_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


def choose(config: Config, trials: list[Trial]) -> Choice:
    """The best candidate by the mean over its seeds; where coordinate descent went on from there, its last move.

    Raises:
        UserError: no trial ended with a finite loss.
    """
    joint = _candidates(config, trials)
    descent = descent_of(config, trials)
    chosen, candidates = joint[0], joint
    if descent is not None:
        by_slot = {trial.slot: trial for trial in trials if trial.varies is not None and not trial.repeats}
        further = [_candidate(by_slot[slot], losses) for slot, losses in descent.repeated.items()]
        candidates = _in_order([*joint, *further])
        chosen = next(candidate for candidate in candidates if candidate.slot == descent.slot)
        candidates = [chosen, *(candidate for candidate in candidates if candidate is not chosen)]
    noise = pooled([candidate.losses for candidate in candidates])
    marked = [replace(each, within_noise=_within_noise(each, chosen, noise)) for each in candidates]
    tried = [trial for trial in trials if not trial.repeats and trial.state in FINISHED and trial.values]
    ranges = {name: range_of(config, name) for name, value in chosen.values.items() if isinstance(value, int | float)}
    interior = {
        name: not open_sides(chosen.values[name], [other.values[name] for other in tried], range_)
        for name, range_ in ranges.items()
    }
    return Choice(
        values=chosen.values,
        slot=chosen.slot,
        loss=chosen.mean,
        noise=noise,
        candidates=marked,
        interior=interior,
        ranges=ranges,
        trials=trials,
        descent=descent,
    )


def descent_of(config: Config, trials: list[Trial]) -> Descent | None:
    """How far coordinate descent has come, once the joint search is over; None where the config asks for none.

    Raises:
        UserError: no trial of the joint search ended with a finite loss.
    """
    if not config.tuning.descent.trials:
        return None
    candidates = _candidates(config, trials)
    chosen = candidates[0]
    by_seed = {
        trial.seed: trial.loss
        for trial in trials
        if trial.slot == chosen.slot and trial.state in ("complete", "diverged") and trial.loss is not None
    }
    ended = [trial for trial in trials if trial.varies is not None and trial.state in FINISHED]
    known = {
        (trial.slot, trial.seed): trial.loss if trial.state == "complete" and trial.loss is not None else math.inf
        for trial in ended
    }
    next_slot = 1 + max(trial.slot for trial in trials if trial.varies is None)
    start = (chosen.slot, chosen.values, by_seed)
    groups = [candidate.losses for candidate in candidates]
    return descend(config.tuning.descent, config.tuning.search, start, groups, known, next_slot)


def _candidates(config: Config, trials: list[Trial]) -> list[Candidate]:
    """The best of the joint search with their repetitions, best mean first. Raises UserError where there is none."""
    whole = best(trials)
    if not whole:
        rates = "expected lower rates in tuning.search, or " * any(trial.state == "diverged" for trial in trials)
        raise UserError(
            f"tuning: none of the {len(trials)} trials ended with a finite loss ({', '.join(ends_of(trials))}); "
            f"{rates}see tuning/worker-*.log in run.dir"
        )
    candidates = []
    for trial in whole[: max(1, config.tuning.repeat_best)]:
        again = [
            other
            for other in trials
            if other.repeats and other.slot == trial.slot and other.state in ("complete", "diverged")
        ]
        losses = [float(other.loss) for other in (trial, *again) if other.loss is not None]
        candidates.append(_candidate(trial, losses))
    candidates = _in_order(candidates)
    if not candidates:
        raise UserError(
            f"tuning: each of the best {max(1, config.tuning.repeat_best)} trials diverged with another seed; expected "
            "lower rates in tuning.search, or a larger tuning.repeat_best"
        )
    return candidates


def _candidate(trial: Trial, losses: list[float]) -> Candidate:
    return Candidate(slot=trial.slot, values=trial.values, losses=losses, mean=statistics.fmean(losses))


def _in_order(candidates: list[Candidate]) -> list[Candidate]:
    """Those whose mean is finite, best first; behind them those of which a repetition failed, and said no loss.

    The first loss of a candidate is one that was chosen for being low, so alone it is no mean.
    """
    finite = [candidate for candidate in candidates if math.isfinite(candidate.mean)]
    most = max((len(candidate.losses) for candidate in finite), default=0)
    return sorted(finite, key=lambda candidate: (len(candidate.losses) < most, candidate.mean, candidate.slot))


@dataclass(frozen=True, kw_only=True)
class Side:
    """A side of a value on which a better one may lie.

    Args:
        above: whether it is the side of larger values.
        reach: the farthest value that was tried there, the value itself if there is none.
        end: of the range.
        gap: from `reach` to `end`, as a share of the range.
    """

    above: bool
    reach: float
    end: float
    gap: float

    @property
    def at_end(self) -> bool:
        """Whether the range ends there: a wider one may hold better values, more trials in this one do not."""
        return self.gap < _NEAR


def open_sides(value: float, tried: Sequence[float], range_: Range) -> list[Side]:
    """On which sides too little was tried to say that the best value is not farther out.

    A side is closed where the values tried beyond `value` reach at least half of the way to the end of the range.

    Args:
        value: the chosen one.
        tried: every value that was tried.
        range_: what was searched.
    """

    def place(number: float) -> float:
        return math.log(number) if range_.log else number

    sides, whole = [], abs(place(range_.high) - place(range_.low))
    for above, end, reach in ((False, range_.low, min(tried)), (True, range_.high, max(tried))):
        beyond, rest = abs(place(reach) - place(value)), abs(place(end) - place(reach))
        if not beyond or beyond < rest:
            sides.append(Side(above=above, reach=reach, end=end, gap=rest / whole if whole else 0.0))
    return sides


def range_of(config: Config, name: str) -> Range:
    """What was searched of a number."""
    dimension = config.tuning.search[name]
    values = dimension.log_uniform or dimension.uniform or [v for v in dimension.choice or [] if not isinstance(v, str)]
    low, high = min(values), max(values)
    return Range(low=low, high=high, log=dimension.uniform is None and low > 0)


def _within_noise(candidate: Candidate, chosen: Candidate, noise: float | None) -> bool:
    """Whether the means differ by less than two standard errors of their difference."""
    if candidate is chosen or noise is None:
        return False
    error = noise * math.sqrt(1 / len(candidate.losses) + 1 / len(chosen.losses))
    return candidate.mean - chosen.mean < 2 * error
