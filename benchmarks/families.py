"""What tuning costs in other families, from known values and without, judged on the proxy and on a wider target.

    mup-megatron tune configs/proof/tuning-cost-moe.yaml --nproc-per-node 2      (a table)
    python -m benchmarks.families PROXY... --target TARGET... --output docs/evidence/tuning-cost-moe
    python -m benchmarks.families --again docs/evidence/tuning-cost-moe/cost.json --only ...   (more, on its tables)

Tables are `run.dir`s of grids, one per seed. A search sees the table of one seed, as a user does, and goes on until it
has cost `--budget` whole runs; no loss that it cannot see ends it. What counts is the loss of its best trial's values,
as the mean over seeds has it: on the proxy, and on the target, of the same points; seeds behind the first may have
fewer of them, near the best. A search has arrived where its values are within the goal of the best there is, and stay
so until its end. Costs are in whole runs of the proxy, also those of searches on the target itself. With tables of
widths between (`--wider`), a telescoping search goes through the proxy and them (2505.02222): each has the same share
of the budget, about the values that the narrower one gave.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from benchmarks.tuning_cost import CUTS, PRIORS, Method, Search, Table, known_values, points_of, replay
from mup_megatron.config import Config, load_config
from mup_megatron.data.record import tokens_digest
from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.util.provenance import provenance

GOALS = (0.005, 0.001)
GPT3 = Path("docs/evidence/tuning-cost/cost.json")
"""Where the best values of another family stand: those of the point of the lowest loss."""

TPE_HALVING = Method("tpe", "successive_halving")
DIRECT = {"random": Method("random"), "TPE": Method("tpe"), "TPE, halving": TPE_HALVING}
"""Searches that are replayed on the target too."""

ON_TARGET = ", on the target"

REFINED = 4.0
"""How far a telescoping search goes about the values of the width before, as `tuning.prior_factor`."""


@dataclass(frozen=True)
class Stage:
    """A width of a search.

    Args:
        tables: of one model, by seed.
        unit: what a run costs, in whole runs of the proxy.
        budget: what it may cost, in the same.
    """

    tables: Sequence[Table]
    unit: float
    budget: float


def methods(names: Sequence[str]) -> dict[str, Method]:
    """The searches that are compared."""
    points = json.loads(GPT3.read_text(encoding="utf-8"))["tables"][0]
    gpt3 = Table.again(points).best_point
    priors = {f"{GPT3.parent}": gpt3, **{path: known_values(path, names) for path in PRIORS}}
    others = {name: value for name, value in gpt3.items() if name != "lr"}
    found = {
        **DIRECT,
        f"TPE, halving, the rate alone, the others from {GPT3.parent}": replace(TPE_HALVING, fixed=others),
    }
    for path, prior in priors.items():
        for factor, what in {**CUTS, 1e9: "not cut"}.items():
            found[f"TPE, halving, from {path}, {what}"] = replace(TPE_HALVING, prior=prior, factor=factor)
    return found


def searched(
    config: Config, stages: Sequence[Stage], method: Method, seed: int
) -> Iterator[tuple[float, Mapping[str, float]]]:
    """One search through the stages: after every trial what all have cost, and the best values of the last one."""
    spent, values = 0.0, None
    for stage in stages:
        own = method if values is None else replace(method, prior=values, factor=REFINED)
        table, before = stage.tables[seed % len(stage.tables)], spent
        for cost, values in replay(config, table, own, seed, budget=stage.budget / stage.unit):
            spent = before + cost * stage.unit
            yield spent, values


def judged(
    config: Config, stages: Sequence[Stage], judges: Mapping[str, Table], method: Method, seed: int
) -> dict[str, Search]:
    """One search, by each judge."""
    found = list(searched(config, stages, method, seed))
    return {
        name: [(cost, judge.loss(values, judge.steps[-1])) for cost, values in found] for name, judge in judges.items()
    }


def stays(search: Search, bound: float) -> float | None:
    """Cost from which on its values are within the bound until its end; None if they are not."""
    cost = None
    for spent, loss in search:
        cost = None if loss > bound else spent if cost is None else cost
    return cost


def _summary(curves: Sequence[Search], best: float) -> dict[str, Any]:
    """Per goal what each search needed, with the median over all of them; and how far above the best they end."""
    goals = {}
    for goal in GOALS:
        needed = [stays(curve, best * (1 + goal)) for curve in curves]
        median = statistics.median_low(math.inf if cost is None else cost for cost in needed)
        arrived = [cost for cost in needed if cost is not None]
        goals[f"{100 * goal:g} %"] = {
            "arrived": len(arrived),
            "mean": statistics.fmean(arrived) if arrived else None,
            "median": median if math.isfinite(median) else None,
        }
    return {"goals": goals, "ends": statistics.median(curve[-1][1] / best - 1 for curve in curves)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays, prints, writes cost.json and cost.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proxy", type=Path, nargs="*", help="run.dir of a table of the proxy, one per seed")
    parser.add_argument("--target", type=Path, nargs="+", help="run.dir of a table of the target, one per seed")
    parser.add_argument("--wider", type=Path, nargs="+", default=[], help="run.dir of tables between, narrowest first")
    parser.add_argument("--again", type=Path, metavar="FILE", help="cost.json of an earlier replay, instead of these")
    parser.add_argument("--config", type=Path, help="of --again's tables; that of its folder's name unless given")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="searches, of those that are known")
    parser.add_argument("--seeds", type=int, default=100, help="searches of each kind")
    parser.add_argument("--budget", type=float, default=60.0, help="whole runs, after which a search ends")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    if bool(asked.proxy and asked.target) is (asked.again is not None):
        parser.error("expected PROXY... --target TARGET..., or --again FILE")
    points: dict[str, list[Any]] = {}
    if asked.again is not None:
        earlier = json.loads(asked.again.read_text(encoding="utf-8"))
        tables = {name: [Table.again(each) for each in found] for name, found in earlier["tables"].items()}
        units = earlier.get("costs", {})
        config = load_config(asked.config or Path(f"configs/proof/{asked.again.parent.name}.yaml"))
    else:
        runs = {"proxy": asked.proxy, "target": asked.target, "wider": asked.wider}
        records = {
            name: [TransferRecord.expect(run / "transfer.json", None) for run in each] for name, each in runs.items()
        }
        tables = {name: [Table.of(record) for record in each] for name, each in records.items()}
        points = {name: [list(points_of(record)) for record in each] for name, each in records.items()}
        units = {name: [table.flops / tables["proxy"][0].flops for table in each] for name, each in tables.items()}
        config = load_config(asked.proxy[0] / "config.yaml")
    judges = {name: Table.mean(tables[name]) for name in ("target", "proxy")}
    chosen = jobs(tables, units, asked.budget)
    if unknown := set(asked.only or ()) - chosen.keys():
        parser.error(f"--only: {', '.join(unknown)}: expected some of {'; '.join(chosen)}")
    searches: dict[str, dict[str, Any]] = {name: {} for name in judges}
    with Pool() as pool:
        for name, (stages, method) in chosen.items():
            if asked.only and name not in asked.only:
                continue
            found = pool.map(partial(judged, config, stages, judges, method), range(asked.seeds), chunksize=1)
            for judge, table in judges.items():
                told = _summary([each[judge] for each in found], table.best)
                searches[judge][name] = told
                print(f"{name}, on the {judge}: {told['goals']}, ends {100 * told['ends']:.2f} % above", flush=True)
    asked.output.mkdir(parents=True, exist_ok=True)
    result = {
        "budget": asked.budget,
        "seeds": asked.seeds,
        "costs": units,
        "best": {name: {**judge.best_point, "loss": judge.best} for name, judge in judges.items()},
        "searches": searches,
        "tables": points,
        "provenance": provenance(None if asked.again else tokens_digest(config)),
    }
    (asked.output / "cost.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    draw(result, asked.output / "cost.png")
    return 0


def jobs(
    tables: Mapping[str, Sequence[Table]], units: Mapping[str, Sequence[float]], budget: float
) -> dict[str, tuple[Sequence[Stage], Method]]:
    """The searches that are known, and what each trains: the proxy, the target, or widths up to the target's.

    An earlier result may not say what runs of the target cost; then those on it are left out.
    """
    proxy = tables["proxy"]
    found: dict[str, tuple[Sequence[Stage], Method]] = {
        name: ([Stage(proxy, 1.0, budget)], method) for name, method in methods(list(proxy[0].values)).items()
    }
    if "target" in units:
        unit = units["target"][0]
        whole = [table for table in tables["target"] if len(table.losses) == len(tables["target"][0].losses)]
        direct = Stage(whole, unit, unit * budget)
        found |= {f"{name}{ON_TARGET}": ([direct], method) for name, method in DIRECT.items()}
    if wider := tables.get("wider"):
        share = budget / (1 + len(wider))
        between = [Stage([table], each, share) for table, each in zip(wider, units["wider"], strict=True)]
        found["TPE, halving, telescoping"] = ([Stage(proxy, 1.0, share), *between], TPE_HALVING)
    return found


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Of a result, by each judge, what the median search needed within each goal; at the right those that never are.

    What a search of the target finds is judged by the target alone.
    """
    pyplot = load_pyplot()
    judges = ("proxy", "target")
    figure, all_axes = pyplot.subplots(
        1, len(judges), figsize=(9.6, 4.4), sharex=True, sharey=True, layout="constrained"
    )
    names = list(result["searches"]["proxy"])
    all_ = (told for judge in judges for told in result["searches"][judge].values())
    never = 2 * max(result["budget"], *(goal["median"] or 0 for told in all_ for goal in told["goals"].values()))
    for axes, judge in zip(all_axes, judges, strict=True):
        of_judge = {
            place: result["searches"][judge][name]["goals"]
            for place, name in enumerate(names)
            if judge == "target" or not name.endswith(ON_TARGET)
        }
        for goal, marker in zip((f"{100 * goal:g} %" for goal in GOALS), ("o", "D"), strict=True):
            needed = [goals[goal]["median"] or never for goals in of_judge.values()]
            axes.plot(
                needed, list(of_judge), marker, label=f"within {goal}", ms=6, mfc="none" if marker == "D" else None
            )
        axes.axvline(result["budget"], color="0.4", lw=1, ls="--")
        axes.text(never, -1.0, "never", ha="center", fontsize=8, color="0.4")
        axes.set_xscale("log", base=2)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(len(names) - 0.5, -1.6)
        axes.set_xlabel("median, in runs of the proxy")
        axes.set_title(f"as the {judge} judges", loc="left", fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*all_axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside upper left")
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
