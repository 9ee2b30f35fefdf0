"""The tables of docs/evidence/README.md, each made from the JSON files beside that page, with the commands' verdicts.

    python -m benchmarks.evidence       # writes the tables anew, between their markers

Public names: `TABLES`, `page`, `parts`, `verdict`. A table stands in the page between `<!-- made: NAME -->` and
`<!-- end -->`; tests/proof/test_evidence.py holds that every table does, and that it is what its records give.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "evidence"
_PART = re.compile(r"(<!-- made: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

LINES = {"mup": "µP", "standard": "standard", "fan_in": "1/sqrt(fan-in)"}
"""Parametrizations, as the tables' heads name them."""

Rows = list[list[str]]

_MODELS = {"mlp": "MLP", "resnet": "ResNet"}


def records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record of the folder, by its path there."""
    for path in sorted(FOLDER.glob("*/*.json")):
        yield str(path.relative_to(FOLDER)), json.loads(path.read_text(encoding="utf-8"))


def record(path: str) -> dict[str, Any]:
    """One record."""
    found: dict[str, Any] = json.loads((FOLDER / path).read_text(encoding="utf-8"))
    return found


# --- what a record says ---


def verdict(found: dict[str, Any]) -> str:
    """The verdict that the command gave, with its reasons, in words."""
    if "passed" not in found:
        return "none: a measurement"
    said = found.get("verdict") or ("passed" if found["passed"] else "failed")
    if "runs" in found or "rungs" in found:
        reasons = [*found["reasons"], *found.get("open", ())]
    elif "lines" in found:
        line = found["lines"][found["judged"]]
        reasons = [*line["reasons"], *line.get("open", ())]
    else:
        reasons = [f"out of bounds: {name}" for name in found["out_of_bounds"]]
        reasons += [f"undecided: {name}" for name in found.get("undecided", ())]
    if len(reasons) > 4:
        reasons = [*reasons[:3], f"and {len(reasons) - 3} more"]
    return f"**{said}**" + (f": {'; '.join(reasons)}" if reasons else "")


def _own(line: dict[str, Any]) -> str:
    """How one parametrization of a record would be judged, were it the one that is."""
    return "failed" if line["reasons"] else "undecided" if line.get("open") else "passed"


def _seeds(found: dict[str, Any]) -> str:
    return str(found["seeds"])


def _octaves(row: dict[str, Any], error: bool = True) -> str:
    """Octaves from a size's optimum to the largest's, with the standard error over seeds where there are several."""
    if row["drift"] is None:
        return "beyond what was tried"
    spread = f" ± {row['drift']['error']:.2f}" if error and row["drift"]["error"] else ""
    return f"{row['drift']['octaves']:+.2f}{spread}"


def _cost(row: dict[str, Any]) -> str:
    return "diverges" if row["cost"] is None else f"{100 * row['cost']:.2f} %"


def _best(row: dict[str, Any]) -> str:
    least = row["minimum"]
    if least["edge"]:
        return f"{'below' if least['edge'] == 'low' else 'above'} {least['tried']:.2g}"
    return f"{least['value'] or least['tried']:.2g}"


def _row_of(found: dict[str, Any], size: int, line: str = "mup") -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in found["lines"][line]["rows"] if row["size"] == size)
    return row


def _losses(found: dict[str, Any], line: str = "mup") -> str:
    return ", ".join(f"{row['minimum']['loss']:.3f}" for row in found["lines"][line]["rows"])


def _span(found: dict[str, Any]) -> str:
    sizes = [size["size"] for size in found["sizes"]]
    return f"{sizes[0]} to {sizes[-1]}"


# --- tables: head and rows ---


def _all() -> Rows:
    """Every record: what was asked, how often, from which size it is judged, and the command's verdict."""
    rows = [["record", "asked", "of", "steps", "seeds", "judged from", "verdict of the command"]]
    for path, found in records():
        link = f"[{path.removesuffix('.json')}]({path})"
        if "curves" in found:
            sizes = f"hidden size {found['config']['model']['hidden_size']} by {found['small']['model']['hidden_size']}"
            steps = str(found["config"]["training"]["train_steps"])
            seeds = str(len({curve["seed"] for curve in found["curves"]}))
            rows.append([link, f"reverse transfer, {sizes}", "", steps, seeds, "", verdict(found)])
        elif "runs" in found:
            steps = str(found["steps"])
            rows.append([link, "transferred values against defaults", "µP", steps, _seeds(found), "", verdict(found)])
        elif "rungs" in found:
            least, largest = found["rungs"][0], found["rungs"][-1]
            span = ", ".join(
                f"{axis} {least[axis]} to {largest[axis]} times"
                for axis in ("batch", "tokens", "width")
                if axis in found["rate"]
            )
            few, many = min(found["steps"].values()), max(found["steps"].values())
            asked = f"laws of lr and loss, {span}"
            rows.append([link, asked, "µP", f"{few} to {many}", _seeds(found), "", verdict(found)])
        elif "searches" in found:
            rows.append([link, "cost of a search", "", "", f"{_seeds(found)} searches", "", verdict(found)])
        elif "lines" in found:
            of = f"{_MODELS[found['of']]} on {found['data']}: " if "of" in found else ""  # of docs/examples/images.py
            asked = f"{of}{found['over']} over {found['across']}, {_span(found)}"
            start = str(found.get("from", found["sizes"][0]["size"]))
            steps = str(found["steps"] if of else found["config"]["training"]["train_steps"])
            rows.append([link, asked, LINES[found["judged"]], steps, _seeds(found), start, verdict(found)])
        else:
            what = "experts" if found["over"] == "num_moe_experts" else found["axis"]
            kind = "coordinates and ranges" if "ranges" in found["cells"][0]["coordinates"] else "coordinates"
            asked = f"{kind} over {what}, {_span(found)}"
            rows.append([link, asked, found["judged"].replace("mup", "µP"), str(found["steps"]), _seeds(found), "",
                         verdict(found)])  # fmt: skip
    return rows


