"""From hidden size 256 on one GPU: the rates, what rivals reach, and a search of the target. Tables, and words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.direct import compared
from benchmarks.evidence import width
from benchmarks.evidence.records import FOLDER, LINES, LOWER, Rows, best, cost, difference, octaves, record, row_of
from mup_megatron.report.stability import draw_stability

RATES, FARTHEST, RIVALS, PER_LAYER = (f"wide/{name}.json" for name in ("lr-width", "to-4096", "rivals", "per-layer"))
DIRECT, DIRECT_128 = "wide/direct.json", "wide/direct-128.json"  # from 256 on a GPU, from 128 on two cores


def _lines() -> dict[str, tuple[dict[str, Any], str]]:
    """Every parametrization's record and its name there."""
    rivals, apart = record(RIVALS), record(PER_LAYER)
    return {name: (rivals, name) for name in rivals["lines"]} | {name: (apart, name) for name in apart["lines"]}


def _at(found: Mapping[str, Any], size: int, line: str, rate: float) -> list[float]:
    """Losses of every seed at a rate."""
    losses: list[float] = row_of(found, size, line)["losses"][found["values"].index(rate)]
    return losses


def _lowest(name: str, size: int) -> list[float]:
    """Losses of every seed at the best tried rate of a size."""
    found, line = _lines()[name]
    return _at(found, size, line, row_of(found, size, line)["minimum"]["tried"])


def draw() -> None:
    """Four panels: µP at its rates, and beside it the rivals at theirs."""
    fine, rivals = record(RATES), record(RIVALS)
    own = {"mup": {**fine["lines"]["mup"], "values": fine["values"], "seeds": fine["seeds"]}}
    lines = {**rivals["lines"], **record(PER_LAYER)["lines"], **own}
    draw_stability({**rivals, "lines": lines}, FOLDER / "wide" / "rivals.png")


def said_of_rates() -> str:
    """The two verdicts."""
    near, far = record(RATES), record(FARTHEST)
    told = []
    for found in (near, far):
        first, last, row = found["sizes"][0]["size"], found["sizes"][-1]["size"], found["lines"]["mup"]["rows"][0]
        told.append(
            f"From hidden size {first} to {last} µP {width.own(found['lines']['mup'])}: the vertex moves by "
            f"{octaves(row)} octaves (bound {found['bounds']['octaves']:g}), and the best tried rate of {first} costs "
            f"{last} {cost(row)} of its loss ({width.seeds_of(found)})"
        )
    return f"{'. '.join(told)}."


def does_it_stay() -> str:
    """What docs/verification.md tells of stable optima: from this base, and from narrower ones."""
    told = []
    for path in (width.ENGLISH, width.MAIN):
        found = record(path)
        first, last = (found["sizes"][at]["size"] for at in (0, -1))
        moved = octaves(row_of(found, first))
        told.append(
            f"from {first} to {last} it {width.own(found['lines']['mup'])} ({moved} octaves, {width.seeds_of(found)})"
        )
    kept = [
        f"{cost(found['lines'][line]['rows'][0])} ({LINES[line]})"
        for name, (found, line) in _lines().items()
        if name != "mup"
    ]
    return (
        f"{said_of_rates()} The best tried rate of 256 costs the rivals {', '.join(kept)}. {said_of_rivals()} In other "
        f"settings, from narrower bases: {', '.join(told)}."
    )


def rivals() -> Rows:
    """Each parametrization's lowest loss at every width, the rate there, and the loss at the best rate of 256."""
    lines = _lines()
    rows = [
        [
            "hidden size",
            *(f"{LINES[name]}: lowest loss (rate)" for name in lines),
            *(f"{LINES[name]}, 256's rate" for name in lines),
        ]
    ]
    sizes = [each["size"] for each in record(RIVALS)["sizes"]]
    for size in sizes:
        lowest, kept = [], []
        for name, (found, line) in lines.items():
            rate = row_of(found, sizes[0], line)["minimum"]["tried"]
            lowest.append(f"{statistics.fmean(_lowest(name, size)):.3f} ({best(row_of(found, size, line))})")
            kept.append(f"{statistics.fmean(_at(found, size, line, rate)):.3f}")
        rows.append([str(size), *lowest, *kept])
    return rows


def said_of_rivals() -> str:
    """How much higher each rival ends at the largest width, at its own best rate."""
    size = record(RIVALS)["sizes"][-1]["size"]
    mup = _lowest("mup", size)
    told = []
    for name in _lines():
        if name != "mup":
            told.append(f"{LINES[name]} {difference(_lowest(name, size), mup)} nats")
    seeds = f"{len(mup)} seeds, ±: 95 %"
    return f"At {size}, each at its best tried rate, losses differ from µP's by {', '.join(told)} ({seeds})."


def ends_lower(name: str) -> str:
    """Whether a rival that is tuned at the largest width ends lower than µP there: its claim's verdict."""
    size = record(RIVALS)["sizes"][-1]["size"]
    own, mup = _lowest(name, size), _lowest("mup", size)
    found = difference(own, mup)
    told = f"{statistics.fmean(own):.3f} nats against µP's {statistics.fmean(mup):.3f}"
    return f"**{LOWER[found.sign]}**: {told}, a difference of {found}"


def directly(path: str) -> Rows:
    """The target's loss by the number of draws, both ways, with what they cost in runs of the target."""
    found = record(path)
    rows = [
        [
            "draws",
            "cost, µP from the proxy",
            "loss, µP",
            "cost, searched directly",
            "loss, searched directly",
            "difference",
        ]
    ]
    for row in compared(found):
        mean, half = difference(row["mup"], row["direct"])
        shown = {key: ", ".join(f"{loss:.3f}" for loss in row[key]) for key in ("mup", "direct")}
        costs = f"{row['mup_cost']:.1f}", f"{row['direct_cost']:.0f}"
        rows.append([str(row["draws"]), costs[0], shown["mup"], costs[1], shown["direct"], f"{mean:+.2f} ± {half:.2f}"])
    return rows


def transfers_and_loses(path: str) -> str:
    """Whether what a proxy's search gives ends lower than the target's own search, with as many draws."""
    rows = compared(record(path))
    lower = [row for row in rows if max(a - b for a, b in zip(row["mup"], row["direct"], strict=True)) < 0]
    most = rows[-1]
    found = difference(most["mup"], most["direct"])
    draws = ", ".join(str(row["draws"]) for row in lower)
    return (
        f"**{LOWER[found.sign]}**: with {most['draws']} draws a difference of {found} nats, for {most['mup_cost']:.1f} "
        f"runs of the target against {most['direct_cost']:.0f}; lower in every repetition with {draws} draws"
    )
