"""The audit of a run of megatron.training, at the optimizer that upstream built. Public name: `begin`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mup_megatron.audit.auditor import Auditor, Door
from mup_megatron.audit.findings import Audit
from mup_megatron.audit.first_steps import FirstSteps
from mup_megatron.checkpoints.checkpoint import AUDIT
from mup_megatron.engines.optimizer_state import OptimizerState, torch_optimizers, updates_done
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel.layout import Layout
from mup_megatron.parallel.ranks import say_error
from mup_megatron.rules.horizon import betas
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_whole


def begin(
    chunks: Sequence[Any],
    optimizer: Any,
    parametrization: Parametrization,
    layout: Layout,
    *,
    advice: str | None,
    folder: Path | None,
) -> None:
    """Asks for initial values now, and for the rest at the first step that moves anything. Collective.

    Args:
        chunks: this rank's part of the model.
        optimizer: of megatron-core, just built; its `step` is wrapped.
        parametrization: of the run.
        layout: how ranks split the model.
        advice: how a run goes on that something wrong ends, with status 2; None where it does not end.
        folder: for audit.json; None where the run saves nothing.
    """
    named = list(named_parameters(chunks))
    state = OptimizerState(optimizer, named, parametrization, layout)
    auditor = Auditor(
        Door(
            chunks=chunks,
            named=named,
            gather=state.gather,
            groups=state.groups,
            optimizers=torch_optimizers(optimizer),
        ),
        parametrization,
        layout,
        betas=betas(parametrization.config),
        decoupled=parametrization.config.optimizer.name != "adam",
        device=named[0][1].device,
    )
    auditor.watch_multipliers()
    auditor.ask_initial_values(may_be_given=True)
    first = torch.distributed.get_rank() == 0

    def tell(audit: Audit) -> None:
        if first and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / AUDIT, json.dumps(audit.as_json(), indent=1))
        if audit.wrong and advice is not None:
            say_error(f"{audit.line}; {advice} goes on all the same", same=True)
            raise SystemExit(2) from UserError(audit.line)
        if first:
            print(f"mup-megatron: {'warning: ' if audit.wrong else ''}{audit.line}", flush=True)

    def give_up(error: Exception) -> None:
        if first:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"mup-megatron: warning: audit: could not look at this run ({said})", file=sys.stderr, flush=True)

    steps = FirstSteps(
        auditor,
        updates=lambda: updates_done(optimizer),
        took=lambda result: bool(result[0]),
        tell=tell,
        give_up=give_up,
    )
    optimizer.step = steps.around(optimizer.step)