_FAMILIES = {
    "gpt3": "GPT-3 style, everything growing",
    "llama": "Llama style, 2 KV heads that do not grow",
    "moe": "8 experts, 2 per token, their FFN growing",
    "mla": "multi-latent attention, heads and ranks growing",
    "t5": "encoder and decoder, everything growing",
    "bert": "BERT, everything growing",
}


_DEVIATIONS = ["judged", "output", "change since step 0", "gradient", "update"]


def _deviations(found: dict[str, Any]) -> list[str]:
    """Largest deviations from the expected slope, above and below, where that side has a bound."""
    label = found["judged"]
    judged = {name for name, each in found["verdicts"][label].items() if each["verdict"] != "not judged"}
    cells = [str(len(judged))]
    for quantity in ("output", "change", "gradient", "update"):
        slopes = [s for s in found["slopes"][label] if s["quantity"] == quantity and s["name"] in judged]
        above = max(s["slope"] - s["expected"] for s in slopes if s["high"] is not None)
        below = min(s["slope"] - s["expected"] for s in slopes if s["low"] is not None)
        cells.append(f"{above:+.2f}, {below:+.2f}")
    return cells


def _coordinates() -> Rows:
    """Checks over width, of several families."""
    rows = [["family", *_DEVIATIONS, "out of bounds in standard", "seeds", "verdict"]]
    for family, what in _FAMILIES.items():
        found = record(f"coord-check-{family}/mup.json")
        standard = sum(each["verdict"] == "out of bounds" for each in found["verdicts"]["standard"].values())
        rows.append([what, *_deviations(found), str(standard), _seeds(found), verdict(found)])
    return rows


_OF_EXPERTS = {
    "coord-check-experts/mup.json": "half of the experts see a token",
    "coord-check-experts-any/mup.json": "2 experts see a token",
    "coord-check-experts/mup-without-the-number-of-experts-in-epsilon.json": "half, epsilon without their number",
}


def _coordinates_of_experts() -> Rows:
    """Checks over the number of experts."""
    rows = [["experts", *_DEVIATIONS, "seeds", "verdict"]]
    for path, what in _OF_EXPERTS.items():
        found = record(path)
        rows.append([what, *_deviations(found), _seeds(found), verdict(found)])
    return rows


_SCALED = {
    "embedding.word_embeddings.weight": "word embeddings, and head",
    "decoder.layers.*.self_attention.linear_qkv.weight": "query, key, value",
    "decoder.layers.*.self_attention.linear_proj.weight": "attention's output projection",
    "decoder.layers.*.mlp.linear_fc1.weight": "MLP, first layer",
    "decoder.layers.*.mlp.linear_fc2.weight": "MLP, second layer",
}


