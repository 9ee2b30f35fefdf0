"""What tuning costs from known values and in two other families: tables, and what follows (benchmarks/families.py)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.records import Rows, record
from benchmarks.evidence.searches import last_loss, shown

FAMILIES = {"llama": "Llama", "moe": "Mixture of experts"}
SIXTEEN = "tuning-cost-sixteen/cost.json"


def arrivals() -> Rows:
    """Per family and search, by each judge and within each goal: how many arrived and stayed, and the median of all."""
    judges, goals = ("proxy", "target"), list(_family("llama")["searches"]["proxy"]["random"]["goals"])
    columns = [f"{judge}, within {goal}" for judge in judges for goal in goals]
    rows = [["", "search", *columns]]
    for family, what in FAMILIES.items():
        found = _family(family)
        for number, name in enumerate(found["searches"]["proxy"]):
            told = [found["searches"][judge][name]["goals"][goal] for judge in judges for goal in goals]
            cells = [f"{each['arrived']}, {_median(each['median'])}" for each in told]
            rows.append([what if number == 0 else "", shown(name), *cells])
    return rows


def of_sixteen() -> Rows:
    """Per search, as the target judges: how many arrived and stayed, the median of all, and where the median ends."""
    found = record(SIXTEEN)["searches"]["target"]
    rows = [["search", *(f"within {goal}" for goal in found["TPE"]["goals"]), "ends above the best by"]]
    for name, told in found.items():
        cells = [f"{each['arrived']}, {_median(each['median'])}" for each in told["goals"].values()]
        trains = "" if name.endswith(("on the target", "telescoping")) else ", on the proxy"
        rows.append([f"{shown(name)}{trains}", *cells, f"{100 * told['ends']:.2f} %"])
    return rows


def said_of_sixteen() -> str:
    """What runs cost, what the proxy's best point costs the target, and how far seeds are apart there."""
    found = record(SIXTEEN)
    between = [f"{cost:.1f}" for cost in found["costs"]["wider"]]
    given, own = (_at(found["tables"]["target"], found["best"][name]) for name in ("proxy", "target"))
    return (
        f"A run of the target costs {found['costs']['target'][0]:.1f} times as much as one of the proxy, those between "
        f"{' and '.join(between)} times. The proxy's best point costs the target "
        f"{100 * (statistics.fmean(given) / statistics.fmean(own) - 1):.2f} %; at the target's own best its "
        f"{len(own)} seeds are {100 * (max(own) / min(own) - 1):.2f} % apart. The numbers are searches of "
        f"{found['seeds']} that arrived, and the median of all, in runs of the proxy:"
    )


def said_of_telescoping() -> str:
    """How many searches arrive through several widths, and at the narrowest alone; for docs/tuning.md."""
    found = record(SIXTEEN)
    through, alone = (
        found["searches"]["target"][name]["goals"]["0.5 %"] for name in ("TPE, halving, telescoping", "TPE, halving")
    )
    return (
        f"Of [{found['seeds']} replays](evidence/tuning-cost.md#a-target-of-sixteen-times-the-cost) through "
        f"{1 + len(found['costs']['wider'])} widths {through['arrived']} come within 0.5 % of a wider target's lowest "
        f"loss, and the median needs {_median(through['median'])} runs of the narrowest width. At the narrowest alone "
        f"{alone['arrived']} do, and the median needs {_median(alone['median'])}."
    )


def cheaper_by_the_proxy() -> str:
    """Whether the median search on the proxy arrives for less than the same on the target, within each goal."""
    found, said, fails = record(SIXTEEN)["searches"]["target"], [], False
    for goal in found["TPE"]["goals"]:
        proxy, target = (
            found[name]["goals"][goal]["median"] for name in ("TPE, halving", "TPE, halving, on the target")
        )
        if proxy is None and target is None:
            said.append(f"neither comes within {goal}")
            continue
        cheaper = proxy is not None and (target is None or proxy < target)
        fails |= not cheaper
        costs = " against ".join(each if each == "never" else f"{each} runs" for each in map(_median, (proxy, target)))
        said.append(f"{'holds' if cheaper else 'fails'} within {goal} ({costs})")
    return f"**{'failed' if fails else 'passed'}**: {', '.join(said)}"


def _median(cost: float | None) -> str:
    return "never" if cost is None else f"{cost:.1f}"


