"""Rules to parameter groups, groups to an optimizer, and the schedule that moves all groups together.

Public names: `parameter_groups` and `build_optimizer` (torch, DeepSpeed), `megatron_overrides` (megatron-core),
`allocate`, `moment_shape`, `LearningRateSchedule`, `set_learning_rates`.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from mup_megatron.config import Config, Training
from mup_megatron.engines.lion import build_lion
from mup_megatron.model.global_names import Named
from mup_megatron.rules import formulas, horizon
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError

MOMENTS: dict[formulas.UpdateRule, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "soap": ("exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R"),
}
"""What optimizers keep of a parameter, by rule."""

SQUARES = {"L": 0, "Q_L": 0, "R": 1, "Q_R": 1}
"""What of it is a square matrix: over the parameter's rows, or over its columns."""


def moment_shape(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of what an optimizer keeps of a parameter.

    Args:
        kind: of `MOMENTS`, or another that has the parameter's shape.
        shape: of the parameter.
    """
    return (shape[SQUARES[kind]],) * 2 if kind in SQUARES else tuple(shape)


_LONGEST_BUILD = 30.0  # minutes; on two cores a build takes two


def parameter_groups(named: Named, parametrization: Parametrization) -> list[dict[str, Any]]:
    """One group per set of equal multipliers, in the order in which the model first has them.

    Args:
        named: parameters.
        parametrization: of the same model.

    Returns:
        Groups with `params`, `lr` (peak), `weight_decay`, `eps` (Adam's), and beside them `lr_multiplier`, which
        the schedule reads, `rule`, which identifies the group whatever its rates are, `update_rule` and `names`.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named:
        tensor = parametrization.tensors[name]
        if tensor.shape.spec.frozen:
            continue
        group = groups.get(tensor.group)
        if group is None:
            group = {
                "params": [],
                "lr": tensor.lr,
                "weight_decay": tensor.weight_decay,
                "lr_multiplier": tensor.lr_multiplier,
                "rule": str(tensor.group),
                "update_rule": tensor.group.update_rule,
                "names": [],
            }
            if tensor.eps is not None:
                group["eps"] = tensor.eps
            groups[tensor.group] = group
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def megatron_overrides(named: Named, parametrization: Parametrization) -> dict[ParamKey, Any]:
    """The same groups as `config_overrides` for megatron-core's `get_megatron_optimizer`: an override per rule.

    Every parameter is matched by exactly one, so that megatron-core's own rule for what is decayed, which giving
    overrides replaces, is not needed: `wd_mult` says it. `max_lr` and `min_lr` are what megatron-core's
    OptimizerParamScheduler moves a group between; `lr_multiplier`, `rule` and `update_rule` are ours, as in
    `parameter_groups`.

    Args:
        named: parameters of this rank.
        parametrization: of the same model.
    """
    rules = {}
    config = parametrization.config
    optimizer, hparams = config.optimizer, config.hparams
    for name, parameter in named:
        tensor = parametrization.tensors[name]
        parameter.mup_rule = str(tensor.group)  # type: ignore[attr-defined]
        if config.steps_matrices and tensor.group.update_rule == "adam":
            # megatron-core's Muon, SOAP and Lion skip parameters with this flag; we set it on position embeddings too.
            parameter.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        rules[str(tensor.group)] = tensor
    min_lr_ratio = parametrization.config.training.min_lr_ratio
    overrides: dict[ParamKey, Any] = {}
    for rule, tensor in rules.items():

        def has_rule(parameter: torch.nn.Parameter, rule: str = rule) -> bool:
            return getattr(parameter, "mup_rule", None) == rule

        min_lr = min_lr_ratio * tensor.lr
        if tensor.group.decoupled:
            given = optimizer.decoupled_min_lr
            min_lr = tensor.lr_multiplier * (min_lr_ratio * hparams.lr if given is None else given)
        override = {
            "max_lr": tensor.lr,
            "min_lr": min_lr,
            "wd_mult": tensor.weight_decay_multiplier,
            "lr_multiplier": tensor.lr_multiplier,
            "rule": rule,
            "update_rule": tensor.group.update_rule,
        }
        if tensor.eps is not None:
            override["eps"] = tensor.eps
        overrides[ParamKey(predicate=ParamPredicate(name=rule, fn=has_rule))] = override
    return overrides


def build_optimizer(config: Config, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that the config names, over `groups`.

    Args:
        config: the run, every `auto` resolved.
        groups: from `parameter_groups`.

    Raises:
        UserError: a build of DeepSpeed's Adam for the CPU was killed, and the next would wait for it for ever.
    """
    optimizer, implementation = config.optimizer, config.optimizer.implementation
    lr, betas = config.hparams.lr, horizon.betas(config)
    if optimizer.name == "sgd":
        fused = implementation == "torch_fused"
        return torch.optim.SGD(groups, lr=lr, momentum=optimizer.momentum, fused=fused)
    if optimizer.name == "lion":
        if implementation == "deepspeed_lion":
            _check_build("cpu_lion")
        offloaded = config.parallel.offload_optimizer
        return build_lion(groups, lr=lr, betas=betas, implementation=implementation, offloaded=offloaded)
    is_adamw = {"adam": False, "adamw": True}[optimizer.name]  # no other name is taken for Adam
    if implementation in ("torch", "torch_fused"):
        kind = torch.optim.AdamW if is_adamw else torch.optim.Adam
        return kind(groups, lr=lr, betas=betas, eps=optimizer.eps, fused=implementation == "torch_fused" or None)
    decoupled = {"adam_w_mode": is_adamw}
    if implementation == "deepspeed_cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        _check_build("cpu_adam")
        decoupled = {"adamw_mode": is_adamw}
        return DeepSpeedCPUAdam(groups, lr=lr, betas=betas, eps=optimizer.eps, **decoupled)
    if implementation == "apex":
        from apex.optimizers import FusedAdam
    else:
        from transformer_engine.pytorch.optimizers import FusedAdam
    return FusedAdam(groups, lr=lr, betas=betas, eps=optimizer.eps, **decoupled)


def _check_build(name: str) -> None:
    """Refuses to wait for a build that was killed, which leaves the lock of torch's extension builder behind."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, verbose=False)) / "lock"
    with contextlib.suppress(FileNotFoundError):  # no build goes on
        minutes = (time.time() - lock.stat().st_mtime) / 60
        if minutes > _LONGEST_BUILD:
            raise UserError(
                f"{lock}: {minutes:.0f} minutes old, left by a build of DeepSpeed's {name} that was killed; every "
                "later build waits for it. Expected no such file: remove it if no build is running"
            )


@torch.no_grad()
def allocate(optimizer: Any, parameters: Iterable[torch.Tensor], kinds: Iterable[str], step: int) -> None:
    """Gives an optimizer that has not stepped yet its state, moments of zero, in its own format.

    Args:
        optimizer: torch's, Apex's, Transformer Engine's or DeepSpeed's, over groups of one update rule.
        parameters: what it steps.
        kinds: names of the moments; others than those of an optimizer state (the weight) are left out.
        step: updates done.
    """
    own = MOMENTS[optimizer.param_groups[0]["update_rule"]]
    moments = [kind for kind in kinds if kind in own]
    adam = "exp_avg_sq" in moments
    ours = type(optimizer).__module__.startswith("torch.")
    for parameter in parameters:
        state = optimizer.state[parameter]
        for kind in moments:
            state[kind] = parameter.new_zeros(moment_shape(kind, parameter.shape))
        if adam and ours:
            on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            state["step"] = torch.tensor(float(step), device=parameter.device if on_device else "cpu")
        elif adam or _is_deepspeed(optimizer):
            state["step"] = step
    if adam and not ours:
        for group in optimizer.param_groups:
            group["step"] = step  # where the fused Adams of Apex and Transformer Engine count


def _is_deepspeed(optimizer: Any) -> bool:
    """Whether it counts steps per tensor although it is no Adam: DeepSpeed's Lion."""
    return any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__)


class LearningRateSchedule:
    """The base learning rate at each step: megatron-core's own schedules, and multi-step decay, which it has not.

    Step 0 is the first update; under warm-up its rate is 0, as in Megatron.
    """

    def __init__(self, training: Training, lr: float) -> None:
        self._training = training
        self._lr = lr
        self._multi_step = training.lr_schedule == "multi-step"
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        # Only its get_lr is used: groups are scaled by their own multipliers (set_learning_rates), since upstream's
        # warm-up does not scale init_lr per group and its checkpoints identify groups by their rates.
        self._scheduler = OptimizerParamScheduler(
            optimizer=SimpleNamespace(param_groups=[]),
            init_lr=training.lr_warmup_init,
            max_lr=lr,
            min_lr=training.min_lr_ratio * lr,
            lr_warmup_steps=training.lr_warmup_steps,
            lr_decay_steps=training.lr_decay_steps or training.train_steps,
            lr_decay_style="constant" if self._multi_step else training.lr_schedule,
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=1,
            wd_incr_style="constant",
            wsd_decay_steps=training.lr_wsd_decay_steps,
            lr_wsd_decay_style=training.lr_wsd_decay_style,
        )

    def __call__(self, step: int) -> float:
        """Base learning rate of the update number `step`, counted from 0."""
        self._scheduler.num_steps = step
        lr = float(self._scheduler.get_lr({}))
        if self._multi_step:
            lr *= self._training.lr_gamma ** bisect.bisect_right(self._training.lr_milestones, step)
        return lr


def set_learning_rates(optimizer: Any, base_lr: float) -> None:
    """Sets every group's rate to its multiplier times `base_lr`: the ratios between groups never move."""
    for group in optimizer.param_groups:
        group["lr"] = base_lr * group["lr_multiplier"]