def _ranges() -> Rows:
    """What formats round to 0 of weights and their gradients at the largest width, stored as they are and at unit."""
    from mup_megatron.proof.ranges import percent, range_rows

    found = [record(f"ranges/{name}.json") for name in ("none", "unit")]
    held = [{(row.quantity, row.name): row for row in range_rows(each)} for each in found]
    formats = ("underflow e4m3", "underflow e5m2")
    heads = [f"{kind.removeprefix('underflow ')} rounds to 0" for kind in formats]
    rows = [["tensor", "of it", "", "root mean square", "largest", *heads]]
    for name, what in _SCALED.items():
        for quantity in ("weight", "weight_gradient"):
            for scale, by_name in zip(("as it is", "unit"), held, strict=True):
                row = by_name[quantity, name]
                first = (
                    [what if quantity == "weight" else "", quantity.removeprefix("weight_")]
                    if scale != "unit"
                    else ["", ""]
                )
                sizes = " to ".join(dict.fromkeys(f"{value:.1e}" for value in row.rms))
                rows.append(
                    [*first, scale, sizes, f"{row.largest:.1e}", *(percent(row.shares[kind]) for kind in formats)]
                )
    return rows


def _rates(folder: str) -> Rows:
    """The learning rate over width: a block of rows per parametrization."""
    found = record(f"{folder}/lr-width.json")
    heads = [
        "",
        "hidden size",
        "best rate",
        "octaves to 256",
        "its best tried rate costs 256",
        "lowest loss",
        "verdict",
    ]
    rows = [heads]
    for name, line in found["lines"].items():
        for number, row in enumerate(line["rows"]):
            last = number == len(line["rows"]) - 1
            cells = ["", ""] if last else [_octaves(row), _cost(row)]
            own = f"**{_own(line)}**" if number == 0 else ""
            label = LINES[name] if number == 0 else ""
            rows.append([label, str(row["size"]), _best(row), *cells, f"{row['minimum']['loss']:.3f}", own])
    return rows


def _rates_512() -> Rows:
    found = record("stability-lr-width-512/lr-width.json")
    rows = [["hidden size", "best rate", "octaves to 512", "its best tried rate costs 512", "lowest loss"]]
    for row in found["lines"]["mup"]["rows"]:
        last = row is found["lines"]["mup"]["rows"][-1]
        cells = ["", ""] if last else [_octaves(row), _cost(row)]
        rows.append([str(row["size"]), _best(row), *cells, f"{row['minimum']['loss']:.3f}"])
    return rows


def _others() -> Rows:
    """Output multiplier and initial deviation over width."""
    files = [record(f"stability-width/{name}-width.json") for name in ("output_multiplier", "init_method_std")]
    heads = ["octaves to 256", "costs 256"]
    rows = [["hidden size", "output multiplier", *heads, "initial standard deviation", *heads]]
    for size in (32, 64, 128, 256):
        cells: list[str] = []
        for found in files:
            row = _row_of(found, size)
            cells += [_best(row), *(["", ""] if size == 256 else [_octaves(row), _cost(row)])]
        rows.append([str(size), *cells])
    rows.append(["verdict", verdict(files[0]), "", "", verdict(files[1]), "", ""])
    return rows


def _clipping() -> Rows:
    """The learning rate over width under either norm of training.clip_norm."""
    rows = [
        ["`training.clip_norm`", "best rate at 32, 64, 128", "octaves from 32", "from 64", "lowest loss", "verdict"]
    ]
    for norm in ("global", "invariant"):
        found = record(f"clip-norm/{norm}.json")
        best = ", ".join(_best(row) for row in found["lines"]["mup"]["rows"])
        cells = [best, _octaves(_row_of(found, 32)), _octaves(_row_of(found, 64)), _losses(found), verdict(found)]
        rows.append([f"`{norm}`", *cells])
    return rows


def _images() -> Rows:
    """The learning rate over width, of models of pictures."""
    head = ["model", "parametrization", "widths", "best rate", "octaves to the largest", "cost there", "lowest loss"]
    rows = [[*head, "verdict"]]
    for model in ("mlp", "resnet"):
        found = record(f"images/{model}.json")
        for name, line in found["lines"].items():
            cells = [", ".join(_best(row) for row in line["rows"]), _octaves(line["rows"][0]), _cost(line["rows"][0])]
            said = verdict(found) if name == found["judged"] else "not judged"
            rows.append([_MODELS[model], LINES[name], _span(found), *cells, _losses(found, name), said])
    return rows


