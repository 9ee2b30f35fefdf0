"""Faults of a recipe of Megatron-Bridge in µP; they need megatron.training."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "bridge: the last rate follows no record",
        "a record's rate leaves the rate at which the schedule ends where it was",
        "bridge.translate.put_values",
        "optimizer.min_lr *= value / optimizer.lr",
        "pass",
        "bridge/test_bridge.py::test_values_of_a_record",
    ),
    mutant(
        "bridge: megatron-core's native MuP on top",
        "rates are divided by the width twice",
        "bridge.refused._of_container",
        "getattr(model, 'use_mup', False)",
        "False",
        "bridge/test_bridge.py::test_refused",
    ),
)
