"""What tuning costs: searches replayed on a recorded table of real runs, by the study that ships.

    mup-megatron tune configs/proof/tuning-cost.yaml --nproc-per-node 2    (the table: 280 runs of a proxy)
    python -m benchmarks.tuning_cost runs/proof/tuning-cost [--target RUN] --output docs/evidence/tuning-cost
    python -m benchmarks.tuning_cost --again docs/evidence/tuning-cost/cost.json --output DIR

After Tensor Programs V, figure 5. A replayed trial takes its losses from the table's nearest point and costs the
steps that it ran. A search has arrived when the best trial that it ran to the end is within 0.5 % of the best loss
there is. With a table of the target (of the same points or fewer, to which all keep), a search is judged by what its
values give there, and random search and TPE on the target itself are replayed beside. `--again` replays searches that
begin at known values (`tuning.prior`) on the table of an earlier result, beside the same search without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive, load_config
from mup_megatron.data.record import tokens_digest
from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.tuning.outcome import Trial
from mup_megatron.tuning.prior import with_prior
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.study import Study
from mup_megatron.util.provenance import provenance

GOAL = 0.005
PRIORS = ("configs/proof/english.yaml", "configs/proof/wide.yaml")
"""Configs whose `hparams:` were tuned on another text and at another width, from which a search may begin."""

CUTS = {4.0: "ranges cut to 4 times", 16.0: "cut to 16 times"}
"""How far about known values a search goes, by `tuning.prior_factor`; the last is the default."""


@dataclass(frozen=True)
class Method:
    """How a search goes on.

    Args:
        sampler, pruner: of `tuning:`.
        workers: trials whose values are chosen before any of them ends.
        prior: values at which it begins, as with `tuning.prior`.
        factor: `tuning.prior_factor`.
        fixed: values that it does not search.
    """

    sampler: str
    pruner: str = "none"
    workers: int = 1
    prior: Mapping[str, float] | None = None
    factor: float = 16.0
    fixed: Mapping[str, float] = field(default_factory=dict)


METHODS = {
    "random": Method("random"),
    "random, halving": Method("random", "successive_halving"),
    "random, hyperband": Method("random", "hyperband"),
    "TPE": Method("tpe"),
    "TPE, halving": Method("tpe", "successive_halving"),
    "TPE, halving, 8 workers": Method("tpe", "successive_halving", workers=8),
    "TPE, hyperband": Method("tpe", "hyperband"),
}

_MOST_RUNS = 400


@dataclass(frozen=True)
class Table:
    """Evaluation losses of a grid.

    Args:
        values: per hyperparameter the values that were run, ascending.
        steps: evaluated, ascending.
        losses: by point (one value of each) and step.
        flops: of one whole run.
    """

    values: Mapping[str, Sequence[float]]
    steps: Sequence[int]
    losses: Mapping[tuple[float, ...], Sequence[float]]
    flops: float

    @classmethod
    def of(cls, record: TransferRecord) -> Table:
        """From the record of a study whose sampler is the grid and whose pruner is none."""
        trials = [trial for trial in record.study.trials if not trial.repeats]
        names = list(record.tuned)
        values = {name: sorted({float(trial.values[name]) for trial in trials}) for name in names}
        steps = sorted({int(step) for trial in trials for step in trial.reports})
        losses = {
            tuple(float(trial.values[name]) for name in names): [
                _finite(trial.reports.get(str(step))) for step in steps
            ]
            for trial in trials
        }
        missing = math.prod(map(len, values.values())) - len(losses)
        if missing:
            raise SystemExit(f"the table lacks {missing} of its points")
        return cls(values, steps, losses, record.budget.spent.flops / len(trials))

    @classmethod
    def again(cls, points: Sequence[Mapping[str, Any]]) -> Table:
        """From what an earlier replay wrote down of it; its runs cost 1."""
        names = [name for name in points[0] if name != "losses"]
        steps = sorted({int(step) for point in points for step in point["losses"]})
        losses = {
            tuple(point[name] for name in names): [_finite(point["losses"].get(str(step))) for step in steps]
            for point in points
        }
        return cls({name: sorted({point[name] for point in points}) for name in names}, steps, losses, 1.0)

    def within(self, other: Table) -> Table:
        """What it holds of another table's points, all of which it has."""
        losses = {point: self.losses[point] for point in other.losses}
        return Table(other.values, self.steps, losses, self.flops)

    @classmethod
    def mean(cls, tables: Sequence[Table]) -> Table:
        """Of tables of the same points, one per seed; those behind the first may have fewer of its points."""
        losses: dict[tuple[float, ...], list[float]] = {}
        for point in tables[0].losses:
            known = [table.losses[point] for table in tables if point in table.losses]
            losses[point] = [statistics.fmean(each) for each in zip(*known, strict=True)]
        return cls(tables[0].values, tables[0].steps, losses, tables[0].flops)

    @property
    def best(self) -> float:
        """Lowest loss at the last step."""
        return min(losses[-1] for losses in self.losses.values())

    @property
    def best_point(self) -> dict[str, float]:
        """By hyperparameter, the values of the lowest loss at the last step."""
        best = min(self.losses, key=lambda point: self.losses[point][-1])
        return dict(zip(self.values, best, strict=True))

    def loss(self, values: Mapping[str, float], step: int) -> float:
        """At the nearest point of the grid, by the logarithm of every value."""
        near = (min(known, key=partial(_octaves, values[name])) for name, known in self.values.items())
        return self.losses[tuple(near)][self.steps.index(step)]


