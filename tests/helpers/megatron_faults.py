"""A run of megatron.training with faults of audit_faults.py in it (tests/megatron_training/test_megatron_audit.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from mup_megatron.model.global_names import named_modules, named_parameters
from mup_megatron.parallel.ranks import Rank
from tests.helpers import megatron_runs
from tests.helpers.audit_bodies import FAULTS

ONE_RATE = "one rate for all"
"""From the first step of the scheduler on that follows a step of the optimizer."""


def audited(rank: Rank, *, words: list[str], faults: Sequence[str] = ()) -> dict[str, Any]:
    """See megatron_runs.train."""
    from megatron.training import training

    from mup_megatron.megatron_training import megatron_run
    from mup_megatron.megatron_training.models import chunks_of

    planted = [FAULTS[name] for name in faults if name != ONE_RATE]
    initialise, overrides = megatron_run.initialise, megatron_run.megatron_overrides
    setup = training.setup_model_and_optimizer

    def initialise_wrongly(model: Any, *args: Any) -> None:
        initialise(model, *args)
        for fault in planted:
            if fault.values is not None:
                fault.values(dict(named_parameters([model])), rank.rank)

    def wrong_overrides(named: Any, table: Any) -> Any:
        for fault in planted:
            table = table if fault.table is None else fault.table(table)
        return overrides(named, table)

    def set_up(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        chunks = chunks_of(model)
        for fault in planted:
            if fault.modules is not None:
                fault.modules(dict(named_modules(chunks)), rank.rank)
            if fault.optimizer is not None:
                fault.optimizer(optimizer, dict(named_parameters(chunks)))
        if ONE_RATE in faults:
            scheduler.step = _one_rate(scheduler.step, optimizer)
        return model, optimizer, scheduler

    with (
        mock.patch.object(megatron_run, "initialise", initialise_wrongly),
        mock.patch.object(megatron_run, "megatron_overrides", wrong_overrides),
        mock.patch.object(training, "setup_model_and_optimizer", set_up),
    ):
        return {**megatron_runs.train(rank, words=words), "initial": None, "final": None}


def _one_rate(step: Callable[..., None], optimizer: Any) -> Callable[..., None]:
    def wrongly(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3

    return wrongly
