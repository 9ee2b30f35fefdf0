"""`deepspeed.initialize` in µP: the same signature and returns, for models whose parameters carry infinite shapes.

Public name: `initialize`. A loop around `deepspeed.initialize` changes one import. The parameter groups are built from
the rules, whatever way the optimizer is named; schedules move all groups together; what DeepSpeed would get silently
wrong is mended or refused (docs/torch.md). The rest of the package is what both this and engines/deepspeed.py need of
DeepSpeed: mpu.py; and optimizer.py, schedule.py, saved.py, refused.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

from mup_megatron.deepspeed.optimizer import empty_frozen, groups_of_config, trained
from mup_megatron.deepspeed.refused import Replaced, refuse
from mup_megatron.deepspeed.saved import keep_base_shapes
from mup_megatron.deepspeed.schedule import guard, per_group
from mup_megatron.engines.deepspeed_mpu import adapted, sum_sequence_parallel_gradients
from mup_megatron.engines.deepspeed_whole import groups_of, inner, whole
from mup_megatron.mup.auditing import MOMENTS, Action, ModelAudit, first_steps
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.mup.optim import is_parametrized, of_one_rate
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_text


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
    *,
    audit: Action = "stop",
) -> tuple[Any, Any, Any, Any]:
    """What deepspeed.initialize does, in µP. Rates, epsilon and decay that are given are the base's.

    Args:
        args: as of deepspeed.initialize; `args.deepspeed_config` may name the config.
        model: its parameters carry infinite shapes (`mup_megatron.mup.set_base_shapes`), or the optimizer's groups
            are µP's already (MuAdam, MuAdamW, MuSGD; `mup_megatron.engines.optim.parameter_groups`).
        optimizer: one of torch's, DeepSpeed's or Apex's that has not stepped yet: its groups are split in place, each
            by its tensors' multipliers. Groups that are µP's already are left alone. Or a function of the parameters.
        model_parameters: parameters or groups, for the config's optimizer or that function.
        training_data: as of deepspeed.initialize.
        lr_scheduler: a function of the optimizer; an object only where the optimizer's groups are µP's already.
        distributed_port: as of deepspeed.initialize.
        mpu: an mpu as DeepSpeed wants it (of Ulysses too), or megatron-core's parallel_state, which is adapted.
        dist_init_required: as of deepspeed.initialize.
        collate_fn: as of deepspeed.initialize.
        config: a dictionary or a JSON file. Its `optimizer` and `scheduler` blocks are taken as base values. It is
            not changed.
        mesh_param: as of deepspeed.initialize.
        config_params: as `config`.
        audit: what becomes of something wrong at the first step (`mup_megatron.mup.audit`).

    Returns:
        engine, optimizer, data loader, scheduler.

    Raises:
        UserError: a parameter has no infinite shape (named), an optimizer has no rule, or DeepSpeed would train
            something else than was asked for. Later, from the engine: rates that are no longer µP's, what the audit
            of the first step finds, and a checkpoint of other base shapes.
    """
    if model is None:
        raise UserError("model: missing; expected a torch.nn.Module")
    args, settings = _settings(args, config if config is not None else config_params)
    mpu = adapted(mpu)
    refuse(model, settings, mpu, mesh_param)
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        optimizer = _client(model, optimizer, model_parameters, lr_scheduler)
        if (settings.get("zero_optimization") or {}).get("stage"):
            empty_frozen(optimizer)
        groups = optimizer.param_groups
    elif "optimizer" in settings:
        optimizer, model_parameters = groups_of_config(model, settings, model_parameters)
        groups = model_parameters
    groups = [group for group in groups if group["params"]]  # DeepSpeed takes the empty ones out
    # Before DeepSpeed puts partitions there; what is frozen it leaves out.
    stepped = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    apart = not of_one_rate(groups)
    if groups and lr_scheduler is None:
        per_group(settings, groups)
    sum_sequence_parallel_gradients(model)
    replaced = Replaced(model, settings)
    engine, *rest = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=settings,
        mesh_param=mesh_param,
    )
    replaced.check(engine.module)
    keep_base_shapes(engine, model)
    if groups:
        guard(engine, apart=apart)
        if audit != "off":
            _tell_left_out(model, stepped)
            _audit(engine, audit, stepped)
    return engine, *rest


def _tell_left_out(model: torch.nn.Module, stepped: list[Any]) -> None:
    """Names what would be trained and is in no group; whether that is meant nobody knows here."""
    held = set(map(id, stepped))
    names = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]
    if names and torch.distributed.get_rank() == 0:
        shown = ", ".join([*names[:5], *["..."] * (len(names) > 5)])
        print(
            f"warning: audit: no group of the optimizer holds {shown}, which requires a gradient and is not trained; "
            "expected requires_grad=False where that is meant"
        )


def _audit(engine: Any, action: Action, parameters: list[Any]) -> None:
    """Has the engine's first step looked at; `parameters` are those that it was given to step."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    questions = ModelAudit(
        engine.module,
        inner(optimizer, stage),
        parameters,
        lambda parameter: whole(optimizer, parameter, stage, MOMENTS),
        lambda parameter: groups_of(optimizer, parameter, stage),
    )
    steps = first_steps(
        questions,
        inner(optimizer, stage),
        action=action,
        say=print,
        took=lambda: not getattr(optimizer, "overflow", False),
    )
    if stage == 0:  # schedules of torch's want an optimizer's own step
        optimizer.register_step_pre_hook(lambda *_: steps.before())
        optimizer.register_step_post_hook(lambda *_: steps.behind())
    else:
        optimizer.step = steps.around(optimizer.step)


def _client(model: torch.nn.Module, optimizer: Any, parameters: Any, lr_scheduler: Any) -> torch.optim.Optimizer:
    """The user's optimizer, its groups in µP."""
    if not hasattr(optimizer, "param_groups"):
        optimizer = optimizer(parameters if parameters is not None else trained(model))
    if not is_parametrized(optimizer):
        if lr_scheduler is not None and not callable(lr_scheduler):
            raise UserError(
                "lr_scheduler: it was built for the optimizer's groups before they are split into µP's; pass a "
                "function of the optimizer, e.g. lambda optimizer: LambdaLR(optimizer, ...)"
            )
        split_in_place(model, optimizer)
    return optimizer


def _settings(args: Any, config: Any) -> tuple[Any, dict[str, Any]]:
    """`args` without a config of their own, and a copy of the config."""
    if config is None and getattr(args, "deepspeed_config", None) is not None:
        config = args.deepspeed_config
        args = copy.copy(args)
        args.deepspeed_config = None
    if isinstance(config, dict):
        return args, copy.deepcopy(config)
    if config is None:
        raise UserError("config: missing; expected a dictionary or a JSON file, or --deepspeed_config FILE")
    try:
        settings = json.loads(read_text(config))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{config}: cannot read the DeepSpeed config: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{config}: not a DeepSpeed config; expected a JSON object")
    return args, settings
