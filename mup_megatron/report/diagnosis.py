"""Why a run's transfer may have failed: what its files say against it, the strongest first.

Public names: `Suspect`, `suspects`. Each suspect has its numbers, and the run that would decide it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.checkpoint import ALARMS, AUDIT, METRICS, TELEMETRY
from mup_megatron.report.parts import Audited, read_alarms, read_json, read_lines
from mup_megatron.report.run_data import Run, read_run
from mup_megatron.telemetry.series import read_series, series_name
from mup_megatron.tuning.outcome import open_sides
from mup_megatron.tuning.space import WIDTH
from mup_megatron.util.progress import about

_FEW_HEADS, _SHORT = 4, 1 / 20
_FAR = 4.0
_CLIPPED = 0.5
_NEAR_EPS = 10.0
_OF_LADDER, _OF_STABILITY = 12, 5
"""Runs of the proxy: of a ladder's smallest rungs with three values each, and of one width with five rates."""
_GAP = 0.3
"""Nats per token."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """One cause that the files speak for.

    Args:
        weight: how strongly, from 0 to 1; what must be wrong has 1.
        cause: in words.
        evidence: the numbers.
        decides: the run or command that would tell, and what it costs.
    """

    weight: float
    cause: str
    evidence: str
    decides: str


def suspects(directory: Path, proxy: Path | None = None) -> list[Suspect]:
    """What speaks against a run, the strongest first; nothing where nothing does.

    Args:
        directory: of the run.
        proxy: of the proxy's run, where the study does not have it.

    Raises:
        UserError: it is no run's folder, or a file in it is damaged.
    """
    run = read_run(directory)
    trial, costs = proxy if proxy is not None else _chosen_trial(directory, run), _Costs(run)
    found = [
        *_of_parametrization(run, costs),
        *_of_audit(directory, costs),
        *_of_alarms(directory, costs),
        *_of_values(run, costs),
        *_of_search(run, costs),
        *_of_size(run, costs),
        *_of_clipping(run, trial, costs),
        *_of_epsilon(directory, run, costs),
        *_of_memory(trial, costs),
    ]
    return sorted(found, key=lambda suspect: -suspect.weight)


class _Costs:
    """What the run that decides would take, by what such runs have taken here; without a time where nothing tells."""

    def __init__(self, run: Run) -> None:
        record, target = run.record, run.target
        self._study = record.budget.spent.process_seconds if record else 0.0
        trials = [trial.seconds for trial in record.study.trials if trial.state == "complete"] if record else []
        self._proxy = statistics.mean(trials) if trials else 0.0
        self._step = target.seconds / target.last if target and target.last else 0.0
        self._steps = int((run.config.get("training") or {}).get("train_steps") or 0)

    def study(self) -> str:
        """Another search of the same size."""
        return "a study" + _time(self._study, "of one process, as the last one")

    def proxies(self, count: int) -> str:
        """So many runs of the proxy."""
        return f"{count} proxies" + _time(count * self._proxy, "of one process")

    def target(self, since: int = 0) -> str:
        """The target from a step on, on as many devices as it had."""
        what = "what is left of the target" if since else "the target"
        return what + _time(max(0, self._steps - since) * self._step, "on the devices that it had")

    def steps(self, count: int) -> str:
        """So many steps of the target."""
        what = "one step" if count == 1 else f"{count} steps of the target"
        return what + _time(count * self._step, "on the devices that it had")


def _time(seconds: float, of_what: str) -> str:
    return f", {about(seconds)} {of_what}" if seconds else ""


def _chosen_trial(directory: Path, run: Run) -> Path | None:
    """The folder of the trial whose values the record has, where the study is this run's."""
    if run.record is None:
        return None
    slot = run.record.study.candidates[0].slot
    path = directory / "tuning" / f"trial-{slot:03d}"
    return path if path.exists() else None


def _of_parametrization(run: Run, costs: _Costs) -> Iterator[Suspect]:
    name = (run.config.get("parametrization") or {}).get("name", "mup")
    if name != "mup":
        yield Suspect(
            weight=1.0,
            cause="the run is not in µP",
            evidence=f"parametrization.name: {name}",
            decides=f"train with parametrization.name=mup; {costs.target()}",
        )