def said_of_families() -> str:
    """Where the best points lie, how far seeds are apart there, and what proxies' best values cost their targets."""
    said = []
    for family, what in FAMILIES.items():
        found = _family(family)
        best_ = {name: value for name, value in found["best"]["proxy"].items() if name != "loss"}
        own = _at(found["tables"]["proxy"], best_)
        cost = _at(found["tables"]["target"], best_)[0] / found["best"]["target"]["loss"] - 1
        table = found["tables"]["proxy"][0]
        apart = abs(own[0] / own[1] - 1)
        said.append(
            f"{what}: {len(table)} points; the best has {_values(best_, table)}. There two seeds are "
            f"{100 * apart:.2f} % apart, and it costs the target {100 * cost:.2f} %."
        )
    return " ".join(said)


def gaussian_process() -> str:
    """What a Gaussian process was worth in place of TPE, on the first table and in two other families."""
    searches = record("tuning-cost-gp/gpt3.json")["searches"]
    gp, tpe = (searches[name]["mean"] for name in ("GP, halving", "TPE, halving"))
    found = [record(f"tuning-cost-gp/{family}.json") for family in FAMILIES]

    def arrived(name: str) -> list[int]:
        return [each["searches"]["proxy"][name]["goals"]["0.5 %"]["arrived"] for each in found]

    theirs, ours = arrived("GP, halving"), arrived("TPE, halving")
    worse = all(one < other for one, other in zip(theirs, ours, strict=True))
    fate = "so it was not kept" if worse else "and it was not kept"
    return (
        f"A Gaussian process in TPE's place (Optuna's; commit "
        f"{found[0]['provenance']['commit'][:7]}) arrives after {gp:.1f} runs on the first table, TPE after {tpe:.1f}. "
        f"In the two other families {theirs[0]} and {theirs[1]} of {found[0]['seeds']} searches arrive within "
        f"{found[0]['budget']:g} runs, of TPE's {ours[0]} and {ours[1]}, {fate}."
    )


def said_of_known_values() -> str:
    """What docs/tuning.md tells of them, on this table and on those of two other families."""
    found = record("tuning-cost-prior/cost.json")["searches"]
    near, far = (
        [f"{each['mean']:.1f}" for name, each in found.items() if name.endswith(f" {factor} times")]
        for factor in (4, 16)
    )
    others = [_family(family) for family in FAMILIES]

    def arrived(ending: str, containing: str = "") -> tuple[int, int]:
        told = [
            (each["goals"]["0.5 %"]["arrived"], found["seeds"])
            for found in others
            for name, each in found["searches"]["proxy"].items()
            if name.endswith(ending) and containing in name
        ]
        return sum(one for one, _ in told), sum(all_ for _, all_ in told)

    by_four, by_sixteen, by_none = (
        arrived(" 4 times", "configs/"),
        arrived(" 16 times", "configs/"),
        arrived("TPE, halving"),
    )
    shares = [one / all_ for one, all_ in (by_four, by_sixteen, by_none)]
    moral = ": four times are for values of the same family" if shares[0] < min(shares[1:]) else ""
    return (
        f"On the same table, TPE with halving arrives after {' and '.join(near)} runs where it begins at values that "
        f"were tuned on another text, at two other widths, and goes no farther than four times from them; after "
        f"{' and '.join(far)} with sixteen times; after {found['TPE, halving']['mean']:.1f} without. In [two other "
        f"families](evidence/tuning-cost.md#two-other-families) {by_four[0]} of {by_four[1]} searches from the same "
        f"values arrive with four times, {by_sixteen[0]} of {by_sixteen[1]} with sixteen, and {by_none[0]} of "
        f"{by_none[1]} without{moral}."
    )


def _values(point: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> str:
    """In words, and which of them are ends of what was tried."""
    words = []
    for name, value in point.items():
        tried = [each[name] for each in table]
        end = " (the lowest)" if value == min(tried) else " (the highest)" if value == max(tried) else ""
        words.append(f"{name} {value:g}{end}")
    return ", ".join(words)


def _at(tables: Sequence[Sequence[Mapping[str, Any]]], best: Mapping[str, float]) -> list[float]:
    """The last losses of the tables that have the values."""
    values = {name: value for name, value in best.items() if name != "loss"}
    return [last_loss(each) for table in tables for each in table if values.items() <= each.items()]


def _family(name: str) -> dict[str, Any]:
    return record(f"tuning-cost-{name}/cost.json")
