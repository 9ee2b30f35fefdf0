"""What values are worth in BLEU, after runs that are long enough to have one: the end of figure 5 of Tensor Programs V.

    python -m benchmarks.translation --output docs/evidence/translation-bleu        (runs/translation)

The target of configs/proof/translation-cost.yaml trains in µP with the values that are best on the proxy, in µP with
those that are best on the target itself (of docs/evidence/translation-cost, 60 runs each), and in the standard
parametrization with Megatron's initial deviation and the best of seven rates, each tried on the target. Each is judged
by BLEU of every validation pair that fits. Runs that were made are not made again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.records import FOLDER, Difference, difference
from benchmarks.quality import mup_megatron, overrides_of
from benchmarks.tuning_cost import Table
from mup_megatron.config import load_config
from mup_megatron.data.record import tokens_digest
from mup_megatron.report.pictures import load_pyplot, save_figure
from mup_megatron.util.provenance import provenance

CONFIG = "configs/proof/translation-cost.yaml"
TABLES = "translation-cost/cost.json"
RUNS = Path("runs/translation")
TARGET = {"proxy.hidden_size": 128, "proxy.ffn_hidden_size": 512}
"""Sizes of the model that a search on the target trains."""
STANDARD = {"parametrization.name": "standard", "hparams.init_method_std": 0.02}
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
LONG = {"training.train_steps": 2400, "training.eval_interval": 600, "training.eval_translations": 1000}
PROXY, OWN, TUNED = "µP, the proxy's best", "µP, the target's best", "standard, its best rate"
MODELS = {PROXY: "proxy", OWN: "target", TUNED: "standard"}
"""Of the tables: the name of a run's folder."""


def found_in_tables() -> dict[str, dict[str, float]]:
    """Values in µP that are best on the proxy, and on the target."""
    tables = json.loads((FOLDER / TABLES).read_text(encoding="utf-8"))["tables"]
    return {name: Table.again(points).best_point for name, points in zip((PROXY, OWN), tables, strict=True)}


def tuned_rate(workers: int) -> dict[str, Any]:
    """The record of a search for the standard parametrization's rate on the target, which is made first."""
    path = RUNS / "rates" / "transfer.json"
    if not path.is_file():
        choice = f"{{lr: {{choice: [{', '.join(map(str, RATES))}]}}}}"
        given = {"run.dir": RUNS / "rates", **TARGET, **STANDARD, "tuning.trials": len(RATES), "tuning.search": choice}
        mup_megatron("tune", CONFIG, *overrides_of(given), "--nproc-per-node", str(workers))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _last(run: Path) -> dict[str, Any] | None:
    """A run's evaluation after its last step, where it has come so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    ends = [line for line in map(json.loads, lines) if "bleu" in line and line["step"] == LONG["training.train_steps"]]
    return ends[-1] if ends else None


def judge(model: str, values: Mapping[str, float], seed: int) -> dict[str, Any]:
    """Trains the target, unless that was done, and gives its last evaluation."""
    run = RUNS / f"{MODELS[model]}-{seed}"
    given = {
        **LONG,
        **(STANDARD if model == TUNED else {}),
        **{f"hparams.{name}": each for name, each in values.items()},
    }
    if _last(run) is None:
        mup_megatron("train", CONFIG, *overrides_of({**given, "run.dir": run, "run.seed": seed}))
    if (last := _last(run)) is None:
        raise SystemExit(f"{run}: no evaluation after the last step")
    return {"model": model, "seed": seed, "values": given, "loss": last["eval_loss"], "bleu": last["bleu"]}


def figures_of(runs: Sequence[Mapping[str, Any]], model: str, name: str = "bleu") -> list[float]:
    """BLEU or the loss of a model, of each seed in order."""
    own = sorted((run for run in runs if run["model"] == model), key=lambda run: run["seed"])
    return [run[name] for run in own]


def ahead(runs: Sequence[Mapping[str, Any]], one: str, other: str) -> Difference:
    """BLEU by which the first model is above the second, over the seeds."""
    return difference(*(figures_of(runs, model) for model in (one, other)))


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """BLEU of every model: the mean over seeds as a bar, and each seed as a point."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(5, 2.2), layout="constrained")
    for at, model in enumerate(MODELS):
        seeds = figures_of(runs, model)
        axes.barh(at, statistics.fmean(seeds), color=f"C{at}", alpha=0.7)
        axes.plot(seeds, [at] * len(seeds), "o", color="0.2", ms=3)
    axes.set_yticks(range(len(MODELS)), list(MODELS))
    axes.invert_yaxis()
    axes.set_xlabel("BLEU of validation pairs (more is better)")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, trains, prints, writes bleu.json and bleu.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args(arguments)
    rates = tuned_rate(asked.workers)
    values = {**found_in_tables(), TUNED: {"lr": rates["values"]["lr"]}}
    with concurrent.futures.ThreadPoolExecutor(asked.workers) as pool:
        asks = itertools.product(range(1, asked.seeds + 1), MODELS)
        runs = list(pool.map(lambda ask: judge(ask[1], values[ask[1]], ask[0]), asks))
    config = load_config(CONFIG)
    result = {
        "provenance": provenance(tokens_digest(config)),
        "seeds": asked.seeds,
        "steps": LONG["training.train_steps"],
        "steps_of_searches": config.training.train_steps,
        "rates": {str(trial["values"]["lr"]): trial["loss"] for trial in rates["study"]["trials"]},
        "runs": runs,
    }
    for model in MODELS:
        print(f"{model}: BLEU {statistics.fmean(figures_of(runs, model)):.2f}")
    print(f"{PROXY} is {ahead(runs, PROXY, TUNED)} BLEU above {TUNED}")
    asked.output.mkdir(parents=True, exist_ok=True)
    (asked.output / "bleu.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    draw(runs, asked.output / "bleu.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
