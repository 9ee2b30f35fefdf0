"""What an audit found. Public names: `Finding`, `Audit`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

_NAMED = 3
"""How many wrong findings the line on the screen names."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One number of one tensor, as the table has it and as it is.

    Args:
        tensor: global name; of the module, where `of` says so.
        quantity: of which the number is, for example `initial std` or `learning rate`.
        expected: of the table; None where it has none.
        found: what is there; None where nothing is.
        within: how far apart the two may be, in words.
        right: whether they are no farther apart.
        of: what has the number.
    """

    tensor: str
    quantity: str
    expected: float | None
    found: float | None
    within: str
    right: bool
    of: Literal["tensor", "module"] = "tensor"

    def __str__(self) -> str:
        return f"{self.tensor}: {self.quantity} {_shown(self.found)}, expected {_shown(self.expected)} ({self.within})"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


@dataclass
class Audit:
    """Findings of one run, in the order in which they were made.

    Args:
        findings: of every tensor, right ones too.
        unseen: what was not looked at, with the reason, in words.
        assumed: tensors of layers that are not known, whose rules follow from their sizes alone.
    """

    findings: list[Finding] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """More findings."""
        self.findings += findings

    @property
    def wrong(self) -> list[Finding]:
        """Those that are not right."""
        return [finding for finding in self.findings if not finding.right]

    @property
    def line(self) -> str:
        """For the screen: how many tensors were looked at, how many are right, and the first that are not."""
        tensors, good = self._counted("tensor")
        multipliers, seen = self._counted("module")
        said = f"audit: {tensors} tensors, {good} right"
        said += f"; {multipliers} multipliers, {seen} right" if multipliers else ""
        said += f" ({len(self.unseen)} not seen)" if self.unseen else ""
        if self.assumed:
            more = ", ..." if len(self.assumed) > _NAMED else ""
            said += (
                f"; read by their sizes alone, as their layers are not known: {', '.join(self.assumed[:_NAMED])}{more}"
            )
        return said + "".join(f"; {finding}" for finding in _first_of_each(self.wrong)[:_NAMED])

    def _counted(self, what: str) -> tuple[int, int]:
        """How many of a kind were looked at, and how many of them are right."""
        names = {finding.tensor for finding in self.findings if finding.of == what}
        bad = {finding.tensor for finding in self.wrong if finding.of == what}
        return len(names), len(names - bad)

    def as_json(self) -> dict[str, Any]:
        """Plain data: audit.json."""
        return {
            "format": 1,
            "right": not self.wrong,
            "unseen": self.unseen,
            "assumed": self.assumed,
            "findings": [asdict(finding) for finding in self.findings],
        }


def _first_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """The first finding of each tensor."""
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.tensor, finding)
    return list(first.values())
