"""Coordinate checks and ranges of values: tables, and what follows from them."""

from __future__ import annotations

from typing import Any

from benchmarks.evidence.records import Rows, record, seeds, verdict

_FAMILIES = {
    "gpt3": "GPT-3 style, everything growing",
    "llama": "Llama style, 2 KV heads that do not grow",
    "moe": "8 experts, 2 per token, their FFN growing",
    "mla": "multi-latent attention, heads and ranks growing",
    "t5": "encoder and decoder, everything growing",
    "bert": "BERT, everything growing",
}
_OF_EXPERTS = {
    "coord-check-experts/mup.json": "half of the experts see a token",
    "coord-check-experts-any/mup.json": "2 experts see a token",
    "coord-check-experts/mup-without-the-number-of-experts-in-epsilon.json": "half, epsilon without their number",
}
_DEVIATIONS = ["judged", "output", "change since step 0", "gradient", "update"]
_KEY_BIAS = "bias[key]"


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


def coordinates() -> Rows:
    """Checks over width, of several families."""
    rows = [["family", *_DEVIATIONS, "out of bounds in standard", "seeds", "verdict"]]
    for family, what in _FAMILIES.items():
        found = record(f"coord-check-{family}/mup.json")
        standard = sum(each["verdict"] == "out of bounds" for each in found["verdicts"]["standard"].values())
        rows.append([what, *_deviations(found), str(standard), seeds(found), verdict(found)])
    return rows


def coordinates_of_experts() -> Rows:
    """Checks over the number of experts."""
    rows = [["experts", *_DEVIATIONS, "seeds", "verdict"]]
    for path, what in _OF_EXPERTS.items():
        found = record(path)
        rows.append([what, *_deviations(found), seeds(found), verdict(found)])
    return rows


def logits() -> str:
    """How the logits of the GPT-3 style family and their changes go, and attention in the standard parametrization."""
    slopes = record("coord-check-gpt3/mup.json")["slopes"]

    def of(line: str, name: str, quantity: str) -> list[str]:
        found = [each for each in slopes[line] if (each["name"], each["quantity"]) == (name, quantity)]
        return [f"{each['slope']:.2f}" for each in sorted(found, key=lambda each: each["step"])]

    changes = of("mup", "output_layer", "change")
    attention = of("standard", "decoder.layers.1.self_attention", "output")
    return (
        f"µP's logits fall as width^{of('mup', 'output_layer', 'output')[0]} at step 0 (-1/2 is expected if the head "
        f"does not start from zero); their changes go as width^{', '.join(changes)} after {len(changes)} steps. In the "
        f"standard parametrization the last attention's output goes as width^{attention[0]} at step 0 and "
        f"width^{attention[1]} after one."
    )


def said_of_fan_in() -> str:
    """How many modules leave their bounds, and the largest growth of a change after the last step, in both."""
    found = record("coord-check-fan-in/fan_in.json")
    out = {
        line: sum(each["verdict"] == "out of bounds" for each in found["verdicts"][line].values())
        for line in ("fan_in", "mup")
    }
    largest = {
        line: max(
            each["slope"]
            for each in found["slopes"][line]
            if (each["quantity"], each["step"]) == ("change", found["steps"]) and each["slope"] is not None
        )
        for line in out
    }
    return (
        f"Of {len(found['verdicts']['mup'])} modules and parameters {out['fan_in']} leave their bounds with "
        f"1/sqrt(fan-in) initial values and {out['mup']} in µP. After {found['steps']} steps the change that grows "
        f"most goes as width^{largest['fan_in']:.2f} there and as width^{largest['mup']:.2f} in µP."
    )


def layouts() -> str:
    """How far slopes at TP 2 and PP 2 are from those at TP 1."""
    whole, *split = (_slopes(f"coord-check-layouts/{name}.json") for name in ("tp1", "tp2", "pp2"))
    away = [
        {key: abs(slope - each[key]) for key, slope in whole.items() if None not in (slope, each[key])}
        for each in split
    ]
    most = max(far for each in away for key, far in each.items() if not _of_key_bias(key))
    tp2, pp2 = (max(far for key, far in each.items() if _of_key_bias(key)) for each in away)
    return (
        f"All slopes agree with those on one process within {most:.0e}, except for the updates of key biases "
        f"({tp2:.2f} at TP 2, {pp2:.2f} at PP 2): their gradient is zero in exact arithmetic, so Adam steps on "
        "rounding errors."
    )


def _of_key_bias(key: tuple[str, str, int]) -> bool:
    return key[0].endswith(_KEY_BIAS) and key[1] == "update"


def _slopes(path: str) -> dict[tuple[str, str, int], Any]:
    return {(each["name"], each["quantity"], each["step"]): each["slope"] for each in record(path)["slopes"]["mup"]}


def controls() -> str:
    """What is out of bounds where a rule is taken out of T5 and of BERT."""
    t5, bert = (
        record(f"coord-check-{name}/mup-without-{what}.json")
        for name, what in (("t5", "attention-scale"), ("bert", "forward-multiplier-of-the-readout"))
    )
    logits_of = [each for each in t5["slopes"][t5["judged"]] if each["name"] in t5["out_of_bounds"]]
    least, most = (f(each["slope"] for each in logits_of if each["quantity"] == "output") for f in (min, max))
    alone = "nothing else is" if all("logits" in name for name in t5["out_of_bounds"]) else "others are too"
    gradients = sum(bert["verdicts"][bert["judged"]][name]["quantity"] == "gradient" for name in bert["out_of_bounds"])
    return (
        f"Without the attention scale, while heads grow, {len(t5['out_of_bounds'])} attention logits of both stacks "
        f"and of cross-attention are out of bounds (width^{least:.2f} to width^{most:.2f}); {alone}. Without the "
        f"readout's multiplier {len(bert['out_of_bounds'])} of BERT's are, {gradients} of them by their gradients."
    )


_SCALED = {
    "embedding.word_embeddings.weight": "word embeddings, and head",
    "decoder.layers.*.self_attention.linear_qkv.weight": "query, key, value",
    "decoder.layers.*.self_attention.linear_proj.weight": "attention's output projection",
    "decoder.layers.*.mlp.linear_fc1.weight": "MLP, first layer",
    "decoder.layers.*.mlp.linear_fc2.weight": "MLP, second layer",
}


def ranges() -> Rows:
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
                first = [what if quantity == "weight" else "", quantity.removeprefix("weight_")]
                sizes = " to ".join(dict.fromkeys(f"{value:.1e}" for value in row.rms))
                shares = [percent(row.shares[kind]) for kind in formats]
                rows.append([*(first if scale != "unit" else ["", ""]), scale, sizes, f"{row.largest:.1e}", *shares])
    return rows


def ranges_of_all() -> str:
    """What bf16 loses of any tensor, and e4m3 of outputs."""
    from mup_megatron.proof.ranges import range_rows

    plain, unit = (record(f"ranges/{name}.json") for name in ("none", "unit"))
    rows = list(range_rows(plain)) + list(range_rows(unit))
    bf16 = max(row.shares["underflow bf16"] for row in rows)
    outputs = max(row.shares["underflow e4m3"] for row in rows if row.quantity == "output")
    said = "nothing" if bf16 == 0 else f"up to {100 * bf16:.1e} %"
    return (
        f"bf16 rounds {said} of any tensor to 0, and e4m3 up to {100 * outputs:.0f} % of an output. The check of "
        f"slopes is {plain['verdict']} with weights as they are, and {unit['verdict']} at unit scale."
    )