def _quality() -> Rows:
    """Every figure of the three models, and what each seed gave."""
    from benchmarks.quality import FIGURES, MODELS, figure_of, means

    runs = record("quality/quality.json")["runs"]
    rows = [["model", "rate at the base", *FIGURES]]
    for model in MODELS:
        own = [run for run in runs if run["model"] == model]
        cells = []
        for name in FIGURES:
            each = ", ".join(f"{figure_of(run, name):.2f}" for run in own)
            cells.append(f"{means(runs, name)[model]:.2f} ({each})")
        rows.append([model, f"{own[0]['values']['hparams.lr']:.2g}", *cells])
    return rows


def _ladder() -> Rows:
    """Best rate and loss of every rung, the last of which no law has seen."""
    found = record("ladder/ladder.json")
    rows = [["batch", "tokens", "width", "steps", "best rate", "loss there", ""]]
    for rung in found["rungs"]:
        error = "" if rung["error"] is None else f" ± {rung['error']:.2f} octaves"
        steps = found["steps"][f"batch-{rung['batch']}-tokens-{rung['tokens']}-width-{rung['width']}"]
        sizes = [f"× {rung[axis]}" for axis in ("batch", "tokens", "width")]
        cells = [*sizes, str(steps), f"{_best({'minimum': rung})}{error}"]
        held = found["held_out"] if rung is found["rungs"][-1] else None
        rate = f"{held['rate']['predicted']:.2g} ± {held['rate']['error']:.2f} octaves" if held else ""
        said = f"predicted: {rate}, {held['loss']['predicted']:.3f} ± {held['loss']['error']:.3f}" if held else ""
        rows.append([*cells, f"{rung['least']:.3f}", said])
    return rows


def _exponents() -> Rows:
    """Of the rate, and how far it and others' exponents end from the last rung's best rate."""
    found = record("ladder/ladder.json")
    axes = [axis for axis in ("batch", "tokens", "width") if axis in found["rate"]]
    rows = [
        [
            "",
            *(f"exponent of {axis}" for axis in axes),
            "octaves off at the largest rung",
            "scatter of all rungs (octaves)",
        ]
    ]
    cells = [f"{found['rate'][axis]['exponent']:+.2f} ± {found['rate'][axis]['error']:.2f}" for axis in axes]
    off = found["held_out"]["rate"]["octaves"]
    rows.append(["fitted", *cells, "not known" if off is None else f"{off:+.2f}", f"{found['rate']['spread']:.2f}"])
    for name, each in found["published"].items():
        off = "not known" if each["octaves"] is None else f"{each['octaves']:+.2f}"
        rows.append([f"{name}, from the first rung", *[""] * len(axes), off, f"{each['scatter']:.2f}"])
    return rows


def _mixed() -> Rows:
    heads = ["lowest loss at 32, 64, 128, 256", "octaves from 32", "from 64", "64's best tried rate costs 256"]
    rows = [["", "rule", *heads, "verdict (from 32)"]]
    for folder, what in (("kv", "2 KV heads"), ("ffn", "FFN of 128")):
        for rule in ("output_like", "hidden_like"):
            found = record(f"mixed-growth/{folder}-{rule}.json")
            first, second = _row_of(found, 32), _row_of(found, 64)
            cells = [_losses(found), _octaves(first), _octaves(second), _cost(second)]
            rows.append([what, f"`{rule}`", *cells, verdict(found)])
    return rows


def _depth() -> Rows:
    """Every record over depth, the narrowest models first."""
    heads = [
        "layers",
        "lowest loss at each",
        "octaves from 2 to the deepest",
        "2's best tried rate costs it",
        "verdict",
    ]
    rows = [["hidden size", "rule", *heads]]
    names = {"none": "none", "depth_mup": "Depth-µP (α = 1/2)", "completep": "CompleteP (α = 1)"}
    found = [(each["config"], each) for path, each in records() if path.startswith("stability-depth/")]
    order = list(names)
    for config, each in sorted(
        found, key=lambda pair: (pair[0]["model"]["hidden_size"], order.index(pair[0]["parametrization"]["depth"]))
    ):
        row = _row_of(each, 2)
        layers = ", ".join(str(size["size"]) for size in each["sizes"])
        cells = [layers, _losses(each), _octaves(row), _cost(row), verdict(each)]
        rows.append([str(config["model"]["hidden_size"]), names[config["parametrization"]["depth"]], *cells])
    return rows


