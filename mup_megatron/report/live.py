"""A run while it goes on, read from its files. Public names: `Live`, `Watched`, `lines_of`, `page_of`.

Of metrics.jsonl the end is read, and the lines at so many places: it may have hundreds of thousands of steps. Where
there is a forecast, each line is read once more.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.checkpoint import ALARMS, METRICS, TELEMETRY
from mup_megatron.config import Config, derive, load_config
from mup_megatron.report.parts import Evaluation, Explanation, WatchedStep, checked, read_alarms, read_json
from mup_megatron.telemetry.alarms import READINGS
from mup_megatron.telemetry.band import BandOfTarget, band_of, with_updates
from mup_megatron.telemetry.forecast import LossBins
from mup_megatron.telemetry.series import read_series
from mup_megatron.tuning.predicted import in_words
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import json_line, open_regular
from mup_megatron.util.progress import time_left

_PLACES = 200
_TAIL = 64 * 1024
_RECENT = 20
_WORST = 10
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A series beside its band.

    Args:
        name: of the module or tensor.
        quantity: that is measured.
        value: at the last reading.
        low: the least that it may be.
        high: the greatest.
    """

    name: str
    quantity: str
    value: float
    low: float
    high: float

    @property
    def room(self) -> float:
        """How far it is from the nearer bound, as a factor; below 1 where it is outside."""
        above = self.high / self.value if self.value > 0 else math.inf
        below = self.value / self.low if self.low > 0 else math.inf
        return min(above, below)


@dataclass(frozen=True, kw_only=True)
class Live:
    """What a run's files say now.

    Args:
        name: of the run.
        step: updates done.
        steps: of the whole run; None where nothing tells.
        loss: of the last step, nats per token; None before the first.
        eval_loss: of the last evaluation.
        tokens_per_second: tokens of the last steps by their seconds.
        left: `, about 3 min left`, or nothing.
        curve: (step, loss) at evenly spaced places of the file.
        forecast: of the loss at the end, in words; empty where there is none.
        read: step of the last reading; None before the first.
        rows: the series that are nearest to the bounds of their band, or outside.
        no_band: what keeps the rows from having one, in words; empty where there is one.
        alarms: the last ones, newest first.
    """

    name: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float = 0.0
    left: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    forecast: str = ""
    read: int | None = None
    rows: list[Row] = field(default_factory=list)
    no_band: str = ""
    alarms: list[dict[str, Any]] = field(default_factory=list)


class Watched:
    """A run's folder, looked at again and again.

    Args:
        directory: of the run.

    Raises:
        UserError: there is no run, or its band is none.
    """

    def __init__(self, directory: Path) -> None:
        if not any((directory / name).exists() for name in (METRICS, TELEMETRY)):
            raise UserError(f"{directory}: neither {METRICS} nor {TELEMETRY} is there; expected the folder of a run")
        self._directory = directory
        path = directory / "config.yaml"
        # A run that was moved, or is looked at from another working directory, is no longer at its `run.dir`.
        self._config = derive(load_config(str(path)), {"run.dir": str(directory)}) if path.exists() else None
        self._band = None if self._config is None else _band_of(self._config)
        self._losses: _Losses | None = None
        self._predicted = _predicted(directory / "explain.json")

    def now(self) -> Live:
        """What the files say now; lines that are being written are left out."""
        steps, evaluations = _tail(self._directory / METRICS)
        recent = steps[-_RECENT:]
        total = None if self._config is None else self._config.training.train_steps
        done = steps[-1]["step"] if steps else 0
        seconds = sum(line.get("seconds", 0.0) for line in recent)
        tokens = sum(line.get("tokens_per_second", 0.0) * line.get("seconds", 0.0) for line in recent)
        alarms = read_alarms(self._directory / ALARMS)
        read, rows = self._rows(total)
        return Live(
            name=self._directory.name if self._config is None else self._config.run.name,
            step=max(done, read or 0),
            steps=total,
            loss=steps[-1]["loss"] if steps else None,
            eval_loss=evaluations[-1]["eval_loss"] if evaluations else None,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            left=time_left(len(recent), seconds, (total or done) - done),
            curve=_curve(self._directory / METRICS),
            forecast=self._forecast(total),
            read=read,
            rows=rows,
            no_band="" if self._band is not None else self._no_band(),
            alarms=alarms[::-1][:_WORST],
        )

    def _no_band(self) -> str:
        config = self._config
        if config is None or not (config.watch.band or config.tuning.record) or config.band_path.exists():
            return "no band of a proxy"
        return f"its band {config.band_path} is not there"

    def _forecast(self, steps: int | None) -> str:
        """By the proxy's curves, and by a ladder's law where there was one."""
        said = []
        if steps is not None and self._band is not None:
            if self._losses is None:
                self._losses = _Losses(self._directory / METRICS, steps)
            bins = self._losses.bins()
            full = bins.full()
            told = self._band.forecast.at_end(full)
            if told is not None and bins.last < steps:
                said.append(
                    f"the loss will end at {told.loss:.3f} ± {told.half:.3f} (90 %, by {self._band.forecast.runs} runs "
                    "of the proxy)"
                )
            above = self._band.forecast.above(full)
            if len(above) >= READINGS:  # as the alarm has it
                place, told = above[0][0], above[-1][1]
                said.append(
                    f"since step {bins.first_step(place):,} it is above its forecast, now by {full[-1] - told.loss:.3f}"
                )
        if self._predicted is not None:
            said.append(f"the ladder's law has {self._predicted}")
        return "; ".join(said)

    def _rows(self, steps: int | None) -> tuple[int | None, list[Row]]:
        series = read_series(self._directory / TELEMETRY)
        if not series.steps:
            return None, []
        step = series.steps[-1]
        found = with_updates({name: values[-1] for name, values in series.values.items()})
        rows = []
        for (name, quantity), value in found.items():
            bounds = self._band(name, quantity, step / steps) if self._band is not None and steps else None
            if bounds is not None and math.isfinite(value):
                rows.append(Row(name=name, quantity=quantity, value=value, low=bounds.low, high=bounds.high))
        return step, sorted(rows, key=lambda row: row.room)[:_WORST]