def _of_audit(directory: Path, costs: _Costs) -> Iterator[Suspect]:
    audit = read_json(directory / AUDIT, Audited)
    if audit is None:
        return
    wrong = [finding for finding in audit["findings"] if not finding["right"]]
    if wrong:
        first = wrong[0]
        yield Suspect(
            weight=1.0,
            cause="the first step was not the table's",
            evidence=f"{len(wrong)} wrong of {directory / AUDIT}: {first['quantity']} of {first['tensor']} "
            f"{first['found']}, expected {first['expected']}",
            decides=f"mend what the audit names, and start again; {costs.steps(1)}",
        )


def _of_alarms(directory: Path, costs: _Costs) -> Iterator[Suspect]:
    alarms = read_alarms(directory / ALARMS)
    exact = [alarm for alarm in alarms if alarm["quantity"] in ("rate", "decay")]
    for weight, cause, said in (
        (0.95, "an optimizer group has not had the table's rate or decay", exact),
        (0.6, "the target did not look as its proxy did", [alarm for alarm in alarms if alarm not in exact]),
    ):
        if said:
            yield Suspect(
                weight=weight,
                cause=cause,
                evidence=f"{len(said)} in {directory / ALARMS}, first {said[0]['quantity']} of {said[0]['name']} "
                f"since step {said[0]['since']}: {said[0]['cause']}",
                decides=f"resume from before step {said[0]['since']}; {costs.target(said[0]['since'])}",
            )


def _of_values(run: Run, costs: _Costs) -> Iterator[Suspect]:
    """Values that the target did not take from its record, or that changed on the way."""
    if run.record is not None and run.others:
        told = ", ".join(f"{name} {value}, tuned {run.record.values[name]}" for name, value in run.others.items())
        yield Suspect(
            weight=0.9,
            cause="the target has not trained with the tuned values",
            evidence=told,
            decides=f"train without these keys; {costs.target()}",
        )
    if run.target is not None and run.target.changes:
        change = run.target.changes[-1]
        yield Suspect(
            weight=0.7,
            cause="settings changed while the target trained",
            evidence=f"{len(run.target.changes)} changes, the last at step {change['step']}: {change['key']} "
            f"{change['before']} to {change['now']}",
            decides=f"go on from step {change['step']} without it; {costs.target(change['step'])}",
        )


def _of_search(run: Run, costs: _Costs) -> Iterator[Suspect]:
    """Values at an end of what was tried, and values that width does not keep."""
    if run.record is None:
        return
    study = run.record.study
    for name in study.interior:
        value, *tried = [
            float(each[name]) for each in (study.values, *(t.values for t in study.trials)) if name in each
        ]
        for side in open_sides(value, tried, study.ranges[name]):
            yield Suspect(
                weight=0.8 if name == "lr" else 0.65,
                cause=f"the best {name} may lie beyond what was tried",
                evidence=f"{value:.3g} chosen, {side.reach:.3g} the {'largest' if side.above else 'smallest'} tried, "
                f"the range ends at {side.end:.3g}",
                decides=f"tune with a range of {name} that goes on; {costs.study()}"
                if side.at_end
                else f"tune with more trials (tuning.trials), as {name} has room in its range; {costs.study()}",
            )
            break
    for said in run.record.target.not_transferred:
        yield Suspect(
            weight=0.35,
            cause="a value was tuned that µP does not move",
            evidence=said,
            decides=f"ladder --over weight_decay; {costs.proxies(_OF_LADDER)} or more",
        )


