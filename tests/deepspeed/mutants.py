"""Faults of `deepspeed.initialize` in µP."""

from __future__ import annotations

from tests.mutants.mutant import decorated, mutant

_TESTS = "deepspeed/test_deepspeed_initialize.py"

MUTANTS = (
    mutant(
        "deepspeed: a schedule with one rate",
        "DeepSpeed's schedule sets the base's rate on every group",
        "deepspeed.schedule._rate",
        "group[MULTIPLIER]",
        "1.0",
        f"{_TESTS}::test_schedules_keep_the_ratios[WarmupDecayLR]",
    ),
    mutant(
        "audit: DeepSpeed's partitions",
        "the step of ZeRO's optimizer is not looked at",
        "deepspeed._audit",
        "optimizer.step = steps.around(optimizer.step)",
        "pass",
        "deepspeed/test_deepspeed_audit.py::test_planted_faults_are_named",
    ),
    decorated(
        "deepspeed: a user's schedule with one rate",
        "a scheduler that has moved groups apart is not noticed",
        "deepspeed.schedule._check",
        "lambda f: lambda engine: None",
        f"{_TESTS}::test_schedulers_of_the_users",
    ),
)
