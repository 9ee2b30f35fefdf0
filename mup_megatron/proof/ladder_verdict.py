"""The laws of a ladder's curves, and whether they hold on the largest rung, which they have not seen.

Public names: `laws`, `published`, `BOUNDS`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from mup_megatron.proof.laws import Law, bends, determined, fit
from mup_megatron.proof.optimum import Curve, Minimum, least_loss, minimum
from mup_megatron.proof.rungs import NAMES, Over, Rung
from mup_megatron.proof.verdict import verdict_of
from mup_megatron.rules.horizon_rules import PUBLISHED
from mup_megatron.tuning.loss_law import AXES, LossLaw, fit_loss_law
from mup_megatron.util.errors import UserError

BOUNDS = {"octaves": 0.25, "loss": 0.01}
"""The laws hold if the largest rung's best value is at most so far from the predicted one, and its loss off by at most
this share. A value that is farther off, but within two standard errors, is undecided."""

_PUBLISHED: dict[Over, dict[str, tuple[float, float]]] = {
    "lr": {each.exponents: (each.batch, each.tokens) for each in PUBLISHED},
    "weight_decay": {"no rule": (0.0, 0.0), "batch / tokens": (1.0, -1.0)},
    "one_minus_beta2": {"no rule": (0.0, 0.0), "batch": (1.0, 0.0), "batch / tokens": (1.0, -1.0)},
}
"""Exponents of batch and tokens that others give: of the rate those of rules.horizon_rules, of the decay at one rate
none and `timescale` (2405.13698), of 1 - beta2 none, `sqrt_sde` (2205.10287) and `complete_d` (2512.22382)."""


def laws(curves: Mapping[Rung, Curve], over: Over = "lr") -> dict[str, Any]:
    """The laws of measured curves, and how well they tell the last rung, which they have not seen.

    Args:
        curves: of every rung, the largest last.
        over: what was varied.

    Returns:
        What ladder.json has of them. Rungs whose best value is the lowest or the highest that was tried, or has a run
        beside it that diverged, are not fitted.
        Where the others do not determine an exponent of every axis, the laws and `held_out` are None, `open` says why,
        and the verdict is undecided.

    Raises:
        UserError: a rung has no finite loss.
    """
    name = NAMES[over]
    for rung, curve in curves.items():
        if not math.isfinite(min(curve.means)):
            raise UserError(
                f"ladder: {rung.name}: no {name} has a finite loss with every seed; expected lower --values"
            )
    least = {rung: minimum(curve) for rung, curve in curves.items()}
    lowest = {rung: least_loss(curve) for rung, curve in curves.items()}
    measured = {
        "over": over,
        "rungs": [
            {
                **dataclasses.asdict(rung),
                **dataclasses.asdict(least[rung]),
                "values": curve.values,
                "losses": curve.by_value,
                "least": lowest[rung],
            }
            for rung, curve in curves.items()
        ],
        "bounds": BOUNDS,
    }
    largest = list(curves)[-1]
    below = {rung: found for rung, found in least.items() if rung != largest}
    fitted = [rung for rung, found in below.items() if found.value is not None]
    varying = [axis for axis in AXES if len({getattr(rung, axis) for rung in curves}) > 1]
    points = [rung.octaves for rung in fitted]
    if not determined(points, varying):
        no_law = (
            f"no law of {' and '.join(varying)}: only {len(fitted)} of the {len(below)} rungs below the largest have "
            f"their best {name} between others that were tried{_not_between(curves, below)}; expected --values nearer "
            "to it"
        )
        no_laws: dict[str, Any] = {name: None, "bends": {}, "loss": None, "held_out": None, "published": {}, "keys": {}}
        return measured | no_laws | _verdict([], [no_law])
    noise = _noise(least[rung].error for rung in fitted)
    places = [math.log2(least[rung].value or 0) for rung in fitted]
    best, bent = fit(points, places, noise), bends(points, places, noise)
    noise = _noise(_loss_error(curves[rung]) for rung in fitted)
    loss = fit_loss_law(points, [lowest[rung] for rung in fitted], noise)
    reasons, opened, held_out = _judge(name, largest, least[largest], lowest[largest], best, loss)
    return {
        **measured,
        name: best.as_json(),
        "bends": bent,
        "loss": loss.as_json() | {"said": str(loss)},
        "held_out": held_out,
        "published": published({rung: found.value for rung, found in least.items()}, over),
        "keys": _keys(best) if over == "lr" else {},
        **_verdict(reasons, opened),
    }


def _verdict(reasons: list[str], opened: list[str]) -> dict[str, Any]:
    """Of what speaks against the laws and what is open, as ladder.json has it."""
    verdict = verdict_of(reasons, opened)
    return {"reasons": reasons, "open": opened, "verdict": verdict, "passed": verdict == "passed"}


def _not_between(curves: Mapping[Rung, Curve], least: Mapping[Rung, Minimum]) -> str:
    """At how many rungs the best is the lowest or the highest that was tried, or has a run beside it that diverged.

    Of the ends also what the best gained over the next one.
    """
    said = []
    for edge, beside in (("low", 1), ("high", -2)):
        gains = [1 - found.loss / curves[rung].means[beside] for rung, found in least.items() if found.edge == edge]
        if gains:
            said.append(f"at {len(gains)} it is the {edge}est, {100 * max(gains):.2g} % of loss below the next at most")
    if diverged := sum(found.value is None and found.edge is None for found in least.values()):
        said.append(f"at {diverged} a run beside it diverged or failed")
    return f"; {', '.join(said)}" if said else ""


def _noise(errors: Iterable[float | None]) -> float:
    """The root mean square of standard errors over seeds, of the rungs that have one; 0 without any."""
    squares = [error**2 for error in errors if error is not None]
    return math.sqrt(statistics.fmean(squares)) if squares else 0.0


def _loss_error(curve: Curve) -> float | None:
    """Of a lowest mean loss (nats), over seeds; None with one."""
    losses = curve.by_value[curve.best]
    return statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None


def _judge(
    name: str, largest: Rung, found: Minimum, lowest: float, best: Law, loss: LossLaw
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Why the laws do not hold, what is open, and predicted beside measured."""
    predicted, error = best.at(largest.octaves)
    expected, uncertain = loss.at(largest.octaves)
    off = None if found.value is None else math.log2(found.value) - predicted
    share = lowest / expected - 1
    reasons, opened = [], []
    if off is None and found.edge:
        opened.append(f"{largest.name}: the best {name} lies beyond those tried")
    elif off is None:
        opened.append(
            f"{largest.name}: a run beside the best {name} ({found.tried:g}) diverged or failed; expected --values "
            "nearer to it"
        )
    elif abs(off) > max(BOUNDS["octaves"], 2 * error):
        reasons.append(f"{largest.name}: the best {name} is {off:+.2f} octaves from the predicted one")
    elif abs(off) > BOUNDS["octaves"]:
        opened.append(
            f"{largest.name}: the best {name} is {off:+.2f} octaves from the predicted one, whose own error is "
            f"{error:.2f}; expected more --seeds, or more rungs"
        )
    if abs(share) > BOUNDS["loss"]:
        reasons.append(f"{largest.name}: the loss is {100 * share:+.2f} % from the predicted one")
    held_out = {
        **dataclasses.asdict(largest),
        name: {"predicted": 2**predicted, "error": error, "measured": found.value, "octaves": off},
        "loss": {"predicted": expected, "error": uncertain, "measured": lowest, "share": share},
    }
    return reasons, opened, held_out


