"""Faults of audit_faults.py in runs of megatron.training and of Bridge (tests/megatron_training/, tests/bridge/)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from mup_megatron.audit.findings import Audit
from mup_megatron.model.global_names import named_modules, named_parameters
from mup_megatron.parallel.ranks import Rank
from tests.helpers import megatron_runs
from tests.helpers.audit_bodies import FAULTS

ONE_RATE = "one rate for all"
"""From the first step of the scheduler on that follows a step of the optimizer."""


@contextlib.contextmanager
def planted(rank: Rank, faults: Sequence[str]) -> Iterator[list[Audit]]:
    """Where upstream's model, groups and optimizer are made; yields what audits find, each once it begins."""
    from mup_megatron.megatron_training import auditing, megatron_run

    wrong = [FAULTS[name] for name in faults if name != ONE_RATE]
    initialise, overrides, begin = megatron_run.initialise, megatron_run.megatron_overrides, auditing.begin
    audits: list[Audit] = []

    def initialise_wrongly(model: Any, *args: Any) -> None:
        initialise(model, *args)
        for fault in wrong:
            if fault.values is not None:
                fault.values(dict(named_parameters([model])), rank.rank)

    def wrong_overrides(named: Any, table: Any) -> Any:
        for fault in wrong:
            table = table if fault.table is None else fault.table(table)
        return overrides(named, table)

    class Auditor(auditing.Auditor):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            audits.append(self.audit)

    def begin_wrongly(chunks: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        step, named = optimizer.step, dict(named_parameters(chunks))

        def step_wrongly(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            for fault in wrong:
                if fault.weights is not None:
                    fault.weights(named, rank.rank)
            return result

        optimizer.step = step_wrongly
        begin(chunks, optimizer, *args, **kwargs)
        audited_step, waiting = optimizer.step, [fault.optimizer for fault in wrong if fault.optimizer is not None]

        def spoil_and_step(*args: Any, **kwargs: Any) -> Any:
            while waiting:  # before the first step: a scheduler that is made after the optimizer sets rates and decays
                waiting.pop()(optimizer, named)
            return audited_step(*args, **kwargs)

        optimizer.step = spoil_and_step
        for fault in wrong:
            if fault.modules is not None:
                fault.modules(dict(named_modules(chunks)), rank.rank)

    with (
        mock.patch.object(megatron_run, "initialise", initialise_wrongly),
        mock.patch.object(megatron_run, "megatron_overrides", wrong_overrides),
        mock.patch.object(auditing, "Auditor", Auditor),
        mock.patch.object(auditing, "begin", begin_wrongly),
    ):
        yield audits


def audited(rank: Rank, *, words: list[str], faults: Sequence[str] = ()) -> dict[str, Any]:
    """See megatron_runs.train; beside it which faults were named."""
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    def set_up(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        if ONE_RATE in faults:
            scheduler.step = one_rate(scheduler.step, optimizer)
        return model, optimizer, scheduler

    with planted(rank, faults) as audits, mock.patch.object(training, "setup_model_and_optimizer", set_up):
        found = {**megatron_runs.train(rank, words=words), "initial": None, "final": None}
    return {**found, "wrong": [str(finding) for audit in audits for finding in audit.wrong]}


def one_rate(step: Callable[..., None], optimizer: Any) -> Callable[..., None]:
    """A scheduler's step that sets one rate on every group."""

    def wrongly(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3

    return wrongly
