"""Laws over batch and tokens, from the ladder: tables, and what follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.evidence.records import Rows, best, record, varying, verdict
from mup_megatron.proof.ladder_verdict import published
from mup_megatron.proof.laws import bends
from mup_megatron.proof.rungs import NAMES, Rung
from mup_megatron.report.ladder import LABELS
from mup_megatron.rules.horizon_rules import PUBLISHED
from mup_megatron.tuning.loss_law import AXES

RATE = "ladder/ladder.json"
BETA = "ladder/beta2.json"


def ladder(path: str = RATE) -> Rows:
    """Best value and loss of every rung, the last of which no law has seen."""
    found = record(path)
    name = NAMES[found.get("over", "lr")]
    axes = varying(found)
    rows = [[*axes, "steps", f"best {LABELS[name]}", "loss there", ""]]
    for rung in found["rungs"]:
        error = "" if rung["error"] is None else f" ± {rung['error']:.2f} octaves"
        steps = found["steps"][f"batch-{rung['batch']}-tokens-{rung['tokens']}-width-{rung['width']}"]
        cells = [*(f"× {rung[axis]}" for axis in axes), str(steps), f"{best({'minimum': rung})}{error}"]
        last = rung is found["rungs"][-1]
        held = found["held_out"] if last else None
        value = f"{held[name]['predicted']:.2g} ± {held[name]['error']:.2f} octaves" if held else ""
        said = f"predicted: {value}, {held['loss']['predicted']:.3f} ± {held['loss']['error']:.3f}" if held else ""
        said = verdict(found) if last and not held else said  # where there is no law
        rows.append([*cells, f"{rung['least']:.3f}", said])
    return rows


def exponents() -> Rows:
    """Of the rate, and how far it and others' exponents end from the last rung's best rate."""
    found = record(RATE)
    rate = found["rate"]
    axes = [axis for axis in AXES if axis in rate]
    columns = [*(f"exponent of {axis}" for axis in axes), "octaves off at the largest rung"]
    rows = [["", *columns, "scatter of all rungs (octaves)"]]
    cells = [f"{rate[axis]['exponent']:+.2f} ± {rate[axis]['error']:.2f}" for axis in axes]
    rows.append(["fitted", *cells, _off(found["held_out"]["rate"]["octaves"]), f"{rate['spread']:.2f}"])
    for rule, each in of_others(found).items():
        sources = "; ".join(law.source for law in PUBLISHED if law.exponents == rule)
        cells = [*[""] * len(axes), _off(each["octaves"]), f"{each['scatter']:.2f}"]
        rows.append([f"{rule} ({sources}), from the first rung", *cells])
    return rows


def of_others(found: Mapping[str, Any]) -> dict[str, Any]:
    """How well published exponents tell a ladder's rungs; computed here, for more are known than when it was run."""
    return published({Rung(rung["batch"], rung["tokens"], rung["width"]): rung["value"] for rung in found["rungs"]})


def _off(octaves: float | None) -> str:
    return "not known" if octaves is None else f"{octaves:+.2f}"


def said_of_ladder() -> str:
    """The law of the loss, and how both laws tell the largest rung."""
    found = record(RATE)
    rate, loss, bounds = found["held_out"]["rate"], found["held_out"]["loss"], found["bounds"]
    scatter = min(each["scatter"] for each in of_others(found).values())
    order = "more than" if scatter > found["rate"]["spread"] else "not more than"
    return (
        f"The law of the loss is {found['loss']['said']}, with a spread of {found['loss']['spread']:.3f} nats. Of the "
        f"unseen largest rung it is off by {100 * loss['share']:+.2f} % (bound "
        f"{100 * bounds['loss']:g} %), and the law of the rate by {rate['octaves']:+.2f} octaves (bound "
        f"{bounds['octaves']:g}). The rate's own error there is {rate['error']:.2f} octaves, so that part is partly "
        f"luck. About every published law the rungs scatter by {scatter:.2f} octaves or more, {order} about the fitted "
        f"one ({found['rate']['spread']:.2f}). {_over_tokens(found)} {_bend_of(found)}"
    )


def _bend_of(found: Mapping[str, Any]) -> str:
    """Whether the law of the best rate bends over tokens; computed here, for the record is older than the question."""
    rungs = [rung for rung in found["rungs"][:-1] if rung["value"] is not None]
    points = [{axis: math.log2(rung.get(axis, 1)) for axis in AXES} for rung in rungs]
    errors = [rung["error"] ** 2 for rung in rungs if rung["error"] is not None]
    bend = bends(points, [math.log2(rung["value"]) for rung in rungs], math.sqrt(statistics.fmean(errors)))["tokens"]
    word = "is" if bend["told"] else "is not"
    return (
        f"A bend over tokens (2606.29158) {word} told from the noise ({bend['octaves']:+.2f} ± {bend['error']:.2f} "
        "octaves per squared doubling)."
    )


def _over_tokens(found: Mapping[str, Any]) -> str:
    """How the best rate goes with tokens, at the smallest and at the largest batch, of the smallest width."""
    rungs = [rung for rung in found["rungs"] if rung["width"] == 1]
    ways = []
    for batch in (min(rung["batch"] for rung in rungs), max(rung["batch"] for rung in rungs)):
        rates = [rung["value"] for rung in rungs if rung["batch"] == batch]
        ways.append("rises" if rates[-1] > rates[0] else "falls")
    return f"Over tokens the best rate {ways[0]} at the smallest batch and {ways[1]} at the largest, at width × 1."