def _of_size(run: Run, costs: _Costs) -> Iterator[Suspect]:
    """Proxies that are small, and targets that are long."""
    if run.record is None:
        return
    sizes, trained = run.record.proxy.sizes, run.record.proxy.trained
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    if (hidden and hidden < WIDTH) or (heads and heads < _FEW_HEADS):
        yield Suspect(
            weight=0.45,
            cause="the proxy is narrow",
            evidence=f"hidden size {hidden}, {heads} heads; {WIDTH} and {_FEW_HEADS} or more are advised",
            decides="stability --across width, at the proxy's width and twice that; "
            f"{costs.proxies(_OF_STABILITY)} and as many twice as wide",
        )
    rules = run.config.get("parametrization") or {}
    training = run.config.get("training") or {}
    for name, rule in (("global_batch_size", "batch"), ("train_steps", "tokens"), ("seq_length", None)):
        small, large = trained.get(name), training.get(name)
        if not small or not large or small == large:
            continue
        ruled = rule is not None and rules.get(rule) not in (None, "none")
        times = max(small, large) / min(small, large)
        if times >= _FAR and not ruled:
            yield Suspect(
                weight=min(0.75, 0.4 + 0.08 * math.log2(times)),
                cause=f"{name} differs from what was tuned at, without a rule",
                evidence=f"{small:,} tuned, {large:,} in the target ({times:.3g} times)",
                decides=f"tune with tuning.seq_length {large}; {costs.study()}"
                if rule is None
                else f"ladder, which measures how the best rate moves with {name}; {costs.proxies(_OF_LADDER)} or more",
            )


def _share_clipped(path: Path, limit: float) -> float | None:
    lines = read_lines(path)
    norms = [line.get("grad_norm", 0.0) for line in lines[0]] if lines else []
    return sum(norm > limit for norm in norms) / len(norms) if norms and limit else None


def _of_clipping(run: Run, trial: Path | None, costs: _Costs) -> Iterator[Suspect]:
    training = run.config.get("training") or {}
    limit = float(training.get("clip_grad") or 0.0)
    share = _share_clipped(run.directory / METRICS, limit)
    if share is None or share < _CLIPPED:
        return
    of_proxy = None if trial is None else _share_clipped(trial / METRICS, limit)
    apart = of_proxy is not None and share - of_proxy > _CLIPPED / 2
    other = (
        "a larger training.clip_grad" if training.get("clip_norm") == "invariant" else "training.clip_norm=invariant"
    )
    yield Suspect(
        weight=0.7 if apart else 0.5,
        cause="clipping sets the size of updates",
        evidence=f"{share:.0%} of the target's steps are clipped at {limit:g}"
        + ("" if of_proxy is None else f", {of_proxy:.0%} of the proxy's"),
        decides=f"train with {other}; {costs.steps(300)}",
    )


def _of_epsilon(directory: Path, run: Run, costs: _Costs) -> Iterator[Suspect]:
    """Gradients that Adam's epsilon is not far below, by the last reading."""
    series = read_series(directory / TELEMETRY)
    explained = (run.explanation or {}).get("parameters", [])
    rows = {series_name(row["name"]): row["eps"] / row.get("theta", 1.0) for row in explained if row.get("eps")}
    near, seen = [], 0
    for (name, quantity), values in series.values.items():
        if quantity == "gradient rms" and name in rows and values and values[-1] > 0:
            seen += 1
            if values[-1] < _NEAR_EPS * rows[name]:
                near.append((values[-1] / rows[name], name))
    if near:
        times, name = min(near)
        yield Suspect(
            weight=0.4 + 0.35 * len(near) / seen,
            cause="Adam's epsilon is not small beside gradients",
            evidence=f"{len(near)} of {seen} tensors; {name}: gradients {times:.2g} times epsilon",
            decides=f"train with a smaller optimizer.eps, proxy and target; {costs.study()}, and {costs.target()}",
        )


def _of_memory(trial: Path | None, costs: _Costs) -> Iterator[Suspect]:
    """A proxy that knows its text by heart is tuned for that."""
    lines = None if trial is None else read_lines(trial / METRICS)
    if not lines or not lines[0] or not lines[1]:
        return
    last = lines[0][-20:]
    loss, evaluated = sum(line["loss"] for line in last) / len(last), lines[1][-1]["eval_loss"]
    if evaluated - loss > _GAP:
        yield Suspect(
            weight=0.6,
            cause="the proxy memorises its text",
            evidence=f"training loss {loss:.3f}, evaluation {evaluated:.3f}",
            decides=f"tune on more text; {costs.study()}",
        )


def lines_of(found: list[Suspect]) -> list[str]:
    """For a terminal."""
    if not found:
        return ["nothing in the run's files speaks against its transfer"]
    said: list[Any] = []
    for number, suspect in enumerate(found, start=1):
        said += [f"{number}. {suspect.cause}", f"   {suspect.evidence}", f"   decides: {suspect.decides}"]
    return said
