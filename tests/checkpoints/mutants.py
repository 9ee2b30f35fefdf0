"""Faults of what a run may go on from, and of checkpoints that are whole or not there."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_TESTS = "checkpoints/test_checkpoint.py"

MUTANTS = (
    mutant(
        "guard: a checkpoint of another run",
        "a changed hyperparameter goes on as if it were the same run",
        "checkpoints.manifest.check_settings",
        "_within(key, allowed)",
        "True",
        f"{_TESTS}::test_the_guard",
    ),
    mutant(
        "guard: a checkpoint of other trials",
        "a run goes on with the rates of other trials",
        "checkpoints.manifest._compared",
        "manifest.horizon or {}",
        "{}",
        "rules/test_horizon.py::test_another_trial_is_refused_on_resume",
    ),
    mutant(
        "guard: a checkpoint's checksum",
        "a flipped bit is loaded",
        "checkpoints.checkpoint.mismatch",
        "sha256_of(folder / name) != digest",
        "False",
        f"{_TESTS}::test_damage_is_recognised",
    ),
    mutant(
        "guard: a file without a checksum",
        "a file that no checksum is of is loaded unverified",
        "checkpoints.checkpoint.Checkpoints.problem",
        "path.iterdir()",
        "()",
        f"{_TESTS}::test_every_file_is_listed",
    ),
    mutant(
        "recovery: the oldest are kept",
        "the newest checkpoints are removed",
        "checkpoints.checkpoint.Checkpoints.commit",
        "whole[: whole.index(final) + 1][: -self._kept]",
        "whole[: whole.index(final) + 1][self._kept :]",
        f"{_TESTS}::test_the_newest_are_kept",
    ),
)
