"""Stable optima over depth, experts and tokens, and under other optimizers: tables, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.evidence.records import (
    LINES,
    MODELS,
    Rows,
    best,
    cost,
    difference,
    losses,
    octaves,
    record,
    records,
    row_of,
    span,
    verdict,
)
from benchmarks.evidence.width import POSITIONS, ends

ONE_AT_A_TIME = {
    "batch size": "ladder/batch.json",
    "sequence length": "ladder/sequence.json",
    "the tokens of a run": "ladder/tokens.json",
}
HALF_AN_OCTAVE = {rule: f"stability-depth/256-{rule}-3.json" for rule in ("depth_mup", "completep")}
_DEPTH = {"none": "none", "depth_mup": "Depth-µP (α = 1/2)", "completep": "CompleteP (α = 1)"}


def depth() -> Rows:
    """Every record over depth, the narrowest models first."""
    columns = ["layers", "lowest loss at each", "octaves from 2 to the deepest", "2's best tried rate costs it"]
    rows = [["hidden size", "rule", "seeds", *columns, "verdict"]]
    order = list(_DEPTH)
    found = [(each["config"], each) for path, each in records() if path.startswith("stability-depth/")]
    for config, each in sorted(
        found, key=lambda pair: (pair[0]["model"]["hidden_size"], order.index(pair[0]["parametrization"]["depth"]))
    ):
        row = row_of(each, 2)
        layers = ", ".join(str(size["size"]) for size in each["sizes"])
        cells = [layers, losses(each), octaves(row), cost(row), verdict(each)]
        rule = _DEPTH[config["parametrization"]["depth"]]
        rows.append([str(config["model"]["hidden_size"]), rule, str(each["seeds"]), *cells])
    return rows


def said_of_depth() -> str:
    """What depth costs under each rule, which pass at 256, and on how little that hangs."""
    rises = {rule: _rise(f"stability-depth/{rule}.json") for rule in _DEPTH}
    every = [_rise(path) for path, _ in records() if path.startswith("stability-depth/")]
    deeper = "No deepest model is better than two layers" if min(every) > 0 else "Some depth pays"
    octave = {rule: f"stability-depth/256-{rule}.json" for rule in HALF_AN_OCTAVE}
    closer = {rule: record(path) for rule, path in HALF_AN_OCTAVE.items()}
    completep = closer["completep"]
    small, deepest = ([statistics.fmean(loss) for loss in row_of(completep, layers)["losses"]] for layers in (2, 32))
    first, second = sorted(range(len(small)), key=lambda at: small[at])[:2]
    costs = [100 * (loss / min(deepest) - 1) for loss in deepest]
    apart = difference(*(_best_losses(each, 32) for each in closer.values()))
    return (
        f"At hidden size 256 {_both(octave)}; with rates half an octave apart and {completep['seeds']} seeds "
        f"{_both(HALF_AN_OCTAVE)}. There 2 layers end {small[second] - small[first]:.3f} nats apart "
        f"at {completep['values'][first]:g} and {completep['values'][second]:g}, which under CompleteP cost 32 layers "
        f"{costs[first]:.1f} and {costs[second]:.1f} %. The rules' losses differ there by {apart} nats. "
        f"{deeper}. At hidden size 32, 16 layers end {rises['none']:.2f} nats above 2 without a rule, "
        f"{rises['depth_mup']:.2f} under Depth-µP and {rises['completep']:.2f} under CompleteP."
    )


def _both(paths: dict[str, str]) -> str:
    """Whether each of the two rules passes: `both pass`, or one by one."""
    passed = {rule: record(path)["passed"] for rule, path in paths.items()}
    if len({*passed.values()}) == 1:
        return "both pass" if passed["completep"] else "both fail"
    words = {True: "passes", False: "fails"}
    return f"Depth-µP {words[passed['depth_mup']]} and CompleteP {words[passed['completep']]}"


def _best_losses(found: dict[str, Any], size: int) -> list[float]:
    """Of each seed, at the value whose mean is lowest."""
    return min(row_of(found, size)["losses"], key=statistics.fmean)


def _rise(path: str) -> float:
    rows = record(path)["lines"]["mup"]["rows"]
    rise: float = rows[-1]["minimum"]["loss"] - rows[0]["minimum"]["loss"]
    return rise


def one_at_a_time() -> Rows:
    """The learning rate over sequences per step, tokens per sequence, and tokens of the run."""
    columns = ["sizes", "best rate at each", "octaves", "the smallest's best tried rate costs the largest"]
    rows = [["what grows", *columns, "lowest loss at each", "verdict"]]
    for what, path in ONE_AT_A_TIME.items():
        found = record(path)
        row, *_ = found["lines"]["mup"]["rows"]
        sizes = ", ".join(f"{each['size']:,}" for each in found["sizes"])
        values = ", ".join(best(each) for each in found["lines"]["mup"]["rows"])
        rows.append([what, sizes, values, octaves(row), cost(row), losses(found), verdict(found)])
    return rows


def experts() -> Rows:
    """The learning rate over the number of experts."""
    columns = ["lowest loss at 4, 8, 16, 32 experts", "octaves from 4 to 32", "4's best tried rate costs 32", "verdict"]
    rows = [["rule and experts per token", *columns]]
    for rule, what in {"fixed_share": "half of them", "any_share": "2"}.items():
        found = record(f"experts/{rule}.json")
        row = row_of(found, 4)
        rows.append([f"`{rule}`, {what}", losses(found), octaves(row), cost(row), verdict(found)])
    return rows


OPTIMIZERS = {
    "optimizers": {"Muon": "optimizers/muon.json", "Lion": "optimizers/lion.json"},
    "optimizers-64": {name: f"optimizers/{name.lower()}-64.json" for name in ("Muon", "Lion", "SOAP")},
    "momentum": {"Muon": "optimizers/muon-momentum.json"},
}
"""By the name of the table: other optimizers than AdamW, and their records."""


def optimizers(table: str) -> Rows:
    """The learning rate, or the momentum, over width, of other optimizers than AdamW."""
    found = {name: record(path) for name, path in OPTIMIZERS[table].items()}
    sizes = [str(each["size"]) for each in found["Muon"]["sizes"]]
    least, largest = sizes[0], sizes[-1]
    what = "rate" if found["Muon"]["over"] == "lr" else "1 - momentum"
    moves = [f"octaves from {least} to {largest}", f"{least}'s best tried {what} costs {largest}"]
    rows = [["optimizer", "", f"best {what} at {', '.join(sizes)}", *moves, "lowest loss", "verdict"]]
    for name, each in found.items():
        for kind, line in each["lines"].items():
            first = line["rows"][0]
            cells = [", ".join(best(row) for row in line["rows"]), octaves(first), cost(first), losses(each, kind)]
            said = verdict(each) if kind == each["judged"] else "not judged"
            rows.append([name if kind == each["judged"] else "", LINES[kind], *cells, said])
    return rows


def said_of_optimizers() -> str:
    """Whether each ends lower at the largest width than AdamW, on the same text and seeds, at its best rate."""
    adamw, said = ends(POSITIONS["absolute"])["mup"], []
    for name, path in OPTIMIZERS["optimizers-64"].items():
        apart = difference(ends(path)["mup"], adamw)
        where = {-1: "ends lower", 0: "is not told apart", 1: "ends higher"}[apart.sign]
        said.append(f"{name} {where} ({apart} nats)")
    return (
        f"At {record(POSITIONS['absolute'])['sizes'][-1]['size']} AdamW ends at {statistics.fmean(adamw):.3f} nats "
        f"([positions](positions.md)); {', '.join(said)}. Initial values and the output multiplier were AdamW's."
    )


def decay(folder: str, rules: Sequence[str], sizes: str, prefix: str = "") -> Rows:
    """Best weight decay and lowest loss, of some rules."""
    rows = [["rule", f"lowest loss at {sizes}", f"best decay at {sizes}", "verdict"]]
    for rule in rules:
        found = record(f"{folder}/{prefix}{rule}.json")
        values = ", ".join(best(row) for row in found["lines"]["mup"]["rows"])
        rows.append([f"`{rule}`", losses(found), values, verdict(found)])
    return rows


def said_of_decay() -> str:
    """Which rule's optimum moves least where text is repeated, and which ends lowest."""
    found = {rule: record(f"decay-epochs/{rule}.json") for rule in ("independent", "sqrt", "coupled")}
    moves = {rule: abs(row_of(each, 32)["drift"]["octaves"]) for rule, each in found.items()}
    ends = {rule: row_of(each, 128)["minimum"]["loss"] for rule, each in found.items()}
    least, lowest = min(moves, key=moves.__getitem__), min(ends, key=ends.__getitem__)
    also = "and ends lowest too" if least == lowest else f"but `{lowest}` ends lowest at 128"
    return (
        f"The best decay moves least under `{least}` ({moves[least]:.2f} octaves), {also} ({ends[lowest]:.3f} against "
        f"{ends[least]:.3f})."
    )


