"""The band: what the proxy's best runs were like, as the target should look by the parametrization.

Public names: `Band`, `make_band`, `of_widths`, `band_of`, `Bounds`, `JUDGED`. Under µP sizes of coordinates do not
depend on width (Tensor Programs V, arXiv 2203.03466, appendix J), so outputs and attention are the proxy's. Elements of
a weight are not: what Adam and Lion add to one in a step goes as its learning rate, and what other optimizers add as it
was measured, where several widths were trained. Time is the share of the schedule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from mup_megatron.rules.shapes import stack_of
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.forecast import Forecast, LossOfProxy
from mup_megatron.telemetry.series import SCHEDULE, Name, Series, series_name
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_json, read_object, write_whole

FORMAT = 1
POINTS = 21
"""Of the schedule's own time, evenly spaced from 0 to 1."""

UPDATE = "update rms"
"""`update over weight` times `weight rms`, over `schedule`: what goes as the learning rate at the schedule's peak."""
_ENTROPY = "attention entropy"
JUDGED: Mapping[str, tuple[float, float]] = {
    "output rms": (5.0, 5.0),
    "largest logit": (math.inf, 5.0),
    _ENTROPY: (1.5, 1.5),
    "router entropy": (1.5, 1.5),
    "load entropy": (1.25, math.inf),
    UPDATE: (4.0, 5.0),
}
"""Quantities that have a band: by what factor a value may lie below the least of the proxy's runs, and above the
greatest. Runs of other seeds and of four times the width differ by less (tests/telemetry/test_alarms.py)."""

_BY_RATE = ("adam", "lion")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class TensorOfProxy(_Strict):
    """What decides how a tensor's series are carried to another width.

    Args:
        rate: learning rate at the schedule's peak, of the tensor as its layer multiplies with it.
        rule: how its update scales.
    """

    rate: float
    rule: str


class SeriesOfProxy(_Strict):
    """One series.

    Args:
        name: of the module or tensor.
        quantity: of it.
        low: the least of the runs at each point of the schedule.
        high: the greatest.
        exponent: log2 of what a doubling of the width multiplies the series with, measured; None where the
            parametrization says it, and where one width was trained.
    """

    name: str
    quantity: str
    low: list[float]
    high: list[float]
    exponent: float | None = None


class Bounds(NamedTuple):
    """What a value may be.

    Args:
        low: the least, 0 where nothing is too little.
        high: the greatest, infinite where nothing is too much.
        expected: the middle of what the proxy's runs had.
    """

    low: float
    high: float
    expected: float


class Band(_Strict):
    """What a study's best runs were like.

    Args:
        format: of the file.
        runs: names of the proxy's runs: the chosen trial, and its repetitions with other seeds.
        layers: of the proxy, by stack.
        tensors: of the proxy, by name.
        series: of all runs.
        losses: of the study's complete runs.
        hidden_size: of the proxy; None in files of earlier versions.
        lengths: tokens of a sequence in the proxy's runs, by stack; empty in files of earlier versions.
        widths: hidden sizes of the runs that exponents are measured from, ascending; empty of one width.
    """

    format: int
    runs: list[str]
    layers: dict[str, int]
    tensors: dict[str, TensorOfProxy]
    series: list[SeriesOfProxy]
    losses: list[LossOfProxy] = []
    hidden_size: int | None = None
    lengths: dict[str, int] = {}
    widths: list[int] = []

    @classmethod
    def read(cls, path: Path) -> Band:
        """The band of a file. Raises UserError where it is none."""
        found = read_object(path)
        if found.get("format") != FORMAT:
            raise UserError(f"{path}: format: {found.get('format')!r}, expected {FORMAT}, as this version writes it")
        try:
            return cls.model_validate_json(json.dumps(found))
        except ValueError as error:
            raise UserError(
                f"{path}: is no band ({str(error).splitlines()[0]}); expected one that tuning wrote"
            ) from None

    def write(self, path: Path) -> None:
        """Writes the file."""
        write_whole(path, json.dumps(as_json(self.model_dump(), 6)))

    def on(self, target: Parametrization) -> BandOfTarget:
        """What a target should be like."""
        return BandOfTarget(self, target)


