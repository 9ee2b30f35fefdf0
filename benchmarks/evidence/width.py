"""Stable optima over width: the learning rate, and the two other values that were tried. Tables, and what follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.records import (
    LINES,
    Rows,
    best,
    cost,
    cost_of_fitted,
    difference,
    judged_from,
    losses,
    octaves,
    record,
    row_of,
    span,
    verdict,
)
from mup_megatron.proof.optimum import Curve, drift, minimum

MAIN = "stability-lr-width/lr-width.json"
FAIR = "stability-fan-in/lr-width.json"
ENGLISH = "stability-english/lr-width.json"
APART = "stability-english-embedding/lr-width.json"
FAR = "stability-lr-width-512/lr-width.json"
WIDEST = "forecast/after.json"
ONE_RATIO = {"auto": "mixed-growth/one-ratio.json", "output_like": "mixed-growth/one-ratio-output_like.json"}
ONE_RATIO_128 = {
    "the FFN fixed": "mixed-growth/one-ratio-128.json",
    "two KV heads at every width": "mixed-growth/one-ratio-kv.json",
    "the FFN growing 8 times as the hidden size doubles": "mixed-growth/one-ratio-ffn-8.json",
    "the number of experts growing, their FFN fixed": "mixed-growth/one-ratio-experts.json",
}
CLIPPING = {"`global`": "clip-norm/global.json", "`invariant`": "clip-norm/invariant.json"}
POSITIONS = {kind: f"positions/{kind}.json" for kind in ("absolute", "relative")}
SCHEDULES = "multipliers/schedule.json"
FROM_128 = {
    "initial deviation": "stability-english-std/all.json",
    "initial deviation of hidden tensors alone": "stability-english-std/hidden.json",
    "output multiplier": "multipliers/output.json",
    "attention multiplier": "multipliers/attention.json",
    "embedding multiplier": "multipliers/embedding.json",
    "embedding multiplier (half an octave apart)": "multipliers/embedding-half.json",
    "residual multiplier": "multipliers/residual.json",
    "residual multiplier (half an octave apart)": "multipliers/residual-half.json",
    "1 - β1": "multipliers/beta1.json",
    "1 - β2": "multipliers/beta2.json",
}
LAWS = {
    "one rate, natural text": ENGLISH,
    "the embedding's rate × 8": APART,
    "base 32, code": FAR,
    "base 32, one seed": FAIR,
}


def own(line: Mapping[str, Any]) -> str:
    """How one parametrization of a record would be judged, were it the one that is, in a word."""
    return "failed" if line["reasons"] else "undecided" if line.get("open") else "passed"


def costs(found: Mapping[str, Any], row: Mapping[str, Any], line: str = "mup") -> list[str]:
    """Cells of a size: octaves to the largest, what its best tried value and its fitted one cost there."""
    return [octaves(row), cost(row), cost_of_fitted(found, row, line)]


def heads(size: int) -> list[str]:
    """Their heads."""
    return [f"octaves to {size}", f"its best tried rate costs {size}", f"its fitted rate costs {size}"]


def rates(path: str) -> Rows:
    """The learning rate over width: a block of rows per parametrization."""
    found = record(path)
    rows = [["", "hidden size", "best rate", *heads(found["sizes"][-1]["size"]), "lowest loss", "verdict"]]
    for name, line in found["lines"].items():
        for number, row in enumerate(line["rows"]):
            label = LINES[name] if number == 0 else ""
            cells = ["", "", ""] if row is line["rows"][-1] else costs(found, row, name)
            said = f"**{own(line)}**" if row["size"] == judged_from(found) else ""
            rows.append([label, str(row["size"]), best(row), *cells, f"{row['minimum']['loss']:.3f}", said])
    return rows


def laws(named: Mapping[str, str]) -> Rows:
    """How the best rate goes with width, how flat the loss is about it, and where the lowest loss goes.

    Args:
        named: records, by what they are called.
    """
    columns = ["octaves per doubling", "farthest from that line", "octaves that cost the largest 0.5 %"]
    rows = [["", "", "sizes", *columns, "its lowest loss", "the limit of that"]]
    for label, path in named.items():
        found = record(path)
        for number, (name, line) in enumerate(found["lines"].items()):
            lowest = [row["minimum"]["loss"] for row in line["rows"]]
            cells = [*_line_of(line["rows"]), _flat(found, line["rows"][-1]), f"{lowest[-1]:.3f}", _limit(lowest)]
            rows.append([label if number == 0 else "", LINES[name], span(found), *cells])
    return rows


def _line_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The least-squares line of the best rate's octaves over the width's, and how far the farthest size is from it."""
    known = [row for row in rows if row["minimum"]["value"] is not None]
    if len(known) < 3:
        return "beyond what was tried", ""
    x = [math.log2(row["size"]) for row in known]
    y = [math.log2(row["minimum"]["value"]) for row in known]
    middle, height = statistics.fmean(x), statistics.fmean(y)
    weights = [(each - middle) / sum((other - middle) ** 2 for other in x) for each in x]
    slope = sum(weight * each for weight, each in zip(weights, y, strict=True))
    errors = [row["minimum"]["error"] for row in known]
    error = math.hypot(*(weight * each for weight, each in zip(weights, errors, strict=True))) if all(errors) else 0.0
    off = max((abs(up - height - slope * (at - middle)) for at, up in zip(x, y, strict=True)))
    return f"{slope:+.2f}{f' ± {error:.2f}' if error else ''}", f"{off:.2f} octaves"


