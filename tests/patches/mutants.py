"""Faults of patches of upstream."""

from __future__ import annotations

from tests.mutants.mutant import mutant

MUTANTS = (
    mutant(
        "guard: a patch on another signature",
        "a symbol that upstream changed is wrapped all the same",
        "patches.patch.Patch.apply",
        "found != self.parameters",
        "False",
        "patches/test_patches.py::test_a_changed_signature_is_an_error",
    ),
)
