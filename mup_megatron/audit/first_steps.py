"""The audit of a run whose loop is somebody else's, from around its optimizer's step.

Public names: `FirstSteps`, `Questions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from mup_megatron.audit.findings import Audit, Finding
from mup_megatron.audit.update import Rates
from mup_megatron.util.errors import UserError


class Questions(Protocol):
    """What is asked of a run: `Auditor` knows the whole model's table, `ModelAudit` a plain torch model."""

    audit: Audit

    def ask_multipliers(self) -> None:
        """After forward passes that were looked at: what they multiply with."""
        ...

    def begin_step(self, done: int) -> None:
        """Before a step, behind so many updates."""
        ...

    def ask_groups(self) -> Rates:
        """What the optimizer's groups say; returns the rates of the step."""
        ...

    def end_step(self, rates: Rates, done: int) -> None:
        """Behind a step of these rates, which makes so many updates."""
        ...


class FirstSteps:
    """Asks at the first step that moves anything, and of the groups once more when the scheduler has gone on.

    Args:
        questions: whose forward passes are looked at already.
        updates: how many updates the optimizer counts.
        took: whether a step, by what it returned, changed the weights.
        tell: takes what was found: after the first step, and before the second one where something else is wrong then.
            It may raise.
        give_up: takes an error of ours, behind which the run goes on without an audit.
    """

    def __init__(
        self,
        questions: Questions,
        *,
        updates: Callable[[], int],
        took: Callable[[Any], bool],
        tell: Callable[[Audit], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self._questions: Questions | None = questions
        self._updates, self._took, self._tell, self._give_up = updates, took, tell, give_up
        self._moved = False

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The optimizer's step with the questions before and behind it. Collective while there are questions."""

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.before()
            result = step(*args, **kwargs)
            self.behind(result)
            return result

        return call

    def before(self) -> None:
        """Before a step: what it starts from; before the second one, the groups, which a scheduler has changed."""
        self._ask(self._before)

    def behind(self, result: Any = None) -> None:
        """Behind a step: how the groups and the tensors are.

        Args:
            result: what the step returned.
        """
        if self._questions is not None and self._took(result):
            self._ask(self._behind)

    def _ask(self, question: Callable[[Questions], None]) -> None:
        """One question; the run does not end with an error of the audit's own."""
        if self._questions is None:
            return
        try:
            question(self._questions)
        except UserError:
            raise
        except Exception as error:
            self._questions = None
            self._give_up(error)

    def _before(self, questions: Questions) -> None:
        questions.ask_multipliers()
        if not self._moved:
            questions.begin_step(self._updates())
            return
        self._questions, known = None, {_of(finding) for finding in questions.audit.wrong}
        questions.ask_groups()
        if any(_of(finding) not in known for finding in questions.audit.wrong):
            self._tell(questions.audit)

    def _behind(self, questions: Questions) -> None:
        rates = questions.ask_groups()
        if not rates.lr:  # of a warm-up: nothing has moved
            return
        questions.end_step(rates, self._updates())
        self._moved = True
        self._tell(questions.audit)


def _of(finding: Finding) -> tuple[str, str]:
    return finding.tensor, finding.quantity