class BandOfTarget:
    """A band in the target's numbers.

    Args:
        band: of the proxy.
        target: the table of the target's run.

    Attributes:
        forecast: of the target's loss.
    """

    def __init__(self, band: Band, target: Parametrization) -> None:
        self._band, self._layers = band, _layers(target)
        self._series = {(each.name, each.quantity): each for each in band.series}
        self._tensors = _tensors(target)
        self._lengths = _lengths(target)
        own = target.config.model.hidden_size
        self._octaves = math.log2(own / band.hidden_size) if band.hidden_size else 0.0
        # How far runs with other seeds are apart is not known of a single one.
        self._leave = 2 if len(band.runs) == 1 else 1
        self.forecast = Forecast(band.losses)

    def __call__(self, name: str, quantity: str, progress: float) -> Bounds | None:
        """What a value may be at a share of the schedule; None where the band says nothing of it."""
        of_proxy = self._in_proxy(name)
        series = self._series.get((of_proxy, quantity))
        if series is None or quantity not in JUDGED:
            return None
        factor = self._factor(name, series)
        if factor is None:
            return None
        low, high = (float(np.interp(progress, _TIMES, ends)) * factor for ends in (series.low, series.high))
        if quantity == _ENTROPY:  # attention to all tokens has more of it, attention to a few as much as before
            more = self._more_entropy(str(stack_of(name)))
            low, high = low * min(1.0, more), high * max(1.0, more)
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        below, above = (factor**self._leave for factor in JUDGED[quantity])
        return Bounds(low / below if math.isfinite(below) else 0.0, high * above, (low + high) / 2)

    def names(self) -> list[Name]:
        """The target's series that the band knows, in the proxy's order."""
        found = []
        for name, quantity in self._series:
            stack = stack_of(name)
            head, _, rest = name.partition(f"{stack}.layers.")
            layers = [f"{head}{stack}.layers.{layer}." for layer in range(self._layers.get(str(stack), 0)) if rest]
            named = [f"{layer}{rest.partition('.')[2]}".rstrip(".") for layer in layers] or [name]
            found += [(each, quantity) for each in named if self._in_proxy(each) == name]
        return found

    def _factor(self, name: str, series: SeriesOfProxy) -> float | None:
        said = _said(series.quantity, self._band.tensors.get(series.name), self._tensors.get(name))
        if said is None and series.exponent is not None:
            return 2.0 ** (series.exponent * self._octaves)
        return said

    def _more_entropy(self, stack: str) -> float:
        """By what uniform attention's entropy grows from the proxy's sequences to the target's."""
        there, here = (_entropy(stack, lengths.get(stack, 1)) for lengths in (self._band.lengths, self._lengths))
        return here / there if there and here else 1.0

    def _in_proxy(self, name: str) -> str:
        """The name of the proxy's layer at the same share of the depth."""
        stack = stack_of(name)
        if stack is None or stack not in self._band.layers or self._band.layers[stack] == self._layers.get(stack):
            return name
        head, _, rest = name.partition(f"{stack}.layers.")
        number, _, rest = rest.partition(".")
        last, of_proxy = self._layers[stack] - 1, self._band.layers[stack] - 1
        return f"{head}{stack}.layers.{round(int(number) * of_proxy / max(1, last))}.{rest}"


def _entropy(stack: str, length: int) -> float:
    """Of uniform attention, nats: the mean of log n over what a causal query sees, n = 1 to `length`; else its log."""
    return math.lgamma(length + 1) / length if stack == "decoder" else math.log(length)


def _lengths(table: Parametrization) -> dict[str, int]:
    """Tokens of a sequence, by stack."""
    training, stacks = table.config.training, table.config.model.stacks
    return {stack: training.decoder_length if stack == "decoder" else training.seq_length for stack in stacks}


def _said(quantity: str, of_proxy: TensorOfProxy | None, of_target: TensorOfProxy | None) -> float | None:
    """What the parametrization multiplies a series with from one width to another; None where it says nothing."""
    if quantity != UPDATE:
        return 1.0
    if of_proxy is None or of_target is None or of_proxy.rule != of_target.rule or of_target.rule not in _BY_RATE:
        return None
    return of_target.rate / of_proxy.rate