def published(best: Mapping[Rung, float | None], over: Over = "lr") -> dict[str, Any]:
    """How well the exponents of others tell the best values.

    Args:
        best: value of each rung, the largest last; None where it lies beyond what was tried.
        over: what was varied.

    Returns:
        By name, `octaves`: from where they come from the first rung's best value to the last's, None where one of the
        two is not known; and `scatter`: standard deviation over all rungs about them, with a constant per model.
    """
    known = {rung: math.log2(value) for rung, value in best.items() if value is not None}
    first, last = next(iter(best)), list(best)[-1]
    found = {}
    for name, (batch, tokens) in _PUBLISHED[over].items():
        off = {
            rung: place - batch * rung.octaves["batch"] - tokens * rung.octaves["tokens"]
            for rung, place in known.items()
        }
        found[name] = {
            "octaves": off[last] - off[first] if first in off and last in off else None,
            "scatter": _scatter(off),
        }
    return found


def _scatter(places: Mapping[Rung, float]) -> float:
    """Standard deviation about the mean of each model."""
    models: dict[tuple[int, int], list[float]] = {}
    for rung, place in places.items():
        models.setdefault((rung.width, rung.layers), []).append(place)
    freedom = max(1, len(places) - len(models))
    off = (place - statistics.fmean(each) for each in models.values() for place in each)
    return math.sqrt(sum(each**2 for each in off) / freedom)


def _keys(rate: Law) -> dict[str, str]:
    """The exponents as a config takes them."""
    exponents = dict(zip(rate.names, rate.coefficients[1:], strict=True))
    return {
        f"parametrization.{name}": f"power:{exponents[name]:.2f}" for name in ("batch", "tokens") if name in exponents
    }