def said_of_tokens() -> str:
    """How the best decay of a run changes with its length, in repeated text and in fresher text."""
    again = [row["minimum"]["value"] for row in record("decay-epochs/tokens-independent.json")["lines"]["mup"]["rows"]]
    rows = record("decay-epochs/tokens-few-timescale.json")["lines"]["mup"]["rows"]
    fresh = [row["minimum"]["value"] / factor for row, factor in zip(rows, (1, 2, 4), strict=True)]
    off = row_of(record("decay-epochs/tokens-timescale.json"), 204800)["drift"]["octaves"]
    between = "between what the two rules say" if fresh[0] / 4 < fresh[-1] < fresh[0] else "beyond one of the rules"
    return (
        f"At 24 epochs the best decay is {again[-1] / again[0]:.1f} times that at 6; `timescale` asks for a quarter, "
        f"and is off by {off:.1f} octaves. On four times the text the decay that the best run uses goes from "
        f"{fresh[0]:.2f} over {fresh[1]:.2f} to {fresh[2]:.2f} (the last table over 1, 2 and 4), {between}."
    )


def images() -> Rows:
    """The learning rate over width, of models of pictures."""
    head = ["model", "parametrization", "widths", "best rate", "octaves to the largest", "cost there", "lowest loss"]
    rows = [[*head, "verdict"]]
    for file in ("mlp", "resnet-fashion", "resnet"):
        found = record(f"images/{file}.json")
        model = f"{MODELS[found['of']]} on {found['data']}"
        for name, line in found["lines"].items():
            cells = [", ".join(best(row) for row in line["rows"]), octaves(line["rows"][0]), cost(line["rows"][0])]
            said = verdict(found) if name == found["judged"] else "not judged"
            rows.append([model, LINES[name], span(found), *cells, losses(found, name), said])
    return rows


def said_of_images() -> str:
    """Whether wider is better for the MLP, which ResNet ends lower, and how far its optimum moves on digits."""
    mlp, resnet = record("images/mlp.json"), record("images/resnet.json")
    worse = any(mlp["lines"]["mup"]["larger_is_worse"].values())
    said = "some width of the MLP is" if worse else "no width of the MLP is"
    ends = [row["minimum"]["loss"] for row in resnet["lines"]["mup"]["rows"]]
    fresh = record("images/resnet-fashion.json")
    widest = {name: line["rows"][-1]["minimum"]["loss"] for name, line in fresh["lines"].items()}
    order = "lower" if widest["standard"] < widest["mup"] else "higher"
    return (
        f"In µP {said} worse than the one before at any rate, by more than the noise. On Fashion-MNIST "
        f"the widest standard ResNet, at its own best rate, ends {order} ({widest['standard']:.3f} against "
        f"{widest['mup']:.3f}). On digits the ResNet's optimum moves by {octaves(row_of(resnet, 4))} octaves from 4 "
        f"channels and by {octaves(row_of(resnet, 8))} from 8. Its losses of {min(ends):.3f} to {max(ends):.3f} nats "
        "say that it knows nearly all digits by heart, where the best rate is mostly noise."
    )
