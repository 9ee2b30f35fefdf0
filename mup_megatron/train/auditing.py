"""The audit of a run's first steps: what tensors and optimizer have is what the table says.

Public names: `Auditing`, `door_of`.

Its questions are `audit/`'s. It asks again after every resume, but not for initial values, which are gone then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from mup_megatron.audit.auditor import Auditor, Door
from mup_megatron.audit.update import Rates
from mup_megatron.checkpoints.checkpoint import AUDIT
from mup_megatron.engines import Engine
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.optimizer_state import torch_optimizers
from mup_megatron.engines.setup import Setup
from mup_megatron.engines.step_result import StepResult
from mup_megatron.parallel.ranks import Rank, device_of
from mup_megatron.rules.horizon import betas
from mup_megatron.rules.table import Parametrization
from mup_megatron.train.hooks import Hook
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_whole


def door_of(engine: Engine) -> Door:
    """How an engine's run is asked."""
    return Door(
        chunks=engine.chunks,
        named=engine.named,
        gather=engine.gather,
        groups=engine.groups,
        optimizers=torch_optimizers(engine.optimizer),
    )


class Auditing(Hook):
    """Asks before the first step and after the first one whose rate is not 0; then it is done.

    Args:
        setup: the run.
        engine: whose tensors and groups are looked at.
        parametrization: of the run.
        begins: whether the run has its initial values.
        done: updates, before this process's first one.
        rank: this process; the first one writes audit.json.
        say: takes a line for the screen.
    """

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        parametrization: Parametrization,
        *,
        begins: bool,
        done: int,
        rank: Rank,
        say: Callable[[str], None],
    ) -> None:
        config = setup.config
        self._auditor: Auditor | None = Auditor(
            door_of(engine),
            parametrization,
            setup.layout,
            betas=betas(config),
            decoupled=config.optimizer.name != "adam",
            device=device_of(rank),
        )
        self._begins, self._done, self._rank, self._say = begins, done, rank, say
        self._peak, self._stops = config.hparams.lr, config.run.audit == "stop"
        self._rate = LearningRateSchedule(config.training, config.hparams.lr)
        self._path = Path(config.run.dir) / AUDIT

    def before_run(self) -> bool:
        """Asks for initial values, and has the first forward pass looked at."""
        if self._auditor is not None:
            self._auditor.watch_multipliers()
            if self._begins:
                self._auditor.ask_initial_values()
            self._auditor.begin_step(self._done)
        return True

    def after_update(self, number: int, result: StepResult) -> None:
        """Asks for forward multipliers, groups and updates.

        Raises:
            UserError: something is wrong, and `run.audit` is `stop`.
        """
        if self._auditor is None:
            return
        self._auditor.ask_multipliers()
        if not math.isfinite(result.loss):  # the loop says so
            return
        rate = self._rate(number - 1)
        if rate == 0 or not math.isfinite(result.grad_norm):  # of a warm-up, or left out: nothing has moved
            if self._rate(number):
                self._auditor.begin_step(number)
            return
        auditor, self._auditor, rates = self._auditor, None, Rates(rate / self._peak)
        auditor.ask_groups(rates)
        auditor.end_step(rates, number)
        audit = auditor.audit
        if self._rank.is_first:
            write_whole(self._path, json.dumps(audit.as_json(), indent=1))
        if audit.wrong and self._stops:
            raise UserError(f"{audit.line}; {self._path} has all of them; run.audit=warn goes on all the same")
        self._say(f"{'warning: ' if audit.wrong else ''}{audit.line}")
