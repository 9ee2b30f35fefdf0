"""Faults of jobs."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "slurm: failures of a job that gets on",
        "a job that fails now and then, and gets on between, is given up",
        "slurm.job._count_failure",
        "before['progress'] == progress",
        "True",
        "slurm/test_slurm_jobs.py::test_failures_count_until_something_was_done",
    ),
)
