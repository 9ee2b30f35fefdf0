"""What tuning costs and gains: searches, transferred values, reverse transfer. Tables, and what follows."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from benchmarks import translation
from benchmarks.evidence.records import Difference, Rows, record
from benchmarks.quality import BITS, FIGURES, KINDS, SIZES, TWICE, ahead, error_of, figures_of

_SEARCHES = {
    "random": "random",
    "random, halving": "random, successive halving",
    "random, hyperband": "random, hyperband",
    "TPE": "TPE",
    "TPE, halving": "TPE, successive halving (what `configs/gpt3`, `llama` and `deepseek` use)",
    "TPE, hyperband": "TPE, hyperband",
}
_JUDGED = {
    "random, on the target": "random, on the target",
    "TPE, on the target": "TPE, on the target",
    "random": "random, on the proxy",
    "TPE": "TPE, on the proxy",
    "random, halving": "random with halving, on the proxy",
    "TPE, halving": "TPE with halving, on the proxy",
}
TARGET, TRANSLATION = "tuning-cost-target/cost.json", "translation-cost/cost.json"
QUALITY, BLEU = "quality/quality.json", "translation-bleu/bleu.json"
_WHERE = {-1: "lower than", 0: "not told apart from", 1: "higher than"}

Curve = Sequence[tuple[float, float]]


def searching() -> Rows:
    """Compute until a search arrived."""
    found = record("tuning-cost/cost.json")["searches"]
    return _arrivals(found, _SEARCHES, found["random"]["mean"])


def from_known_values() -> Rows:
    """The same of searches that begin at known values, beside those that do not."""
    found = record("tuning-cost-prior/cost.json")["searches"]
    random = record("tuning-cost/cost.json")["searches"]["random"]["mean"]
    return _arrivals(found, {name: shown(name) for name in found}, random)


def shown(name: str) -> str:
    """A search as tables name it."""
    return re.sub(r"(?:configs|docs)/[^\s,]+", r"`\g<0>`", name.replace(", halving", " with halving"))


def _arrivals(found: Mapping[str, Any], names: Mapping[str, str], whole: float) -> Rows:
    rows = [["search", "arrived", "mean", "median", "share of random search's mean"]]
    for name, what in names.items():
        needed = [cost for cost in found[name]["needed"] if cost is not None]
        mean = statistics.fmean(needed)
        share = "1" if name == "random" else f"{mean / whole:.2f}"
        arrived = f"{len(needed)} of {len(found[name]['needed'])}"
        rows.append([what, arrived, f"{mean:.1f}", f"{statistics.median(needed):.1f}", share])
    return rows


def said_of_searching() -> str:
    """How many points of the table are within the goal."""
    found = record("tuning-cost/cost.json")
    losses = [last_loss(each) for each in found["tables"][0]]
    near = sum(loss <= found["best"] * (1 + found["goal"]) for loss in losses)
    return (
        f"A search has arrived when its best trial is within {100 * found['goal']:g} % of the table's best loss, as "
        f"{near} of {len(losses)} points are. The numbers are the compute until then, in whole runs of the proxy:"
    )


def last_loss(point: Mapping[str, Any]) -> float:
    """A point's loss at its last step."""
    loss = list(point["losses"].values())[-1]
    return math.inf if loss is None else loss


# --- judged by the target ---


@cache
def _medians(path: str, name: str) -> list[tuple[float, float]]:
    """Cost, and the median over searches of how far the loss so far is above the best there is (a share)."""
    found = record(path)
    curves = found["searches"][name]["curves"]
    costs = sorted({point[0] for curve in curves for point in curve})
    return [(cost, statistics.median(_at(curve, cost) for curve in curves) / found["best"] - 1) for cost in costs]


def _at(curve: Curve, cost: float) -> float:
    return next((loss for at, loss in reversed(curve) if at <= cost), math.inf)


def stays_within(path: str, name: str, goal: float) -> float | None:
    """From which cost on the median stays within a goal (a share) to the end of the replay; None if it never does."""
    found = None
    for cost, excess in reversed(_medians(path, name)):
        if excess > goal:
            break
        found = cost
    return found


def ends(path: str, name: str) -> float:
    """How far above the best there is the median ends (a share)."""
    return _medians(path, name)[-1][1]


def judged_by_target(path: str, goals: Sequence[float]) -> Rows:
    """From which cost on the median search stays within a goal, in per cent of the best; and where it ends."""
    rows = [["search", *(f"stays within {goal:g} %" for goal in goals), "ends above the best by"]]
    for name, what in _JUDGED.items():
        if name in record(path)["searches"]:
            costs = [stays_within(path, name, goal / 100) for goal in goals]
            shown = ["never" if cost is None else f"{math.floor(cost + 0.5)}" for cost in costs]
            rows.append([what, *shown, f"{100 * ends(path, name):.2f} %"])
    return rows


