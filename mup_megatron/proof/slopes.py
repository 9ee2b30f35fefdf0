"""From the coordinates of a family's models to slopes: which there are, and what theory says of each.

Public names: `Measurement`, `slopes_of`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mup_megatron.proof.coordinates import QUANTITIES, Coordinates
from mup_megatron.proof.family import Axis, Member
from mup_megatron.proof.names import expert_of, in_family
from mup_megatron.proof.sizes import ERRORS
from mup_megatron.proof.theory import Theory
from mup_megatron.proof.verdict import BOUNDS, Slope, fit

_EXACT = 1e-9
"""How far constants may be off, relatively: what adding many of them up in float64 rounds."""

Table = dict[tuple[str, str], list[float]]
"""(quantity, name) to sizes per step."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The coordinates of one model of the family, in one parametrization and from one seed.

    Args:
        label: of the parametrization.
        seed: of the run.
        factor: the model's size over the base's.
        coordinates: sizes of activations, gradients and updates.
    """

    label: str
    seed: int
    factor: float
    coordinates: Coordinates

    def __str__(self) -> str:
        losses = " ".join(f"{loss:.4f}" for loss in self.coordinates.losses)
        return f"{self.label}: {self.factor} x base, seed {self.seed}: loss {losses}"

    @property
    def not_finite(self) -> list[str]:
        """Where a loss was no finite number, for people."""
        where = f"{self.label}: {self.factor} x base, seed {self.seed}"
        return [f"{where}, step {step}" for step, loss in enumerate(self.coordinates.losses) if not math.isfinite(loss)]

    def as_written(self) -> dict[str, Any]:
        """As the JSON file of a check has it, under the names that earlier files use."""
        written = dataclasses.asdict(self.coordinates)
        for measured in ("ranges", "copies"):
            if not written[measured]:
                del written[measured]
        return {"line": self.label, "seed": self.seed, "factor": self.factor, "coordinates": written}


def slopes_of(
    measurements: Sequence[Measurement], label: str, family: Sequence[Member], theory: Theory, axis: Axis
) -> list[Slope]:
    """Every slope of one parametrization.

    An update is judged by the sum of the sizes of all updates up to it. A later update of Adam alone is between a tenth
    of the rate and the rate, depending on how well successive gradients agree. At small widths that agreement changes
    by a factor from one step to the next, which is no power of width: the gradient of the final gain, for example,
    changes its sign once the model has unlearned the loss of its initial logits. A step in which a parameter does not
    move at all is judged by itself.

    Args:
        measurements: of all parametrizations.
        label: of this one.
        family: models, smallest first.
        theory: of the same family.
        axis: what grows.
    """
    tables = {
        (each.seed, each.factor): _tables(each.coordinates, member.config.model.num_layers, axis)
        for member in family
        for each in measurements
        if each.label == label and each.factor == member.factor
    }
    few = min(member.config.model.num_moe_experts or 0 for member in family)
    order = dict.fromkeys(key for table in tables.values() for key in table if expert_of(key[1]) < max(few, 1))
    seeds = sorted({seed for seed, _ in tables})
    by_seed = [[tables[seed, member.factor] for member in family] for seed in seeds]
    found = []
    for quantity, name in order:
        first = next(table[quantity, name] for table in tables.values() if (quantity, name) in table)
        for step in range(len(first)):
            if quantity == "copies" or (quantity == "change" and step == 0):
                continue
            each = _slope(by_seed, quantity, name, step, [member.size for member in family], theory)
            if each is not None:
                found.append(each)
    found += [each for name in order if (each := _first_update(by_seed, name, theory)) is not None]
    found += [each for name in order if (each := _drawn(by_seed, name, theory)) is not None]
    found += [each for name in order if (each := _copies(by_seed, name)) is not None]
    return found


def _copies(tables: Sequence[Sequence[Table]], key: tuple[str, str]) -> Slope | None:
    """How far copies of a parameter on tensor-parallel ranks are from each other, over the size of a step's update."""
    quantity, name = key
    if quantity != "copies":
        return None
    found = []
    for table in (table for seed in tables for table in seed if key in table):
        for step, (apart, update) in enumerate(zip(table[key], table["update", name], strict=True)):
            found.append((apart / update if update else math.inf if apart else 0.0, step))
    furthest, step = max(found)
    return Slope(name=name, quantity=quantity, step=step, slope=furthest, expected=0.0, low=None, high=BOUNDS[quantity])


