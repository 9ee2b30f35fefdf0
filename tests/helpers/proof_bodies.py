"""What the tests of the proof room run on ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mup_megatron.config import Config
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof import coordinates
from mup_megatron.proof.check import Check
from mup_megatron.proof.coord_check import coord_check
from tests.helpers.breakages import break_, replaced


def check(
    rank: Rank, *, config: Config, options: dict[str, Any], alone: bool = False, broken: str = "nothing"
) -> dict[str, Any]:
    """The coordinate check; `alone` leaves out the addition over ranks, `broken` names a breakage."""
    if not alone:
        with break_(broken):
            return coord_check(config, rank, Check(**options))

    def means(sums: Any) -> dict[Any, float]:
        return {key: float(total) / count for key, (total, count) in sums._held.items() if count}

    with replaced(coordinates.Sums, "means", means):
        return coord_check(config, rank, Check(**options))


def corners(rank: Rank, *, config: Config) -> dict[str, list[float]]:
    """Losses at the corners of the plane, on the larger of two sizes."""
    found = {}
    for point in ("mup", "standard", "interpolate:1,1", "interpolate:0,0"):
        result = coord_check(config, rank, Check(factors=(1, 4), steps=3, seeds=1, point=point, compare=False))
        found[point] = result["cells"][-1]["coordinates"]["losses"]
    return found


def rules_around_controls(rank: Rank, *, config: Config) -> tuple[str, str]:
    """The table of rules before and after every control was made of it."""
    from mup_megatron.data.prepare import prepare
    from mup_megatron.model.build import parametrize
    from mup_megatron.parallel.layout import resolve_layout
    from mup_megatron.proof.controls import CONTROLS

    config = resolve_auto(config)
    layout = resolve_layout(config, 1)
    runtime.start_distributed(layout, rank, config.run.seed)
    rules = parametrize(config, prepare(config).vocab_size)
    before = f"{rules.tensors} {rules.forward}"
    for control in CONTROLS.values():
        control.break_(rules, layout)
    return before, f"{rules.tensors} {rules.forward}"


def in_regime(
    rank: Rank, *, config: Config, regime: str, fault: str | None, options: dict[str, Any]
) -> dict[str, list[str]]:
    """Quantities that a regime finds out of bounds, by tensor or module; with a planted fault or without."""
    import contextlib
    import math

    from mup_megatron.proof.regimes import REGIMES
    from mup_megatron.proof.thorough import in_regime as run
    from mup_megatron.proof.verdict import Slope
    from tests.helpers.planted_faults import FAULTS

    with FAULTS[fault].plant() if fault else contextlib.nullcontext():
        repeats = bool(REGIMES[regime].repeat)
        asked = Check(**options, regime=regime, compare=False)
        plain = coord_check(config, rank, replace(asked, regime="plain", seeds=1)) if repeats else {}
        row, result = run(config, rank, asked, plain)
    if repeats:
        return {name: [each["quantity"]] for name, each in row.get("apart", {}).items()}
    found: dict[str, list[str]] = {}
    for each in result["slopes"]["mup"]:
        slope = Slope(**{**each, "slope": math.nan if each["slope"] is None else each["slope"]})
        if slope.state == "out of bounds":
            found.setdefault(slope.name, []).append(slope.quantity)
    return found
