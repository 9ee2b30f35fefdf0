"""What a mutant is: the lists are mutants.py and megatron_mutants.py, and mutate.py runs them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault: a text that stands once in a file, what stands there instead, and the tests that must fail then.

    Args:
        name: kind of code, then what is lost: `rule: ...`, `shim: ...`, `guard: ...`.
        what: the fault, in words.
        file: where, from the repository's root.
        old: text that stands there once.
        new: what stands there instead.
        tests: pytest's words; one of these tests must fail.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutant(name: str, what: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A mutant whose tests are given without `tests/`."""
    return Mutant(name=name, what=what, file=file, old=old, new=new, tests=tuple(f"tests/{test}" for test in tests))
