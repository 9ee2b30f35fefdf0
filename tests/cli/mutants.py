"""Faults of the command line."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "cli: words that do not reach the ranks",
        "the last word of the command line, a value of a key, is lost on the way",
        "cli.common.start_typed",
        "typed.get()",
        "typed.get()[:-1]",
        "cli/test_cli.py::test_every_option_reaches_the_ranks",
    ),
)
