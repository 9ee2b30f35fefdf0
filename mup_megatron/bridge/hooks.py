"""What Bridge and megatron-core call of a run in µP: the optimizer's overrides, and the constructor of GPTModel.

Public names: `MupOverrides`, `builds_model`, `builds_scheduler`, `run_of`, `ends_with_status_2`, `MARK`.

The run hangs on the TransformerConfig that the model is built from (`MARK`), so that a model of another config in the
same process, such as a teacher, stays as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from mup_megatron.megatron_training.megatron_run import MegatronRun

MARK = "_mup_megatron_run"
Function = Callable[..., Any]


def run_of(config: Any) -> MegatronRun:
    """The run that a TransformerConfig, provider or GPTModelConfig is part of.

    Raises:
        UserError: none, so it was replaced behind `apply_mup`.
    """
    found: MegatronRun | None = getattr(getattr(config, "transformer", config), MARK, None)
    if found is None:
        raise UserError(
            f"{type(config).__name__}: is not the model config that apply_mup was called on; expected apply_mup as the "
            "last change to the recipe"
        )
    return found


def ends_with_status_2(function: Function) -> Function:
    """Decorates what Bridge calls: where the user is wrong, one sentence and exit status 2, and no traceback."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            from mup_megatron.bridge.translate import in_fields
            from mup_megatron.parallel.ranks import say_error

            say_error(in_fields(str(error)))
            sys.exit(2)

    return call


def builds_model(init: Function) -> Function:
    """On `GPTModel.__init__`: records, multipliers and initial values, where the config carries a run."""

    @functools.wraps(init)
    @ends_with_status_2
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        config = args[0] if args else kwargs.get("config")
        run: MegatronRun | None = getattr(config, MARK, None)
        if run is None or run.building:
            init(self, *args, **kwargs)
        else:
            run.build(init, self, *args, **kwargs)

    return build


_next: list[tuple[MegatronRun, Any]] = []
"""The run, and its chunks, whose optimizer is about to be built."""


def builds_scheduler(init: Function) -> Function:
    """On `OptimizerParamScheduler.__init__`, behind the optimizer: the audit of a run's first step, and readings."""

    @functools.wraps(init)
    @ends_with_status_2
    def build(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(self, optimizer, *args, **kwargs)
        if _next:
            run, chunks = _next.pop()
            run.audit(chunks, optimizer)
            run.read(chunks, optimizer)

    return build


@dataclass
class MupOverrides:
    """What `ConfigContainer.optimizer_config_override_provider` is in µP: the groups, by rule.

    It has no fields, for Bridge writes the container's into `run_config.yaml`; the model knows its run.
    """

    @ends_with_status_2
    def build_config_overrides(self, context: Any) -> dict[Any, Any]:
        """Rate, epsilon and decay of every tensor, as `config_overrides` of megatron-core.

        Args:
            context: Bridge's: `model` and `optimizer_config` are read.
        """
        from mup_megatron.megatron_training.models import chunks_of

        chunks = context.model if isinstance(context.model, list) else [context.model]
        run = run_of(chunks_of(chunks)[0].config)
        made = run.overrides(chunks, context.optimizer_config.optimizer)
        _next[:] = [(run, chunks)]
        return made