def _experts() -> Rows:
    heads = ["lowest loss at 4, 8, 16, 32 experts", "octaves from 4 to 32", "4's best tried rate costs 32", "verdict"]
    rows = [["rule and experts per token", *heads]]
    for rule, what in {"fixed_share": "half of them", "any_share": "2"}.items():
        found = record(f"experts/{rule}.json")
        row = _row_of(found, 4)
        rows.append([f"`{rule}`, {what}", _losses(found), _octaves(row), _cost(row), verdict(found)])
    return rows


def _optimizers() -> Rows:
    heads = ["best rate at 32, 64, 128", "octaves from 32 to 128", "32's best tried rate costs 128", "lowest loss"]
    rows = [["optimizer", "", *heads, "verdict"]]
    for name in ("muon", "lion", "soap"):
        found = record(f"optimizers/{name}.json")
        for kind, line in found["lines"].items():
            first = line["rows"][0]
            cells = [", ".join(_best(row) for row in line["rows"]), _octaves(first), _cost(first), _losses(found, kind)]
            said = verdict(found) if kind == found["judged"] else "not judged"
            rows.append([f"`{name}`" if kind == "mup" else "", LINES[kind], *cells, said])
    return rows


def _decay(folder: str, rules: Sequence[str], sizes: str, prefix: str = "") -> Rows:
    rows = [["rule", f"lowest loss at {sizes}", f"best decay at {sizes}", "verdict"]]
    for rule in rules:
        found = record(f"{folder}/{prefix}{rule}.json")
        best = ", ".join(_best(row) for row in found["lines"]["mup"]["rows"])
        rows.append([f"`{rule}`", _losses(found), best, verdict(found)])
    return rows


def _gains() -> Rows:
    """Trained gains: the first seed of the learning rates' record; its minima are computed from that seed alone."""
    from mup_megatron.proof.optimum import Curve, drift, minimum

    frozen, trained = record("norm-gains/lr-width.json"), record("stability-lr-width/lr-width.json")
    seed = trained["config"]["run"]["seed"]
    curves = [
        Curve(values=trained["values"], losses=[{seed: _number(losses[0])} for losses in row["losses"]])
        for row in trained["lines"]["mup"]["rows"]
    ]
    least = [minimum(curve) for curve in curves]
    moved = [drift(each, least[-1]) for each in least[:-1]]
    shown = ", ".join("beyond" if each is None else f"{each[0]:+.2f}" for each in moved)
    rows = [["gains", "lowest loss at 32, 64, 128, 256", "octaves from 32, 64, 128 to 256", "verdict (from 32)"]]
    rows.append(["trained", ", ".join(f"{each.loss:.3f}" for each in least), shown, "one seed of three, no command"])
    octaves = ", ".join(_octaves(row) for row in frozen["lines"]["mup"]["rows"][:-1])
    rows.append(["frozen", _losses(frozen), octaves, verdict(frozen)])
    return rows


def _number(loss: float | None) -> float:
    return math.inf if loss is None else loss


def _positions() -> Rows:
    """Learned positions and relative ones: losses of the first seed at the rates that both were trained at."""
    found = {kind: record(f"positions/{kind}.json") for kind in ("absolute", "relative")}
    common = [value for value in found["absolute"]["values"] if value in found["relative"]["values"]]
    rows = [["positions", *(f"hidden size {size}, rate {rate:g}" for size in (32, 64) for rate in common), "verdict"]]
    for kind, each in found.items():
        cells = [
            f"{row['losses'][each['values'].index(rate)][0]:.3f}"
            for row in each["lines"]["mup"]["rows"]
            for rate in common
        ]
        rows.append([kind, *cells, verdict(each)])
    return rows


def _reverse() -> Rows:
    """Each model's first and last losses, and how far the loss rose above its lowest, means of five steps."""
    rows = [["model", "rate", "seed", "first loss", "last loss", "rises by at most"]]
    for curve in record("reverse/reverse.json")["curves"]:
        losses = [f"{loss:.2f}" for loss in (curve["losses"][0], curve["losses"][-1])]
        rise = curve["state"] if curve["rise"] is None else f"{curve['rise']:.2f}"
        rows.append([curve["model"], f"{curve['lr']:.2g}", str(curve["seed"]), *losses, rise])
    return rows