def _finite(loss: float | None) -> float:
    """A record says null where the loss was no finite number."""
    return math.inf if loss is None else loss


def _octaves(one: float, other: float) -> float:
    return abs(math.log2(one / other))


Search = list[tuple[float, float]]
"""Whenever another loss in the judging table was reached: cost in whole runs, and that loss."""


def replay(
    config: Config, table: Table, method: Method, seed: int, runs: int = _MOST_RUNS, budget: float = math.inf
) -> Iterator[tuple[float, Mapping[str, float]]]:
    """One search: after every trial what it has cost in whole runs, and the values of its best one so far.

    It ends after as many `runs`, or when it has cost the `budget`. Workers' trials that began together are paid for
    together.
    """
    beyond = [name for name, value in method.fixed.items() if not _inside(table.values[name], value)]
    if beyond:
        raise SystemExit(f"the table says nothing of the fixed {', '.join(beyond)}: beyond its points")
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        searched = {name: known for name, known in table.values.items() if name not in method.fixed}
        search = {name: {"log_uniform": [known[0], known[-1]]} for name, known in searched.items()}
        tuning = {"sampler": method.sampler, "pruner": method.pruner, "search": search, "trials": runs}
        keys = {f"tuning.{key}": value for key, value in tuning.items()}
        if method.prior is not None:
            known = {f"hparams.{name}": value for name, value in method.prior.items() if name in searched}
            keys |= {"tuning.prior": "hparams", "tuning.prior_factor": method.factor, **known}
        study = Study.create(with_prior(derive(config, {**keys, "run.dir": directory, "run.seed": seed})))
        cost, best, found = 0.0, math.inf, None
        while cost < budget and (trials := _claimed(study, method.workers)):
            for trial in trials:
                values = {**method.fixed, **trial.values}
                steps, loss = _run(study, trial, table, values)
                cost += steps / table.steps[-1]
                if loss is not None and loss < best:
                    best, found = loss, values
            if found is not None:
                yield cost, found
            study.plan(study.trials())


def _inside(known: Sequence[float], value: float) -> bool:
    return known[0] <= value <= known[-1]


def _claimed(study: Study, workers: int) -> list[Trial]:
    return [trial for _ in range(workers) if (trial := study.claim()) is not None]


def until_arrived(config: Config, table: Table, judge: Table, method: Method, seed: int, runs: int) -> Search:
    """A search that is ended by the judging table's loss, once that is within the goal."""
    found: Search = []
    for cost, values in replay(config, table, method, seed, runs):
        loss = judge.loss(values, judge.steps[-1])
        if not found or loss != found[-1][1]:
            found.append((cost, loss))
        if loss <= judge.best * (1 + GOAL):
            break
    return found


def _run(study: Study, trial: Trial, table: Table, values: Mapping[str, float]) -> tuple[int, float | None]:
    """Steps that the trial ran, and its loss if it ran them all."""
    for step in table.steps:
        loss = table.loss(values, step)
        if not study.survives(trial, step, loss):
            study.finish(trial, "stopped")
            return step, None
    study.finish(trial, "complete", loss=loss)
    return table.steps[-1], loss


def _needed(found: Search, goal: float) -> float | None:
    """Cost at which a search was within the goal, where its replay ends; None if it never was."""
    return found[-1][0] if found and found[-1][1] <= goal else None


def _searches(config: Config, proxy: Table, target: Table | None, seeds: int, runs: int) -> dict[str, dict[str, Any]]:
    jobs: dict[str, _Job] = {name: (proxy, method, 1.0) for name, method in METHODS.items()}
    if target is not None:
        for name in ("random", "TPE"):
            jobs[f"{name}, on the target"] = (target, METHODS[name], target.flops / proxy.flops)
    return _replayed(config, jobs, target or proxy, seeds, runs)


def _from_known_values(config: Config, table: Table, seeds: int, runs: int) -> dict[str, dict[str, Any]]:
    """The large configs' search, the same by 8 workers, and from the values of each of `PRIORS`."""
    method = METHODS["TPE, halving"]
    jobs: dict[str, _Job] = {name: (table, METHODS[name], 1.0) for name in ("TPE, halving", "TPE, halving, 8 workers")}
    for path, (factor, what) in itertools.product(PRIORS, CUTS.items()):
        prior = known_values(path, table.values)
        jobs[f"TPE, halving, from {path}, {what}"] = (table, replace(method, prior=prior, factor=factor), 1.0)
    return _replayed(config, jobs, table, seeds, runs)


