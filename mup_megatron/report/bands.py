"""The band of a proxy in a target's numbers, for people and programs. Public names: `rows_of`, `lines_of`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mup_megatron.telemetry.band import BandOfTarget

_SHARES = (0.25, 0.5, 1.0)
"""Of the schedule."""


def rows_of(band: BandOfTarget) -> Iterator[dict[str, Any]]:
    """Bounds of each series at shares of the schedule: `name`, `quantity`, and `bounds` by share, [least, greatest].

    A bound that there is not is None.
    """
    for name, quantity in band.names():
        found = {share: band(name, quantity, share) for share in _SHARES}
        bounds = {str(share): [each.low or None, _finite(each.high)] for share, each in found.items() if each}
        if bounds:
            yield {"name": name, "quantity": quantity, "bounds": bounds}


def lines_of(band: BandOfTarget) -> Iterator[str]:
    """A line for each series."""
    yield "what each series may be, at shares of the schedule:"
    yield " ".join([*(f"{share:<18g}" for share in _SHARES), "of"])
    for row in rows_of(band):
        told = [_told(*row["bounds"].get(str(share), (None, None))) for share in _SHARES]
        yield " ".join([*(f"{each:<18}" for each in told), f"{row['quantity']} of {row['name']}"])


def _told(low: float | None, high: float | None) -> str:
    if low is None:
        return "" if high is None else f"up to {high:.3g}"
    return f"from {low:.3g}" if high is None else f"{low:.3g} to {high:.3g}"


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