_SEARCHES = {
    "random": "random",
    "random, halving": "random, successive halving",
    "random, hyperband": "random, hyperband",
    "TPE": "TPE",
    "TPE, halving": "TPE, successive halving (what `configs/gpt3`, `llama` and `deepseek` use)",
    "TPE, halving, 8 workers": "the same by 8 workers at a time",
    "TPE, hyperband": "TPE, hyperband",
}


def _searching() -> Rows:
    found = record("tuning-cost/cost.json")["searches"]
    rows = [["search", "arrived", "mean", "median", "share of random search's mean"]]
    whole = found["random"]["mean"]
    for name, what in _SEARCHES.items():
        needed = [cost for cost in found[name]["needed"] if cost is not None]
        mean = statistics.fmean(needed)
        share = "1" if name == "random" else f"{mean / whole:.2f}"
        arrived = f"{len(needed)} of {len(found[name]['needed'])}"
        rows.append([what, arrived, f"{mean:.1f}", f"{statistics.median(needed):.1f}", share])
    return rows


def _target(folder: str, goals: Sequence[float]) -> Rows:
    """Cost at which the median over searches of the best trial's loss comes within a goal, in per cent of the best."""
    found = record(f"{folder}/cost.json")
    names = {
        "random, on the target": "random, on the target",
        "TPE, on the target": "TPE, on the target",
        "random": "random, on the proxy",
        "TPE": "TPE, on the proxy",
        "random, halving": "random with halving, on the proxy",
        "TPE, halving": "TPE with halving, on the proxy",
    }
    rows = [["search", *(f"{goal:g} %" for goal in goals)]]
    for name, what in names.items():
        if name in found["searches"]:
            curves = found["searches"][name]["curves"]
            rows.append([what, *(_median_cost(curves, found["best"] * (1 + goal / 100)) for goal in goals)])
    return rows


def _median_cost(curves: Sequence[Sequence[Sequence[float]]], goal: float) -> str:
    """Where the median over curves of the loss so far is first within the goal."""
    for cost in sorted({point[0] for curve in curves for point in curve}):
        so_far = [next((loss for at, loss in reversed(curve) if at <= cost), math.inf) for curve in curves]
        if statistics.median(so_far) <= goal:
            return f"{math.floor(cost + 0.5)}"
    return "never"


TABLES: dict[str, Callable[[], Rows]] = {
    "records": _all,
    "coordinates": _coordinates,
    "coordinates-experts": _coordinates_of_experts,
    "ranges": _ranges,
    "rates": partial(_rates, "stability-lr-width"),
    "rates-fan-in": partial(_rates, "stability-fan-in"),
    "rates-512": _rates_512,
    "rates-bert": partial(_rates, "bert"),
    "others": _others,
    "mixed-growth": _mixed,
    "clip-norm": _clipping,
    "images": _images,
    "quality": _quality,
    "ladder": _ladder,
    "exponents": _exponents,
    "depth": _depth,
    "experts": _experts,
    "optimizers": _optimizers,
    "decay": partial(_decay, "stability-decay", ("independent", "coupled"), "32, 64, 128"),
    "decay-epochs": partial(_decay, "decay-epochs", ("independent", "sqrt", "coupled"), "32, 64, 128"),
    "decay-tokens": partial(_decay, "decay-epochs", ("independent", "timescale"), "6, 12, 24 epochs", "tokens-"),
    "decay-few": partial(_decay, "decay-epochs", ("timescale",), "1.5, 3, 6 epochs", "tokens-few-"),
    "norm-gains": _gains,
    "positions": _positions,
    "reverse": _reverse,
    "searches": _searching,
    "searches-target": partial(_target, "tuning-cost-target", (1.1, 0.9)),
    "searches-translation": partial(_target, "translation-cost", (5, 2.5, 1)),
}


def table(name: str) -> str:
    """One table in Markdown."""
    head, *rows = TABLES[name]()
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def parts(text: str) -> dict[str, str]:
    """What stands between the markers of a page, by name."""
    return {name: body for _, name, body, _ in _PART.findall(text)}


def page(text: str) -> str:
    """The page with every table made anew."""
    return _PART.sub(lambda found: f"{found[1]}{table(found[2])}{found[4]}", text)


if __name__ == "__main__":
    README = FOLDER / "README.md"
    README.write_text(page(README.read_text(encoding="utf-8")), encoding="utf-8")