def known_values(path: str, names: Iterable[str]) -> dict[str, float]:
    """Of a config's `hparams:`."""
    known = load_config(Path(path)).hparams
    return {name: float(getattr(known, name)) for name in names}


_Job = tuple[Table, Method, float]
"""Table, method, and what a run costs."""


def _replayed(
    config: Config, jobs: Mapping[str, _Job], judge: Table, seeds: int, runs: int
) -> dict[str, dict[str, Any]]:
    searches = {}
    with Pool() as pool:
        for name, (table, method, unit) in jobs.items():
            job = partial(until_arrived, config, table, judge, method, runs=runs)
            curves = [[(cost * unit, loss) for cost, loss in found] for found in pool.imap(job, range(1, seeds + 1))]
            needed = [_needed(found, judge.best * (1 + GOAL)) for found in curves]
            arrived = sorted(cost for cost in needed if cost is not None)
            searches[name] = {
                "needed": needed,
                "curves": curves,
                "mean": statistics.fmean(arrived) if arrived else None,
            }
            print(f"{name}: {_said(needed)}", flush=True)
    return searches


def _said(needed: Sequence[float | None]) -> str:
    arrived = sorted(cost for cost in needed if cost is not None)
    if not arrived:
        return f"none of {len(needed)} arrived"
    return (
        f"mean {statistics.fmean(arrived):.1f}, median {statistics.median(arrived):.1f}, {arrived[0]:.1f} to "
        f"{arrived[-1]:.1f} proxy runs, {len(arrived)} of {len(needed)} arrived"
    )


def draw(searches: Mapping[str, Mapping[str, Any]], best: float, path: Path) -> None:
    """Median over seeds of the best trial's excess loss, over the cost."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8.6, 4.2), layout="constrained")
    colors = pyplot.get_cmap("tab10")
    longest = max(cost for search in searches.values() for curve in search["curves"] for cost, _ in curve)
    costs = [2 ** (step / 8) for step in range(math.ceil(8 * math.log2(longest)) + 1)]
    for number, (name, search) in enumerate(searches.items()):
        excess = [statistics.median(_at(curve, cost) / best - 1 for curve in search["curves"]) for cost in costs]
        shown = [(cost, 100 * value) for cost, value in zip(costs, excess, strict=True) if math.isfinite(value)]
        axes.plot(*zip(*shown, strict=True), color=colors(number), lw=1.6, drawstyle="steps-post", label=name)
    axes.axhline(100 * GOAL, color="0.4", lw=1, ls="--")
    axes.text(costs[0], 100 * GOAL, f" {100 * GOAL:.1f} %", va="bottom", fontsize=8, color="0.4")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("compute, in whole runs of the proxy")
    axes.set_ylabel("loss above the best there is, %")
    axes.set_title(f"Median of {len(next(iter(searches.values()))['curves'])} searches", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path)


def _at(curve: Search, cost: float) -> float:
    return next((loss for spent, loss in reversed(curve) if spent <= cost), math.inf)


def points_of(record: TransferRecord) -> Iterator[dict[str, Any]]:
    """Of a table, as a result keeps it: values and losses by step."""
    for trial in record.study.trials:
        yield {**{name: trial.values[name] for name in record.tuned}, "losses": trial.reports}


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays, prints, writes cost.json and cost.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="run.dir of the proxy's table")
    parser.add_argument("--again", type=Path, metavar="FILE", help="cost.json of an earlier replay, instead of a run")
    parser.add_argument("--target", type=Path, metavar="RUN", help="run.dir of the target's table")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--runs", type=int, default=_MOST_RUNS, help="trials after which a search gives up")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    if (asked.run is None) is (asked.again is None) or (asked.again and asked.target):
        parser.error("expected RUN (and --target), or --again FILE")
    if asked.again is not None:
        earlier = json.loads(asked.again.read_text(encoding="utf-8"))
        config, table = load_config(Path("configs/proof/tuning-cost.yaml")), Table.again(earlier["tables"][0])
        searches = _from_known_values(config, table, asked.seeds, asked.runs)
        _write(asked.output, searches, table.best, [], asked.seeds, {"provenance": provenance(None)})
        return 0
    records = [TransferRecord.expect(run / "transfer.json", None) for run in (asked.run, asked.target) if run]
    tables = [Table.of(record) for record in records]
    proxy, target = tables[0], tables[1] if len(tables) > 1 else None
    if target is not None:
        proxy = proxy.within(target)
    config = load_config(asked.run / "config.yaml")
    searches = _searches(config, proxy, target, asked.seeds, asked.runs)
    points = [list(points_of(record)) for record in records]
    said = {"provenance": provenance(tokens_digest(config))}
    _write(asked.output, searches, (target or proxy).best, points, asked.seeds, said)
    return 0


def _write(
    folder: Path, searches: Mapping[str, Any], best: float, tables: Sequence[Any], seeds: int, said: Mapping[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = {"goal": GOAL, "best": best, "seeds": seeds, "searches": searches, "tables": tables, **said}
    (folder / "cost.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    draw(searches, best, folder / "cost.png")


if __name__ == "__main__":
    sys.exit(main())
