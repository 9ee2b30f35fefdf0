"""What the tests of the proof room run on ranks."""

from __future__ import annotations

from typing import Any

from mup_megatron import runtime
from mup_megatron.config import Config
from mup_megatron.proof import coordinates
from mup_megatron.proof.coord_check import coord_check
from tests.breakages import replaced


def check(rank: runtime.Rank, *, config: Config, options: dict[str, Any], alone: bool = False) -> dict[str, Any]:
    """The coordinate check; `alone` leaves out the addition over ranks."""
    if not alone:
        return coord_check(config, rank, **options)

    def means(sums: Any) -> dict[Any, float]:
        return {key: float(total) / count for key, (total, count) in sums._held.items() if count}

    with replaced(coordinates._Sums, "means", means):
        return coord_check(config, rank, **options)


def corners(rank: runtime.Rank, *, config: Config) -> dict[str, list[float]]:
    """Losses at the corners of the plane, on the larger of two sizes."""
    found = {}
    for point in ("mup", "standard", "interpolate:1,1", "interpolate:0,0"):
        result = coord_check(config, rank, factors=(1, 4), steps=3, seeds=1, point=point, beside=False)
        found[point] = result["cells"][-1]["coordinates"]["losses"]
    return found


def rules_around_controls(rank: runtime.Rank, *, config: Config) -> tuple[str, str]:
    """The table of rules before and after every control was made of it."""
    from mup_megatron.data.prepare import prepare
    from mup_megatron.layout import resolve_layout
    from mup_megatron.model import parametrize
    from mup_megatron.proof.controls import CONTROLS

    config = runtime.resolve_auto(config)
    layout = resolve_layout(config, 1)
    runtime.start_distributed(layout, rank, config.run.seed)
    rules = parametrize(config, prepare(config).vocab_size)
    before = f"{rules.tensors} {rules.forward}"
    for control in CONTROLS.values():
        control.break_(rules, layout)
    return before, f"{rules.tensors} {rules.forward}"
