"""Faults of what a report says."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "report: the higher loss is said to be lower",
        "the page says that a control ended lower where µP did",
        "report.summary.ended_lower",
        "ours <= theirs",
        "ours >= theirs",
        "report/test_report.py::test_who_ended_lower_is_said_of_every_control",
    ),
)
