"""A ladder's result for people. Public name: `lines`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mup_megatron.proof.optimum import in_words
from mup_megatron.proof.rungs import NAMES, Over
from mup_megatron.tuning.loss_law import AXES

_RULES: dict[Over, str] = {
    "lr": "what the rate does over width and layers is µP's, and the depth rule's",
    "weight_decay": "parametrization.weight_decay: timescale has batch / tokens",
    "one_minus_beta2": "parametrization.batch: sqrt_sde has batch, complete_d has batch / tokens",
}
"""Which rules move a value where no exponent of batch or tokens can be taken."""


def lines(result: Mapping[str, Any]) -> list[str]:
    """A result for people."""
    over = result["over"]
    name, layers = NAMES[over], any(rung["layers"] > 1 for rung in result["rungs"])
    said = [
        f"{len(result['rungs'])} rungs, {result['seeds']} seeds, {result['seconds'] / 60:.0f} minutes of one process"
    ]
    for rung in result["rungs"]:
        said.append(f"  {_where(rung, layers)}: {in_words(rung, over)}")
    if result[name] is not None:
        said += _laws(result, name, layers)
    said += [f"dropped, too far from the minimum: {line}" for line in result["dropped"]]
    said += [f"failed: {line}" for line in result["failed"]]
    said += [*result["reasons"], *result["open"]]
    keys = ", ".join(f"{key}: {value}" for key, value in result["keys"].items())
    use = f"in a config: {keys}, or fitted, with its ladder.json as tuning.ladder"
    if not keys:
        use = f"no config takes these exponents; {_RULES[over]}"
    tell = "the laws tell the largest rung's best" if result[name] is not None else "there is a law of the best"
    ends = {
        "passed": f"passed: the laws tell the largest rung; {use}",
        "failed": "failed: the laws do not tell the largest rung",
        "undecided": f"undecided: whether {tell} {name} is not known",
    }
    return [*said, ends[result["verdict"]]]


def _laws(result: Mapping[str, Any], name: str, layers: bool) -> list[str]:
    """The laws, and how they and those of others tell the largest rung."""
    law = result[name]
    terms = [f"{axis}^({law[axis]['exponent']:+.3f} ± {law[axis]['error']:.3f})" for axis in AXES if axis in law]
    said = [f"{name}: {2 ** law['constant']:.4g} · {' · '.join(terms)}, spread {law['spread']:.2f} octaves"]
    said += _bends(name, result["bends"])
    said.append(f"loss: {result['loss']['said']}, spread {result['loss']['spread']:.4f}")
    held = result["held_out"]
    best, loss = held[name], held["loss"]
    octaves = "beyond what was tried" if best["octaves"] is None else f"{best['octaves']:+.2f} octaves off"
    said.append(
        f"held out, {_where(held, layers)}: "
        f"{result['over']} {best['predicted']:.3g} ± {best['error']:.2f} octaves predicted, {octaves}; "
        f"loss {loss['predicted']:.4f} ± {loss['error']:.4f} predicted, {loss['measured']:.4f} by the parabola"
    )
    for rule, each in result["published"].items():
        off = "not known" if each["octaves"] is None else f"{each['octaves']:+.2f} octaves off there"
        said.append(
            f"  {rule}, from the first rung: {off}; all rungs scatter by {each['scatter']:.2f} octaves about it"
        )
    return said


def _bends(name: str, bends: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Over what the law is not straight, and over what nothing is known of that."""
    told = {axis: f"{each['octaves']:+.2f} ± {each['error']:.2f}" for axis, each in bends.items()}
    said = []
    for axis, each in bends.items():
        if each["told"]:
            way, too = ("upward", "low") if each["octaves"] > 0 else ("downward", "high")
            said.append(
                f"{name}: bends {way} over {axis}, {told[axis]} octaves per squared doubling: farther out, what the "
                f"law says is too {too}"
            )
    if straight := [f"{axis} ({told[axis]})" for axis, each in bends.items() if not each["told"]]:
        said.append(f"{name}: no bend is told from the noise over {', '.join(straight)}")
    return said


def _where(rung: Mapping[str, Any], layers: bool) -> str:
    """Factors of a rung, in words; of layers where they vary."""
    return ", ".join(f"{axis} × {rung[axis]}" for axis in AXES if layers or axis != "layers")
