"""An audited run on ranks, healthy or with a fault that is put into the running library (tests/audit/)."""

from __future__ import annotations

from typing import Any

import torch

from mup_megatron.audit.auditor import Auditor, Door
from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.horizon import betas
from tests.helpers import bodies
from tests.helpers.audit_faults import GROUPS, INITIAL, STEPS, WHOLE_GROUPS, Fault
from tests.helpers.breakages import break_

FAULTS = {**INITIAL, **GROUPS, **STEPS, **WHOLE_GROUPS}


def audited(rank: Rank, *, config: Config, fault: str | None = None, broken: str = "nothing") -> dict[str, Any]:
    """The first step of a run, audited.

    Args:
        rank: where.
        config: the run.
        fault: of audit_faults.py.
        broken: of breakages.py.

    Returns:
        Wrong findings as text, how many there are in all, of how many tensors, and what was not seen.
    """
    planted = FAULTS[fault] if fault else Fault(tensor="", said="")
    with break_(broken):
        config, layout, table, chunks = bodies.start(rank, config)
        if planted.values is not None:
            planted.values(dict(named_parameters(chunks)), rank.rank)
        engine = bodies.build_engine(config, planted.table(table) if planted.table else table, chunks, layout)
        named = dict(engine.named)
        door = Door(named=engine.named, gather=engine.gather, groups=engine.groups)
        cpu = torch.device("cpu")
        decoupled = config.optimizer.name != "adam"
        auditor = Auditor(door, table, layout, betas=betas(config), decoupled=decoupled, device=cpu)
        batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, cpu)
        schedule = LearningRateSchedule(config.training, config.hparams.lr)
        auditor.ask_initial_values()
        if planted.optimizer is not None:
            planted.optimizer(engine.optimizer, named)
        step = next(step for step in range(config.training.train_steps) if schedule(step))
        for done in range(step + 1):
            auditor.begin_step(done)
            engine.step(batches[done], schedule(done))
        if planted.weights is not None:
            planted.weights(named, rank.rank)
        auditor.ask_groups(schedule(step) / config.hparams.lr)
        auditor.end_step(schedule(step) / config.hparams.lr, step + 1)
        engine.close()
    audit = auditor.audit
    return {
        "wrong": [str(finding) for finding in audit.wrong],
        "findings": len(audit.findings),
        "tensors": len(table.tensors),
        "unseen": audit.unseen,
        "line": audit.line,
    }
