"""Alarms: series of a run that leave their band, and what is wrong by itself.

Public names: `Alarm`, `Alarms`, `write_alarms`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.band import UPDATE, BandOfTarget, Bounds, with_updates
from mup_megatron.telemetry.series import Name, series_name
from mup_megatron.util.disk import full_disk
from mup_megatron.util.files import as_json

_AUDIT = "a resume audits rates and groups again (audit.json)"
_SAID = 3
"""Alarms of one reading that the screen has; the file has all."""
_EXACT = 1e-3
"""Relative, of what a group says."""
READINGS = 3
"""Readings in a row that a series must be outside of its band."""
_NUMBERS = ("output rms", "weight rms", "gradient rms")
"""Quantities that must be finite; where one is not, those after it follow."""
_COPIES = "copies apart"
_FORWARD, _FAR = ("output rms", "largest logit"), 10.0
"""Quantities that are said at once where they are so many times outside of their band: training may mend them soon."""
_NEAR_EPSILON = 10.0
"""Gradients of so many times epsilon and less are slowed down by it."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One series that is not as it should be.

    Args:
        step: of the reading at which it is said.
        since: of the first reading of those in a row.
        name: of the module or tensor.
        quantity: that is not as it should be.
        value: at `step`.
        low: the least that it should be.
        high: the greatest.
        cause: the likely one, in words.
        decides: what to do to know.
    """

    step: int
    since: int
    name: str
    quantity: str
    value: float
    low: float
    high: float
    cause: str
    decides: str

    @property
    def line(self) -> str:
        """For the screen."""
        beside = f", {_beside(self.low, self.high)}" if math.isfinite(self.value) else ""
        return (
            f"{self.quantity} of {self.name} is {self.value:.3g}{beside}, since step {self.since}: {self.cause}; "
            f"{self.decides}"
        )


def _beside(low: float, high: float) -> str:
    if not math.isfinite(high):
        return f"less than {low:.3g}"
    return f"not {low:.3g} to {high:.3g}" if low else f"more than {high:.3g}"


class Alarms:
    """Looks at one reading after the other, and says of each series once that it is not as it should be.

    A series that was as it should be for `READINGS` readings in a row may be said again.

    Args:
        table: of the run.
        band: of the run; None where there is none, and only what is wrong by itself is seen.
        decays: whether weight decay is the same at every step, so that it is held against the table's.
    """

    def __init__(self, table: Parametrization, band: BandOfTarget | None, *, decays: bool = True) -> None:
        training = table.config.training
        self._band, self._steps = band, training.train_steps
        self._begins = training.lr_warmup_steps / training.train_steps
        self._rates = {
            (series_name(name), quantity): expected
            for name, row in table.tensors.items()
            for quantity, expected in (("rate", row.lr), ("decay", row.weight_decay))
            if not row.group.decoupled and (decays if quantity == "decay" else expected)
        }
        self._standing = {series_name(name) for name in table.tensors if table.may_stand(name)}
        # Gradients are told of a tensor as its layer multiplies with it.
        self._epsilons = {
            series_name(name): row.eps / float(row.theta) for name, row in table.tensors.items() if row.eps
        }
        scaled = table.config.training.precision == "fp16"  # its gradients overflow now and then, and are left out
        self._numbers = _NUMBERS[:-1] if scaled else _NUMBERS
        self._since: dict[Name, list[int]] = {}
        self._well: dict[Name, int] = {}
        self._said: set[Name] = set()

    def see(self, step: int, found: Mapping[Name, float], schedule: float) -> list[Alarm]:
        """What a reading newly says, the farthest from its bounds first.

        Args:
            step: of the reading.
            found: by name and quantity.
            schedule: learning rate of the step over the one at the schedule's peak.
        """
        found = with_updates(found)
        alarms = []
        for series, value in found.items():
            bounds = self._of_group(series, found, schedule) or self._bounds(series, step, found)
            if bounds is None:
                continue
            if bounds.low <= value <= bounds.high:
                self._well[series] = self._well.get(series, 0) + 1
                self._since.pop(series, None)
                if self._well[series] >= READINGS:
                    self._said.discard(series)
                continue
            self._well[series] = 0
            since = self._since.setdefault(series, [])
            since.append(step)
            at_once = series in self._rates or series[1] == _COPIES or not math.isfinite(value)
            at_once |= series[1] in _FORWARD and not bounds.low / _FAR <= value <= bounds.high * _FAR
            enough = 1 if at_once else READINGS
            if series not in self._said and len(since) >= enough:
                cause, decides = self._cause(series, value, bounds, found)
                alarm = Alarm(
                    step=step,
                    since=since[0],
                    name=series[0],
                    quantity=series[1],
                    value=value,
                    low=bounds.low,
                    high=bounds.high,
                    cause=cause,
                    decides=decides,
                )
                alarms.append(alarm)
        alarms = _in_order(alarms)
        self._said |= {(alarm.name, alarm.quantity) for alarm in alarms}
        return alarms

    def _of_group(self, series: Name, found: Mapping[Name, float], schedule: float) -> Bounds | None:
        """What an optimizer's group must say: the table's rate under the schedule, and its decay at that rate."""
        if series not in self._rates:
            return None
        name, quantity = series
        expected = self._rates[series] * (schedule if quantity == "rate" else found.get((name, "rate"), math.nan))
        return Bounds(expected * (1 - _EXACT), expected * (1 + _EXACT), expected)

    def _bounds(self, series: Name, step: int, found: Mapping[Name, float]) -> Bounds | None:
        name, quantity = series
        if quantity == _COPIES:
            return Bounds(0.0, 0.0, math.nan)
        if not math.isfinite(found[series]):
            return Bounds(0.0, sys.float_info.max, math.nan) if quantity in self._numbers else None
        progress = step / self._steps
        bounds = None if self._band is None or progress < self._begins else self._band(name, quantity, progress)
        if bounds is None and quantity == UPDATE and found[series] == 0.0 and name not in self._standing:
            return Bounds(math.ulp(0.0), math.inf, math.nan)  # nothing moves although the rate is not 0
        return bounds

    def _cause(self, series: Name, value: float, bounds: Bounds, found: Mapping[Name, float]) -> tuple[str, str]:
        """The likely cause of an alarm, and what decides it."""
        name, quantity = series
        if quantity == _COPIES:
            cause = "ranks that should hold the same weights do not"
            return cause, "go back to the last checkpoint; a machine may be at fault"
        if not math.isfinite(value):
            first = {
                "output rms": "the first module whose output is no number is named first",
                "weight rms": "a weight is no number, although outputs were",
                "gradient rms": "a gradient is no number, although outputs are; it comes from modules behind it",
            }
            return first[quantity], "go back to the last checkpoint"
        gradient, epsilon = found.get((name, "gradient rms")), self._epsilons.get(name, 0.0)
        if quantity == UPDATE and gradient == 0.0:
            return "no gradient comes to it", "see what lies behind it in the model, and requires_grad"
        if quantity == UPDATE and value == 0.0:
            return "it does not move although its rate is not 0", f"see its gradient rms; {_AUDIT}"
        if not bounds.expected:  # a tensor that the table does not decay, or that did not move in the proxy
            return "it should be 0", _AUDIT
        if quantity == UPDATE:
            times = f"its update is {value / bounds.expected:.2g} times the proxy's"
            if value < bounds.low and gradient is not None and gradient < _NEAR_EPSILON * epsilon:
                return (
                    f"{times}, and its gradients ({gradient:.2g}) are near epsilon ({epsilon:.2g})",
                    "train with a smaller optimizer.eps",
                )
            return f"{times}: its gradients, epsilon, or the data", _AUDIT
        if quantity in ("rate", "decay"):
            return (
                f"its optimizer group has {value / bounds.expected:.3g} times the table's, under the schedule",
                _AUDIT,
            )
        if quantity in ("largest logit", "attention entropy"):
            return "queries and keys grow, or the softmax scale is another", "see weight rms of its queries and keys"
        if quantity in ("router entropy", "load entropy"):
            return "the router sends tokens to few experts", "see its update rms, and the rate of its auxiliary loss"
        cause = "what it reads, its weights or its multiplier"
        return cause, "see the first module in the model's order that is named"


def write_alarms(path: Path | None, alarms: Sequence[Alarm], say: Callable[[str], None]) -> None:
    """Adds alarms to a file of JSON lines, and says the first of them.

    Args:
        path: of the file; None where the run keeps none.
        alarms: of one reading.
        say: takes a line for the screen.

    Raises:
        UserError: the disk is full.
    """
    if path is not None:
        with full_disk(path, "the run's alarms"), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(as_json(asdict(alarm))) + "\n" for alarm in alarms))
    for alarm in alarms[:_SAID]:
        say(f"alarm: {alarm.line}")
    if len(alarms) > _SAID:
        say(f"alarm: and {len(alarms) - _SAID} more series" + (f", in {path}" if path else ", which no file keeps"))


def _in_order(alarms: Sequence[Alarm]) -> list[Alarm]:
    """The farthest outside first; where something is no number, what it began with alone, as all else follows."""
    copies = [alarm for alarm in alarms if alarm.quantity == _COPIES]
    for quantity in _NUMBERS:
        broken = [alarm for alarm in alarms if alarm.quantity == quantity and not math.isfinite(alarm.value)]
        if broken:  # a module comes behind what is inside of it, which ran before
            names = [alarm.name for alarm in broken]
            return [*copies, *sorted(broken, key=lambda each: any(name.startswith(f"{each.name}.") for name in names))]
    return sorted(alarms, key=_distance, reverse=True)


def _distance(alarm: Alarm) -> float:
    """By how much a value is outside, as a logarithm; what is no number comes first, in the model's order."""
    if not math.isfinite(alarm.value):
        return math.inf
    if alarm.value < alarm.low:
        return math.log(alarm.low / alarm.value) if alarm.value > 0 else 1e3
    return math.log(alarm.value / alarm.high) if alarm.high > 0 else 1e3
