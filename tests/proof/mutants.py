"""Faults of what the checks expect and compare, and of their verdicts."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_CHECK = "proof/test_coord_check.py"

MUTANTS = (
    mutant(
        "check: a verdict without its error",
        "a slope within its bounds passes, however uncertain",
        "proof.verdict.Slope.state",
        "half < within",
        "within > 0",
        f"{_CHECK}::test_a_verdict_knows_its_error",
    ),
    mutant(
        "check: initial sizes by slopes alone",
        "initial values are not compared with what the config says",
        "proof.slopes.slopes_of",
        "_drawn(by_seed, name, theory)",
        "None",
        "proof/test_planted_faults.py::test_a_planted_fault_is_seen[init_factor_twice]",
    ),
    mutant(
        "check: copies are not compared",
        "copies of a parameter on tensor-parallel ranks may drift apart",
        "proof.coordinates.Probe._from_the_first",
        "spec.partition_dim is not None",
        "True",
        f"{_CHECK}::test_copies_that_differ_are_seen[nothing]",
    ),
    mutant(
        "check: what was not run does not count",
        "the total of coord-check --thorough leaves out regimes that were not run",
        "proof.told._table",
        "len(result['regimes'])",
        "passed",
        f"{_CHECK}::test_what_was_not_run_counts",
    ),
    mutant(
        "ladder: the test rung is fitted too",
        "the laws have seen what they are tested on",
        "proof.ladder_verdict.laws",
        "rung != largest",
        "True",
        "proof/test_ladder.py::test_a_largest_rung_off_the_law_fails",
    ),
)