def _drawn(tables: Sequence[Sequence[Table]], key: tuple[str, str], theory: Theory) -> Slope | None:
    """Initial values' mean size over what the config says, on the model where it is farthest off for its error.

    The seeds are counted together, since each draws anew. Of a size of 0 the size itself.
    """
    quantity, name = key
    expected = theory.drawn(name) if quantity == "initial" else None
    found = []
    for number, size in enumerate(expected or ()):
        held = [seed[number][key][0] for seed in tables if key in seed[number]]
        mean = sum(held) / len(held) if held else math.nan
        off = max(ERRORS * size.error / math.sqrt(max(len(held), 1)), _EXACT)
        ratio = mean / size.mean if size.mean else mean
        expected_ratio = 1.0 if size.mean else 0.0
        one = Slope(name=name, quantity="drawn", step=0, slope=ratio, expected=expected_ratio, low=off, high=off)
        found.append((-math.inf if math.isnan(ratio) else one.within / off, one))
    return min(found, key=lambda each: each[0])[1] if found else None


def _first_update(tables: Sequence[Sequence[Table]], key: tuple[str, str], theory: Theory) -> Slope | None:
    """Adam's first update divided by the size that it should have, on the model where the two differ most."""
    quantity, name = key
    rate = theory.first_update(name) if quantity == "update" else None
    if rate is None:
        return None
    used = [
        table[key][0] / size
        for seed in tables
        for table, size in zip(seed, rate[0], strict=True)
        if key in table and not (".experts." in name and _unused(table, name, 0))
    ]
    if not used or min(used) == 0.0:
        return None  # a parameter that does not move is reported as that
    furthest = max(used, key=lambda each: abs(math.log(each)) if math.isfinite(each) else math.inf)
    high = BOUNDS["rate"]
    return Slope(name=name, quantity="rate", step=0, slope=furthest, expected=1.0, low=rate[1], high=high)


def _slope(
    tables: Sequence[Sequence[Table]], quantity: str, name: str, step: int, sizes: Sequence[float], theory: Theory
) -> Slope | None:
    """One slope; None where there is nothing to judge: no token came to an expert, or all is zero as it has to be."""
    if ".experts." in name and any(_unused(table, name, step) for seed in tables for table in seed):
        return None
    rows = [[table.get((quantity, name), [math.nan] * (step + 1)) for table in seed] for seed in tables]
    here = [[row[step] for row in seed] for seed in rows]
    zero = any(value == 0.0 for seed in here for value in seed)
    if zero and theory.vanishes(name, quantity, step):
        return None
    drawn = theory.drawn(name) if quantity == "initial" else None
    if drawn and not any(size.mean for size in drawn):
        return None  # judged by its size
    if quantity == "update" and not zero:
        here = [[sum(row[: step + 1]) for row in seed] for seed in rows]
    expected, low, high = theory.expected(name, quantity, step)
    found = fit(sizes, here)._asdict()
    return Slope(name=name, quantity=quantity, step=step, expected=expected, low=low, high=high, zero=zero, **found)


def _unused(table: Table, name: str, step: int) -> bool:
    """Whether no token has come to a parameter's or a module's expert in a step: it has no output there."""
    before, _, after = name.partition(".local_experts.")
    expert = f"{before}.local_experts.{after.partition('.')[0]}"
    held = table.get(("output", expert))
    return held is None or math.isnan(held[step])


def _tables(coordinates: Coordinates, layers: int, axis: Axis) -> Table:
    """By names that all depths have where depth grows."""
    tables: Mapping[str, Mapping[str, list[float]]] = {
        "initial": {name: [size] for name, size in coordinates.initial.items()},
        **coordinates.modules,
        "update": coordinates.updates,
        "copies": coordinates.copies,
    }
    found = {}
    for quantity in ("initial", *QUANTITIES, "update", "copies"):
        for name, values in tables[quantity].items():
            common = in_family(name, layers) if axis == "depth" else name
            if common is not None:
                found[quantity, common] = values
    return found