def _flat(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """How far from its best rate a size's loss is 0.5 % up, by the parabola through its lowest three means."""
    means = [statistics.fmean(each) for each in row["losses"]]
    place = means.index(min(means))
    if not 0 < place < len(means) - 1:
        return "beyond what was tried"
    x, y = [math.log2(value) for value in found["values"][place - 1 : place + 2]], means[place - 1 : place + 2]
    bend = ((y[2] - y[1]) / (x[2] - x[1]) - (y[1] - y[0]) / (x[1] - x[0])) / (x[2] - x[0])
    return f"± {math.sqrt(found['bounds']['cost'] * row['minimum']['loss'] / bend):.2f}"


def _limit(losses: Sequence[float]) -> str:
    """Where the lowest losses of doubling widths go, if what a doubling gains shrinks by one factor (Aitken)."""
    before, last = losses[-2] - losses[-3], losses[-1] - losses[-2]
    if not before < last < 0:
        return "none: it does not level off"
    return f"{losses[-1] - last**2 / (last - before):.2f}"


# --- what follows from them ---


def said_of_english() -> str:
    """One rate for all tensors beside a rate of the embedding's own, from hidden size 128."""
    one, apart = record(ENGLISH), record(APART)
    largest, factor = one["sizes"][-1]["size"], apart["config"]["hparams"]["per_tensor"]["embedding"]["lr"]
    ended = [ends(path)["mup"][0] for path in (ENGLISH, APART)]
    said, moves = zip(*((own(f["lines"]["mup"]), octaves(row_of(f, 128))) for f in (one, apart)), strict=True)
    return (
        f"With one rate for all tensors µP {said[0]} ({seeds_of(one)}), with a rate of the embedding {factor:g} times "
        f"the others' it {said[1]} ({seeds_of(apart)}): the vertex moves by {moves[0]} and {moves[1]} octaves to "
        f"{largest} (bound {one['bounds']['octaves']:g}). With the first seed the second ends at {ended[1]:.3f} nats "
        f"there, the first at {ended[0]:.3f}."
    )


def seeds_of(found: Mapping[str, Any]) -> str:
    """How many ran, in words."""
    return "one seed" if found["seeds"] == 1 else f"{found['seeds']} seeds"


def said_of_bert() -> str:
    """BERT's verdict, and what the smallest size's best rate gives at the largest without µP."""
    found = record("bert/lr-width.json")
    first, last = found["sizes"][0]["size"], found["sizes"][-1]["size"]
    tried = found["values"].index(row_of(found, first)["minimum"]["tried"])
    ours, others = (statistics.fmean(row_of(found, last, name)["losses"][tried]) for name in ("mup", "standard"))
    edge = row_of(found, last, "standard")["minimum"]["edge"]
    where = "beyond what was tried" if edge else f"{octaves(row_of(found, first, 'standard'))} octaves away"
    return (
        f"µP {own(found['lines']['mup'])}. At the rate that is best at {first} the standard parametrization's loss at "
        f"{last} is {abs(others - ours):.2f} nats {'higher' if others > ours else 'lower'} than µP's; its own best "
        f"rate there lies {where}."
    )


# --- other values, other growth ---


def others() -> Rows:
    """Output multiplier and initial deviation over width."""
    files = [record(f"stability-width/{name}-width.json") for name in ("output_multiplier", "init_method_std")]
    columns = ["octaves to 256", "costs 256"]
    rows = [["hidden size", "output multiplier", *columns, "initial standard deviation", *columns]]
    for size in (32, 64, 128, 256):
        cells: list[str] = []
        for found in files:
            row = row_of(found, size)
            cells += [best(row), *(["", ""] if size == 256 else [octaves(row), cost(row)])]
        rows.append([str(size), *cells])
    rows.append(["verdict", verdict(files[0]), "", "", verdict(files[1]), "", ""])
    return rows


def others_from_128() -> Rows:
    """Other hyperparameters than the rate over width, on natural text."""
    rows = [
        [
            "hyperparameter",
            "best at 128, 256, 512",
            "octaves from 128",
            "128's best tried costs 512",
            "lowest loss",
            "verdict",
        ]
    ]
    for what, path in FROM_128.items():
        found = record(path)
        row = row_of(found, 128)
        values = ", ".join(best(each) for each in found["lines"]["mup"]["rows"])
        rows.append([what, values, octaves(row), cost(row), losses(found), verdict(found)])
    return rows


def said_of_std() -> str:
    """Whether the hidden tensors' best deviation stays, where the embedding's is held."""
    together, apart = (abs(row_of(record(path), 128)["drift"]["octaves"]) for path in list(FROM_128.values())[:2])
    which = "less" if apart < together else "no less"
    return (
        f"With the embedding's deviation held, the hidden tensors' best one moves by {apart:.2f} octaves, {which} than "
        f"the one of all tensors ({together:.2f}). Over attention multipliers up to {_FLAT['attention multiplier']:g} "
        f"no size's loss differs by more than {_spread_of('attention multiplier')}, and over 1 - β2 up to "
        f"{_FLAT['1 - β2']:g} by no more than {_spread_of('1 - β2')}."
    )


def schedules() -> Rows:
    """The mean loss of every schedule over width, and whether the best one stays."""
    found = record(SCHEDULES)
    last = found["sizes"][-1]["size"]
    rows = [["hidden size", *found["values"], "best", f"costs {last}"]]
    for row in found["lines"]["mup"]["rows"]:
        means = [f"{statistics.fmean(each):.3f}" for each in row["losses"]]
        rows.append([str(row["size"]), *means, row["minimum"]["tried"], "" if row["size"] == last else cost(row)])
    return [*rows, ["verdict", verdict(found), *[""] * (len(rows[0]) - 2)]]


_FLAT = {"attention multiplier": 4.0, "1 - β2": 0.05}
"""Up to where curves are flat: two octaves above the default, and the config's own value."""


def _spread_of(what: str) -> str:
    """The largest share by which a size's losses differ, over the values up to there."""
    found = record(FROM_128[what])
    count = sum(value <= _FLAT[what] for value in found["values"])
    means = [[statistics.fmean(each) for each in row["losses"][:count]] for row in found["lines"]["mup"]["rows"]]
    return f"{100 * max(max(each) / min(each) - 1 for each in means):.1f} %"


def mixed() -> Rows:
    """Two KV heads or an FFN of 128 at every width, under either rule."""
    columns = ["lowest loss at 32, 64, 128, 256", "octaves from 32", "from 64", "64's best tried rate costs 256"]
    rows = [["", "rule", *columns, "verdict (from 32)"]]
    for folder, what in (("kv", "2 KV heads"), ("ffn", "FFN of 128")):
        for rule in ("output_like", "hidden_like"):
            found = record(f"mixed-growth/{folder}-{rule}.json")
            second = row_of(found, 64)
            cells = [losses(found), octaves(row_of(found, 32)), octaves(second), cost(second)]
            rows.append([what, f"`{rule}`", *cells, verdict(found)])
    return rows


def said_of_mixed() -> str:
    """Under which rule the rate moves less, of each, beside the one that `auto` takes; how many pass."""
    said, passed = [], 0
    for folder, what, takes in (("kv", "K and V", "output_like"), ("ffn", "fc1", "hidden_like")):
        both = {rule: record(f"mixed-growth/{folder}-{rule}.json") for rule in ("output_like", "hidden_like")}
        least = min(both, key=lambda rule: abs(row_of(both[rule], 32)["drift"]["octaves"]))
        passed += sum(found["passed"] for found in both.values())
        said.append(f"`{least}` for {what} (`auto` takes `{takes}`)")
    return (
        f"From 32, where the small model's own drift is enough to fail, {passed} of 4 pass. The rate moves least under "
        f"{' and '.join(said)}."
    )


def ends(path: str) -> dict[str, list[float]]:
    """At the largest width, each line's losses at its best tried rate, by seed."""
    found = record(path)
    rows = {name: line["rows"][-1] for name, line in found["lines"].items()}
    return {name: row["losses"][found["values"].index(row["minimum"]["tried"])] for name, row in rows.items()}


def said_of_one_ratio(path: str) -> str:
    """How low one ratio and a ratio per tensor end at the largest width, each at its best rate there."""
    found = record(path)
    first, last = found["sizes"][0]["size"], found["sizes"][-1]["size"]
    at_end = ends(path)
    apart = difference(at_end["one_ratio"], at_end["mup"])
    lower = {
        1: f"a ratio per tensor ends lower at {last}",
        0: f"the losses at {last} do not differ beyond the seeds' noise",
        -1: f"one ratio ends lower at {last}",
    }[apart.sign]
    return (
        f"From {first} {lower}: {statistics.fmean(at_end['one_ratio']):.3f} by one ratio, "
        f"{statistics.fmean(at_end['mup']):.3f} by a ratio per tensor ({apart} nats)."
    )


def gains() -> Rows:
    """Trained gains: the first seed of the learning rates' record; its minima are computed from that seed alone."""
    frozen = record("norm-gains/lr-width.json")
    least, moved = _trained()
    shown = ", ".join(f"{each:+.2f}" for each in moved)
    rows = [["gains", "lowest loss at 32, 64, 128, 256", "octaves from 32, 64, 128 to 256", "verdict (from 32)"]]
    rows.append(["trained", ", ".join(f"{each:.3f}" for each in least), shown, "one seed of three, no command"])
    stay = ", ".join(octaves(row) for row in frozen["lines"]["mup"]["rows"][:-1])
    rows.append(["frozen", losses(frozen), stay, verdict(frozen)])
    return rows


def _trained() -> tuple[list[float], list[float]]:
    """Least losses and octaves to the largest, of the main grid's first seed."""
    found = record(MAIN)
    seed = found["config"]["run"]["seed"]
    curves = [
        Curve(
            values=found["values"],
            losses=[{seed: math.inf if each[0] is None else each[0]} for each in row["losses"]],
        )
        for row in found["lines"]["mup"]["rows"]
    ]
    least = [minimum(curve) for curve in curves]
    moved = [drift(each, least[-1]) for each in least[:-1]]
    return [each.loss for each in least], [math.nan if each is None else each[0] for each in moved]


def said_of_gains() -> str:
    """How much of the drift is the gains'."""
    moved = _trained()[1][0]
    frozen = row_of(record("norm-gains/lr-width.json"), 32)["drift"]["octaves"]
    less = abs(moved) - abs(frozen)
    part = "a part, but not most," if 0 < less < abs(frozen) else "most" if less > 0 else "no part"
    return (
        f"With frozen gains the optimum moves by {frozen:+.2f} octaves from 32 to 256, with trained ones by "
        f"{moved:+.2f}. So trained gains are {part} of the drift of small models."
    )


def beside(what: str, named: Mapping[str, str]) -> Rows:
    """Records of one grid, a row each: where the best rate lies, how far it moves, the verdict."""
    found = {name: record(path) for name, path in named.items()}
    first, second, *_ = sizes = [size["size"] for size in next(iter(found.values()))["sizes"]]
    told = ", ".join(map(str, sizes))
    rows = [[what, f"best rate at {told}", f"octaves from {first}", f"from {second}", "lowest loss", "verdict"]]
    for name, each in found.items():
        bests = ", ".join(best(row) for row in each["lines"]["mup"]["rows"])
        moves = [octaves(row_of(each, size)) for size in (first, second)]
        rows.append([name, bests, *moves, losses(each), verdict(each)])
    return rows


def said_of_positions() -> str:
    """How far apart the two are at the largest width, each at its best rate."""
    absolute, relative = (ends(POSITIONS[kind])["mup"] for kind in ("absolute", "relative"))
    apart = difference(relative, absolute)
    width = record(POSITIONS["relative"])["sizes"][-1]["size"]
    said = {-1: "the bias ends lower", 0: "neither ends lower", 1: "learned positions end lower"}[apart.sign]
    return (
        f"At {width}, each at its best rate, {said}: {statistics.fmean(relative):.2f} nats with it, "
        f"{statistics.fmean(absolute):.2f} without ({apart})."
    )
