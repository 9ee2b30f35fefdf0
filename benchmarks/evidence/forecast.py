"""A forecast of the widest run, from narrower ones; written down before it.

Each doubling of the width gains less than the one before. The forecast lets what it gains shrink by one factor more
(Aitken's rule). So a width's loss is told from the three before it, at one rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.records import Rows, record

BEFORE, AFTER = "forecast/before.json", "forecast/after.json"


def next_loss(losses: Sequence[float]) -> tuple[float, float]:
    """The loss of the next doubling; and its uncertainty, in units of what each of the three losses has.

    Args:
        losses: of three widths, each twice the one before (nats).
    """
    first, second, third = losses
    share = (third - second) / (second - first)
    return third + share * (third - second), math.hypot(share**2, 2 * share + share**2, 1 + 2 * share)


def _kept(found: Mapping[str, Any]) -> tuple[float, dict[int, float]]:
    """The rate that is kept, the best tried at the last but one width; and the first seed's losses at it, by width."""
    rows = found["lines"]["mup"]["rows"]
    rate: float = rows[-2]["minimum"]["tried"]
    place = found["values"].index(rate)
    return rate, {row["size"]: row["losses"][place][0] for row in rows}


def noise(found: Mapping[str, Any]) -> float:
    """Standard deviation of a loss without what a seed does to all widths alike (nats), from two seeds.

    A seed decides the order of the text, which all widths see. What is left is how much the seeds' difference varies
    from width to width, over the root of two, pooled over the rates.
    """
    rows = found["lines"]["mup"]["rows"]
    apart = [
        [row["losses"][place][1] - row["losses"][place][0] for row in rows] for place in range(len(found["values"]))
    ]
    return math.sqrt(statistics.fmean(statistics.variance(each) for each in apart) / 2)


def told(found: Mapping[str, Any]) -> tuple[float, float]:
    """The forecast of the first seed at twice the largest width, and half of its interval (two standard errors)."""
    loss, factor = next_loss(list(_kept(found)[1].values())[-3:])
    return loss, 2 * noise(found) * math.hypot(1, factor)


def forecast() -> Rows:
    """The kept rate's loss at each width, and what the three widths before it tell."""
    found = record(BEFORE)
    rate, held = _kept(found)
    sizes, losses = list(held), list(held.values())
    rows = [["hidden size", f"loss at rate {rate:g}", "told by the three before it"]]
    for at, size in enumerate(sizes):
        rows.append([str(size), f"{losses[at]:.3f}", f"{next_loss(losses[at - 3 : at])[0]:.3f}" if at >= 3 else ""])
    loss, half = told(found)
    rows.append([str(2 * sizes[-1]), "", f"{loss:.3f} ± {half:.3f}"])
    return rows


def said_of_forecast() -> str:
    """What is told of the widest run."""
    found = record(BEFORE)
    rate, held = _kept(found)
    largest, bounds, last = 2 * max(held), found["bounds"], found["lines"]["mup"]["rows"][-1]["minimum"]
    loss, half = told(found)
    return (
        f"At hidden size {largest} the rate {rate:g} will end at {loss:.3f} ± {half:.3f} nats. The best rate will lie "
        f"within {bounds['octaves']:g} octaves of {last['value']:.2g}, the vertex of {max(held)}, and {rate:g} will "
        f"cost at most {100 * bounds['cost']:g} % of the lowest loss. Beside what a seed does to all widths alike, a "
        f"loss scatters by {noise(found):.4f} nats."
    )


def _outcome() -> tuple[float, float, float, float]:
    """Of the widest run: the kept rate's loss less the forecast, half of the interval, octaves off, and the cost."""
    before, after = record(BEFORE), record(AFTER)
    rate = _kept(before)[0]
    row = after["lines"]["mup"]["rows"][-1]
    loss, (said, half) = row["losses"][after["values"].index(rate)][0], told(before)
    vertex = before["lines"]["mup"]["rows"][-1]["minimum"]["value"]
    found = row["minimum"]["value"]
    away = math.log2(found / vertex) if found else math.inf
    return loss - said, half, away, loss / row["minimum"]["loss"] - 1


def _holds() -> list[bool]:
    """Whether the loss is in its interval, the best rate near enough, and the kept rate cheap enough."""
    off, half, away, cost = _outcome()
    bounds = record(BEFORE)["bounds"]
    return [abs(off) <= half, abs(away) <= bounds["octaves"], cost <= bounds["cost"]]


def said_of_outcome() -> str:
    """What came of it."""
    off, half, away, cost = _outcome()
    after = record(AFTER)
    size, loss = after["sizes"][-1]["size"], told(record(BEFORE))[0]
    held = ["held" if each else "did not hold" for each in _holds()]
    where = f"{away:+.2f} octaves from the vertex that was told" if math.isfinite(away) else "beyond what was tried"
    ended = f"{loss + off:.3f} nats, {off:+.3f} from the forecast ({100 * off / loss:+.2f} %"
    return (
        f"At {size} the kept rate ended at {ended}; its interval was ± {half:.3f}): it {held[0]}. The best rate is "
        f"{where}: that {held[1]}. The kept rate costs {100 * cost:.2f} % of the lowest loss that was tried: that "
        f"{held[2]}."
    )


def verdict() -> str:
    """Of the claim, from the three."""
    return "**passed**" if all(_holds()) else f"**failed**: {sum(_holds())} of 3 parts held"