_TIMES = np.linspace(0.0, 1.0, POINTS)
_SETTLED = slice(POINTS // 5, None)
"""Points of the schedule that exponents are taken over."""


def make_band(
    runs: Mapping[str, Series], table: Parametrization, losses: Mapping[str, Sequence[float]] | None = None
) -> Band | None:
    """The band of a proxy's runs; None where none of them was read.

    Args:
        runs: readings of the best ones by the run's name.
        table: of the proxy, with the chosen values.
        losses: of all that are complete, by name: their bins (`LossBins`).
    """
    steps = table.config.training.train_steps
    at = [dict(_on_points(series, steps)) for series in runs.values() if series.steps]
    if not at:
        return None
    found = []
    for name, quantity in at[0]:
        values = np.array([each[name, quantity] for each in at if (name, quantity) in each])
        low, high = values.min(axis=0), values.max(axis=0)
        if quantity in JUDGED and np.isfinite(values).all():
            found.append(SeriesOfProxy(name=name, quantity=quantity, low=low.tolist(), high=high.tolist()))
    return Band(
        format=FORMAT,
        runs=list(runs),
        layers=_layers(table),
        tensors=_tensors(table),
        series=found,
        losses=[LossOfProxy(run=name, chosen=name in runs, losses=list(bins)) for name, bins in (losses or {}).items()],
        hidden_size=table.config.model.hidden_size,
        lengths=_lengths(table),
    )


def of_widths(bands: Sequence[Band]) -> Band:
    """The widest one's band; series that the parametrization says nothing of have their exponent, by least squares.

    Args:
        bands: of runs of models that differ in width alone, ascending.
    """
    widest = bands[-1]
    widths = [int(band.hidden_size or 0) for band in bands]
    by_name = [{(each.name, each.quantity): each for each in band.series} for band in bands]
    series = []
    for each in widest.series:
        own, there = widest.tensors.get(each.name), [found.get((each.name, each.quantity)) for found in by_name]
        exponent = None
        if _said(each.quantity, own, own) is None and None not in there:
            middles = [(np.array(one.low) + np.array(one.high))[_SETTLED] / 2 for one in there if one is not None]
            if all((middle > 0).all() for middle in middles):
                exponent = float(np.polyfit(np.log2(widths), [np.log2(middle).mean() for middle in middles], 1)[0])
        series.append(SeriesOfProxy(**{**dict(each), "exponent": exponent}))
    return Band(**{**dict(widest), "series": series, "widths": widths})


def band_of(table: Parametrization, path: Path, *, given: bool = False) -> BandOfTarget | None:
    """The band of a file in the numbers of a run; None for a run that is not in µP, and where there is no file.

    Args:
        table: of the run.
        path: of the file.
        given: whether somebody names the file, which then must be there.

    Raises:
        UserError: the file is no band, or `given` and not there.
    """
    if table.config.parametrization.name != "mup" or not (given or path.exists()):
        return None
    return Band.read(path).on(table)


def with_updates(found: Mapping[Name, float]) -> dict[Name, float]:
    """A reading, with `UPDATE` of each tensor beside what it was read from; without, where the step's rate is 0."""
    schedule = found.get(SCHEDULE, 0.0)
    updates = {
        (name, UPDATE): value * found[name, "weight rms"] / schedule
        for (name, quantity), value in found.items()
        if quantity == "update over weight" and (name, "weight rms") in found and schedule
    }
    return {**found, **updates}


def _on_points(series: Series, steps: int) -> Iterator[tuple[Name, np.ndarray]]:
    """Each series at the points of the schedule, between readings in a straight line."""
    times = np.array(series.steps) / steps
    readings = [
        with_updates({name: values[number] for name, values in series.values.items()})
        for number in range(len(series.steps))
    ]
    for name in readings[-1]:
        values = np.array([reading.get(name, math.nan) for reading in readings])
        told = np.isfinite(values)
        if told.any():
            yield name, np.interp(_TIMES, times[told], values[told])


def _layers(table: Parametrization) -> dict[str, int]:
    """Layers by stack."""
    numbers: dict[str, set[str]] = {}
    for name in table.tensors:
        if (stack := stack_of(name)) and name.startswith(f"{stack}.layers."):
            numbers.setdefault(stack, set()).add(name.removeprefix(f"{stack}.layers.").partition(".")[0])
    return {stack: len(found) for stack, found in numbers.items()}


def _tensors(table: Parametrization) -> dict[str, TensorOfProxy]:
    return {
        series_name(name): TensorOfProxy(rate=row.lr * float(row.theta), rule=str(row.group.update_rule))
        for name, row in table.tensors.items()
        if not row.shape.spec.frozen
    }
