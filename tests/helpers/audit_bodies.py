"""An audited run on ranks, healthy or with a fault that is put into the running library (tests/audit/)."""

from __future__ import annotations

from typing import Any

import torch

from mup_megatron.audit.auditor import Auditor
from mup_megatron.audit.update import Rates
from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.model.global_names import named_modules, named_parameters
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.horizon import betas
from mup_megatron.train.auditing import door_of
from tests.helpers import bodies
from tests.helpers.audit_faults import GROUPS, INITIAL, MATRICES, MULTIPLIERS, OF_LAYERS, STEPS, WHOLE_GROUPS
from tests.helpers.breakages import break_

FAULTS = {**INITIAL, **GROUPS, **MULTIPLIERS, **OF_LAYERS, **STEPS, **MATRICES, **WHOLE_GROUPS}


def audited(rank: Rank, *, config: Config, faults: tuple[str, ...] = (), broken: str = "nothing") -> dict[str, Any]:
    """The first step of a run, audited.

    Args:
        rank: where.
        config: the run.
        faults: of audit_faults.py.
        broken: of breakages.py.

    Returns:
        Wrong findings as text, how many there are in all, of how many tensors, and what was not seen.
    """
    planted = [FAULTS[fault] for fault in faults]
    with break_(broken):
        config, layout, table, chunks = bodies.start(rank, config)
        of_groups = table
        for fault in planted:
            if fault.values is not None:
                fault.values(dict(named_parameters(chunks)), rank.rank)
            if fault.table is not None:
                of_groups = fault.table(of_groups)
        engine = bodies.build_engine(config, of_groups, chunks, layout)
        named = dict(engine.named)
        cpu = torch.device("cpu")
        decoupled = config.optimizer.name != "adam"
        auditor = Auditor(door_of(engine), table, layout, betas=betas(config), decoupled=decoupled, device=cpu)
        batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, cpu)
        schedule = LearningRateSchedule(config.training, config.hparams.lr)
        auditor.ask_initial_values()
        for fault in planted:
            if fault.modules is not None:
                fault.modules(dict(named_modules(engine.chunks)), rank.rank)
            if fault.optimizer is not None:
                fault.optimizer(engine.optimizer, named)
        step = next(step for step in range(config.training.train_steps) if schedule(step))
        auditor.watch_multipliers()
        for done in range(step + 1):
            auditor.begin_step(done)
            engine.step(batches[done], schedule(done))
            auditor.ask_multipliers()
        if any(fault.weights is not None for fault in planted):
            for name, parameter in engine.named:
                held = engine.gather(parameter)
                for fault in planted:
                    if fault.weights is not None:
                        fault.weights({name: torch.nn.Parameter(held[WEIGHT], requires_grad=False)}, rank.rank)
                engine.scatter(parameter, held)
        rates = Rates(schedule(step) / config.hparams.lr)
        auditor.ask_groups(rates)
        auditor.end_step(rates, step + 1)
        engine.close()
    audit = auditor.audit
    return {
        "wrong": [str(finding) for finding in audit.wrong],
        "findings": len(audit.findings),
        "tensors": len(table.tensors),
        "unseen": audit.unseen,
        "updates": {each.tensor for each in audit.findings if each.quantity == "update over the table's"},
        "line": audit.line,
    }
