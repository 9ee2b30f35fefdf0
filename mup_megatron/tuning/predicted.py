"""The loss that a ladder's law tells of a target, before it is trained. Public names: `predicted`, `in_words`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mup_megatron.config import Config
from mup_megatron.tuning.family import differences
from mup_megatron.tuning.fitted import SIZES, Fitted, measured, sizes_of
from mup_megatron.tuning.loss_law import AXES, read_loss_law


def predicted(config: Config, found: Fitted | None) -> dict[str, Any] | None:
    """The validation loss at the end of the target, at the best rate.

    Args:
        config: the target's run.
        found: its ladder.

    Returns:
        {"loss", "error"} (nats; the standard error of a new measurement), or {"why_not"} where its loss and the
        ladder's are of other text, or of a size that the ladder did not vary; None without a ladder.
    """
    if found is None:
        return None
    here, there = measured(config), found.measured
    law = read_loss_law(found.loss)
    if {"layers", "power_of_layers"} & law.terms.keys():  # its rungs were of several depths
        here, there = ({**each, "model.num_layers": None} for each in (here, there))
    sizes, differing = sizes_of(config), differences(there, here, "in the ladder", "in the config")
    for axis in ("batch", "tokens", "width"):  # of which a law has no term where all rungs have one size
        reach = getattr(found.span, axis)
        if reach.smallest == reach.largest != sizes[axis]:
            differing.append(f"{SIZES[axis]}: {reach.largest:,} in the ladder, {sizes[axis]:,} in the config")
    if differing:
        return {"why_not": "; ".join(differing)}
    octaves = {axis: math.log2(sizes[axis] / getattr(found.span, axis).own) for axis in AXES}
    try:
        loss, error = law.at(octaves)
    except (ArithmeticError, ValueError):  # of numbers in a file that no fit wrote
        loss = error = math.nan
    if not (math.isfinite(loss + error) and loss > 0):
        return {"why_not": "its law has no value so far from its rungs"}
    return {"loss": loss, "error": error}


def in_words(told: Mapping[str, Any], reached: float | None = None) -> str:
    """A prediction, beside what was reached.

    Args:
        told: of `predicted`.
        reached: the target's last validation loss (nats); None while it is not known.
    """
    if "loss" not in told:
        return f"not told by the ladder: {told['why_not']}"
    loss, error = told["loss"], told["error"]
    said = f"{loss:.4f} ({loss - 2 * error:.4f} to {loss + 2 * error:.4f}, two standard errors)"
    if reached is None:
        return said
    inside = "inside" if abs(reached - loss) <= 2 * error else "outside"
    return f"{said}; {reached:.4f} measured, {100 * (reached / loss - 1):+.2f} %, {inside} that interval"