class _Losses:
    """The bins of a metrics.jsonl that grows; what was read is not read again.

    Args:
        path: of the file.
        steps: of the whole run.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._file, self._at, self._bins = 0, 0, LossBins(steps)

    def bins(self) -> LossBins:
        """Of the lines that are whole."""
        if not self._path.exists():
            return self._bins
        with open_regular(self._path) as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._at:  # `cut_lines` has put another in its place
                self._file, self._at, self._bins = found.st_ino, 0, LossBins(self._steps)
            file.seek(self._at)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self._at += len(text)
                self._bins.add_line(json_line(text))
        return self._bins


def _predicted(path: Path) -> str | None:
    """What a ladder's law has of the loss, as the run wrote it when it began."""
    found = (read_json(path, Explanation) or {}).get("predicted")
    return None if found is None else in_words(found)


def _band_of(config: Config) -> BandOfTarget | None:
    """The band in the target's numbers; the model's table takes seconds, once, where there is one."""
    if not config.band_path.exists():
        return None
    from mup_megatron.data.prepare import known_vocab_size
    from mup_megatron.parallel import upstream

    upstream.prepare_process()
    from mup_megatron.model.build import parametrize

    return band_of(parametrize(config, known_vocab_size(config)), config.band_path)


def _tail(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The last lines of steps, and of evaluations."""
    if not path.exists():
        return [], []
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        found = [json_line(line) for line in file.read().split(b"\n")]
    steps = [checked(WatchedStep, line, path) for line in found if "loss" in line]
    return steps, [checked(Evaluation, line, path) for line in found if "eval_loss" in line]


def _curve(path: Path) -> list[tuple[int, float]]:
    """Steps and losses at evenly spaced places of metrics.jsonl."""
    if not path.exists():
        return []
    found: dict[int, float] = {}
    size = path.stat().st_size
    with open_regular(path) as file:
        for place in range(_PLACES):
            file.seek(size * place // _PLACES)
            if place:
                file.readline()  # the rest of a line
            for _ in range(2):  # one may be an evaluation
                line = json_line(file.readline())
                if isinstance(line.get("loss"), float):
                    found[line["step"]] = line["loss"]
                    break
    return sorted(found.items())


def bars(curve: Sequence[tuple[int, float]], width: int) -> str:
    """A curve as one line of bars; what is no finite number is an x."""
    chosen = [curve[number * len(curve) // width][1] for number in range(min(width, len(curve)))]
    chosen = chosen if len(curve) >= width else [value for _, value in curve]
    told = [value for value in chosen if math.isfinite(value)]
    if not told:
        return "x" * len(chosen)
    low, span = min(told), (max(told) - min(told)) or 1.0
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else "x" for value in chosen
    )


def _head(live: Live) -> list[str]:
    of = f"/{live.steps:,}" if live.steps else ""
    loss = "" if live.loss is None else f"  loss {live.loss:.4f}"
    evaluated = "" if live.eval_loss is None else f"  evaluation {live.eval_loss:.4f}"
    speed = f"  {live.tokens_per_second:,.0f} tokens/s" if live.tokens_per_second else ""
    said = [f"{live.name}  step {live.step:,}{of}{loss}{evaluated}{speed}{live.left}"]
    if live.read is None:
        said.append("no reading yet (run.telemetry_interval)")
    elif live.no_band:
        said.append(f"read at step {live.read:,}; {live.no_band}, so only alarms are shown")
    else:
        said.append(f"read at step {live.read:,}; the {len(live.rows)} series that are nearest to their bounds:")
    return [*said, live.forecast]


def lines_of(live: Live, width: int = 100) -> list[str]:
    """For a terminal.

    Args:
        live: what the files say.
        width: columns.
    """
    first, second, forecast = _head(live)
    said = [first, bars(live.curve, min(width, 80)), *([forecast] if forecast else []), second]
    for row in live.rows:
        mark = "!" if row.room < 1 else " "
        bounds = f"{row.low:.3g} to {row.high:.3g}"
        said.append(f"{mark} {row.value:<10.4g} {bounds:<22} {row.quantity} of {row.name}")
    said += [f"alarm at step {alarm['step']}: {_told(alarm)}" for alarm in live.alarms]
    return said if live.alarms else [*said, "no alarm"]


def _told(alarm: dict[str, Any]) -> str:
    value = "no number" if alarm["value"] is None else f"{alarm['value']:.3g}"
    return f"{alarm['quantity']} of {alarm['name']} is {value}, since step {alarm['since']}: {alarm['cause']}"


def page_of(live: Live, seconds: float) -> str:
    """A page that loads itself again.

    Args:
        live: what the files say.
        seconds: until it does.
    """
    first, second, forecast = (html.escape(line) for line in _head(live))
    rows = "".join(
        f'<tr class="{"out" if row.room < 1 else "in"}"><td>{html.escape(row.quantity)}</td>'
        f"<td>{html.escape(row.name)}</td><td>{row.value:.4g}</td><td>{row.low:.3g}</td><td>{row.high:.3g}</td></tr>"
        for row in live.rows
    )
    alarms = "".join(f"<li>step {alarm['step']}: {html.escape(_told(alarm))}</li>" for alarm in live.alarms)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{seconds:g}">'
        f"<title>{html.escape(live.name)}</title><style>body{{font:15px sans-serif;margin:2em;max-width:70em}}"
        "td,th{padding:.2em .8em;text-align:left}.out{background:#fdd}svg{width:100%;height:16em;background:#f7f7f7}"
        f"</style></head><body><h1>{first}</h1>{_drawn(live.curve)}<p>{forecast}</p><p>{second}</p>"
        "<table><tr><th>quantity</th><th>of</th><th>value</th><th>least</th><th>greatest</th></tr>"
        f"{rows}</table><h2>Alarms</h2><ul>{alarms or '<li>none</li>'}</ul></body></html>"
    )


def _drawn(curve: Sequence[tuple[int, float]]) -> str:
    """The loss over steps, as SVG."""
    told = [(step, loss) for step, loss in curve if math.isfinite(loss)]
    if len(told) < 2:
        return ""
    low, high = min(loss for _, loss in told), max(loss for _, loss in told)
    first, last = told[0][0], told[-1][0]
    points = " ".join(
        f"{1000 * (step - first) / (last - first):.1f},{200 - 190 * (loss - low) / ((high - low) or 1):.1f}"
        for step, loss in told
    )
    return (
        '<svg viewBox="0 0 1000 210" preserveAspectRatio="none" role="img" '
        f'aria-label="loss from {high:.4g} to {low:.4g}"><polyline fill="none" stroke="#05c" stroke-width="2" '
        f'points="{points}"/></svg><p>loss, {high:.4f} to {low:.4f}, steps {first:,} to {last:,}</p>'
    )
