"""Python's collector of reference cycles while a process starts. Public names: `rarely`, `as_usual`, `USUAL`.

torch, megatron-core and DeepSpeed make about a million objects at import, which stay. Python's own thresholds have the
collector look through all of them many times: a fifth of a command's CPU time until it can begin.
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
_RARE = (1_000_000, 10, 10)


def rarely() -> None:
    """From here on cycles are looked for after a million new objects; for a process that begins."""
    gc.set_threshold(*_RARE)


def as_usual() -> None:
    """Undoes `rarely`, where it was called, before tensors come: what is there is not looked through again.

    A training step leaves cycles that hold tensors, which must not wait.
    """
    if gc.get_threshold() == _RARE:
        gc.collect()  # garbage that is frozen would stay too
        gc.freeze()
        gc.set_threshold(*USUAL)
