"""The audit of a run whose loop is somebody else's, from around its optimizer's step. Public name: `FirstSteps`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mup_megatron.audit.auditor import Auditor
from mup_megatron.audit.findings import Audit
from mup_megatron.util.errors import UserError


class FirstSteps:
    """Asks at the first step that moves anything, and of the groups once more when the scheduler has gone on.

    Args:
        auditor: whose forward passes are looked at already.
        updates: how many updates the optimizer counts.
        took: whether a step, by what it returned, changed the weights.
        tell: takes what was found: after the first step, and before the second one where something else is wrong then.
            It may raise.
        give_up: takes an error of ours, behind which the run goes on without an audit.
    """

    def __init__(
        self,
        auditor: Auditor,
        *,
        updates: Callable[[], int],
        took: Callable[[Any], bool],
        tell: Callable[[Audit], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self._auditor: Auditor | None = auditor
        self._updates, self._took, self._tell, self._give_up = updates, took, tell, give_up
        self._moved = False

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The optimizer's step with the questions before and behind it. Collective while there are questions."""

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._ask(self._before)
            result = step(*args, **kwargs)
            if self._auditor is not None and self._took(result):
                self._ask(self._behind)
            return result

        return call

    def _ask(self, question: Callable[[Auditor], None]) -> None:
        """One question; the run does not end with an error of the audit's own."""
        if self._auditor is None:
            return
        try:
            question(self._auditor)
        except UserError:
            raise
        except Exception as error:
            self._auditor = None
            self._give_up(error)

    def _before(self, auditor: Auditor) -> None:
        auditor.ask_multipliers()
        if not self._moved:
            auditor.begin_step(self._updates())
            return
        self._auditor, wrong = None, len(auditor.audit.wrong)
        auditor.ask_groups()
        if len(auditor.audit.wrong) > wrong:
            self._tell(auditor.audit)

    def _behind(self, auditor: Auditor) -> None:
        rates = auditor.ask_groups()
        if not rates.lr:  # of a warm-up: nothing has moved
            return
        auditor.end_step(rates, self._updates())
        self._moved = True
        self._tell(auditor.audit)