def _unit(path: str) -> float:
    """Runs of the proxy that one of the target costs: what the cheapest search on it has spent first."""
    curves = record(path)["searches"]["random, on the target"]["curves"]
    return float(min(point[0] for curve in curves for point in curve))


def _proxys_best(path: str) -> float:
    """How far above the target's best loss the values are that are best on the proxy (a share)."""
    proxy, target = record(path)["tables"]
    on_target = {_point(each): last_loss(each) for each in target}
    shared = [each for each in proxy if _point(each) in on_target]
    return on_target[_point(min(shared, key=last_loss))] / min(on_target.values()) - 1


def _point(each: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(value for name, value in each.items() if name != "losses")


def _order(one: float, other: float) -> str:
    return "higher than" if one > other else "lower than" if one < other else "level with"


def said_of_target() -> str:
    """What a run of the target costs, and the proxy's best point there."""
    point = _proxys_best(TARGET)
    same = "the target's best too" if point == 0 else f"{100 * point:.2f} % above the target's best"
    return (
        f"A run of the target costs {_unit(TARGET):.1f} times as much as one of the proxy. The proxy's best point is "
        f"{same}."
    )


def said_of_translation() -> str:
    """What a search on the proxy costs, and where its best values differ from the target's."""
    best_at = [min(table, key=last_loss)["output_multiplier"] for table in record(TRANSLATION)["tables"]]
    return (
        f"A run of the target costs {_unit(TRANSLATION):.1f} times as much as one of the proxy. The proxy's best "
        f"point costs the target {100 * _proxys_best(TRANSLATION):.1f} %. The best output multiplier is "
        f"{best_at[0]:g} on the proxy and {best_at[1]:g} on the target."
    )


def _share(name: str, goal: float) -> str:
    """What staying within a goal costs a search on the proxy, over what it costs the same search on the target."""
    proxy, target = (stays_within(TRANSLATION, each, goal) for each in (name, f"{name}, on the target"))
    return "more than all" if proxy is None or target is None else f"{proxy / target:.2f}"


def halving_ends() -> str:
    """What docs/tuning.md tells of TPE with halving on a target."""
    said = [
        f"{_order(ends(path, 'TPE, halving'), ends(path, 'random, on the target'))} random search on the target itself "
        f"({100 * ends(path, 'TPE, halving'):.2f} % above the best there is, against "
        f"{100 * ends(path, 'random, on the target'):.2f} %)"
        for path in (TARGET, TRANSLATION)
    ]
    return f"Judged by the target, TPE with halving on the proxy ended {said[0]} on code, and {said[1]} on translation."


def figure_5() -> str:
    """What docs/t5.md tells of it."""
    proxy, target = (ends(TRANSLATION, name) for name in ("random", "random, on the target"))
    long = record(BLEU)
    mean = {each: statistics.fmean(translation.figures_of(long["runs"], each)) for each in translation.MODELS}
    return (
        f"Random search on the proxy stays within 5 % of the target's best loss for {_share('random', 0.05)} of what "
        f"it costs on the target, and ends {_order(proxy, target)} it ({100 * proxy:.2f} % above the best there is, "
        f"against {100 * target:.2f} %). After {long['steps']:,} steps the proxy's best values reach "
        f"{mean[translation.PROXY]:.1f} BLEU, the target's own {mean[translation.OWN]:.1f}, and the standard "
        f"parametrization with a rate tuned on the target {mean[translation.TUNED]:.1f}."
    )


def bleu() -> Rows:
    """BLEU and loss of every model of the long runs, the mean over seeds, and what the search of its values cost."""
    found = record(BLEU)
    proxy, target = record(TRANSLATION)["tables"]
    cost = {
        translation.PROXY: len(proxy) / _unit(TRANSLATION),
        translation.OWN: len(target),
        translation.TUNED: len(found["rates"]),
    }
    rows = [["values", "search, in runs of the target", "rate", "loss", "BLEU"]]
    for model in translation.MODELS:
        rate = next(run["values"]["hparams.lr"] for run in found["runs"] if run["model"] == model)
        cells = [
            f"{statistics.fmean(each):.{digits}f} ± {statistics.stdev(each) / math.sqrt(len(each)):.{digits}f}"
            for name, digits in (("loss", 3), ("bleu", 1))
            for each in [translation.figures_of(found["runs"], model, name)]
        ]
        rows.append([model, f"{cost[model]:.1f}".removesuffix(".0"), f"{rate:g}", *cells])
    return rows


def in_bleu(other: str) -> Difference:
    """BLEU by which the proxy's best values end above another model's."""
    return translation.ahead(record(BLEU)["runs"], translation.PROXY, other)


def said_of_bleu() -> str:
    """How the proxy's values compare."""
    own, tuned = in_bleu(translation.OWN), in_bleu(translation.TUNED)
    return (
        f"In BLEU the proxy's values end {_WHERE[tuned.sign]} the tuned standard parametrization ({tuned}), and "
        f"{_WHERE[own.sign]} the target's own ({own})."
    )


# --- transferred values ---


def quality() -> Rows:
    """Every figure of every model, the mean over seeds, and what the search of its values cost."""
    found = record(QUALITY)
    rows = [["model", "search, in runs of the model", "rate at the base", *FIGURES]]
    for size, kind in itertools.product(SIZES, KINDS):
        model = f"{kind}{size}"
        search, own = found["searches"][model], found["searches"][f"tuned{size}"]["flops_of_a_run"]
        values = next(run["values"] for run in found["runs"] if run["model"] == model)
        cells = [f"{search['flops'] / own:.2f}" if search else "0", f"{values['hparams.lr']:.2g}"]
        for name in FIGURES:
            each = figures_of(found["runs"], model, name)
            error = statistics.stdev(each) / math.sqrt(len(each)) if name == BITS else error_of(found["runs"], name)
            digits = 3 if name == BITS else 1
            cells.append(f"{statistics.fmean(each):.{digits}f} ± {error:.{digits}f}")
        rows.append([model, *cells])
    return rows


def compared(one: str, other: str) -> Difference:
    """Bits per byte by which one model's values end above another's."""
    return ahead(record(QUALITY)["runs"], one, other)


def said_of_quality() -> str:
    """Which values end lower at either size, and how sure the accuracies are."""
    told = []
    for size in SIZES:
        tuned, defaults = (compared(f"transferred{size}", f"{kind}{size}") for kind in ("tuned", "defaults"))
        told.append(f"{_WHERE[tuned.sign]} the tuned rate ({tuned}), {_WHERE[defaults.sign]} GPT-3's ({defaults})")
    across = compared("transferred", f"tuned{TWICE}")
    runs = record(QUALITY)["runs"]
    accuracies = [name for name in FIGURES if name != BITS]
    means = {
        (model, name): statistics.fmean(figures_of(runs, model, name))
        for model in ("transferred", "tuned")
        for name in accuracies
    }
    largest = max(abs(means["transferred", name] - means["tuned", name]) for name in accuracies)
    return (
        f"In bits per byte the transferred values end {told[0]}; with twice the parameters {told[1]}. The "
        f"smaller model's end {_WHERE[across.sign]} twice the parameters with the tuned rate ({across}). No "
        f"accuracies of the two are more than {largest:.1f} points apart."
    )


def figure_6() -> str:
    """What docs/what-transfers.md tells of it."""
    tuned, across = compared("transferred", "tuned"), compared("transferred", f"defaults{TWICE}")
    return (
        "What transferred values are worth was [measured in small](evidence/quality.md) too (the paper's figure 6): a "
        "target of hidden size 128 with values from a proxy of 32 ends "
        f"{_WHERE[tuned.sign]} the standard parametrization with a rate from a search of that target ({tuned} bits per "
        f"byte of held-out text), and {_WHERE[across.sign]} twice the parameters with GPT-3's rate ({across}). Its "
        "accuracies, on few examples, decide nothing."
    )


# --- reverse transfer ---


def reverse() -> Rows:
    """Each model's first and last losses, and how far the loss rose above its lowest, means of five steps."""
    rows = [["model", "rate", "seed", "first loss", "last loss", "rises by at most"]]
    for curve in record("reverse/reverse.json")["curves"]:
        losses = [f"{loss:.2f}" for loss in (curve["losses"][0], curve["losses"][-1])]
        rise = curve["state"] if curve["rise"] is None else f"{curve['rise']:.2f}"
        rows.append([curve["model"], f"{curve['lr']:.2g}", str(curve["seed"]), *losses, rise])
    return rows


def said_of_reverse() -> str:
    """Whether the reversed model ranks rates as the large one does, and how far its curve is from that one's."""
    curves = record("reverse/reverse.json")["curves"]
    held = {model: sorted((each for each in curves if each["model"] == model), key=lambda each: float(each["lr"]))
            for model in ("small, reversed", "large, standard", "small, standard")}  # fmt: skip
    last = {model: [each["losses"][-1] for each in of] for model, of in held.items()}
    ranks = {model: sorted(range(3), key=of.__getitem__) for model, of in last.items()}
    same = {model: "as" if ranks[model] == ranks["large, standard"] else "not as" for model in held}
    rises = {model: of[-1]["rise"] for model, of in held.items()}
    away = [ours - theirs for ours, theirs in zip(last["small, reversed"], last["large, standard"], strict=True)][:2]
    starts = held["small, reversed"][0]["losses"][0] / held["large, standard"][0]["losses"][0]
    return (
        f"The reversed model ranks the three rates {same['small, reversed']} the large one does, the small standard "
        f"one {same['small, standard']} it. At the highest rate the loss rises by {rises['large, standard']:.1f} nats "
        f"in the large model, {rises['small, reversed']:.1f} in the reversed one and {rises['small, standard']:.1f} in "
        f"the small standard one. But the reversed model's curve is not the large one's: its loss starts {starts:.1f} "
        f"times as high, and at the two lower rates it ends {min(away):.1f} to {max(away):.1f} nats above."
    )
