"""Optimizer groups in µP for the block of DeepSpeed's config that names an optimizer.

Public names: `groups_of_config`, `trained`, `empty_frozen`. An optimizer is split by mup/in_place.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

from mup_megatron.deepspeed.schedule import refuse_auto
from mup_megatron.mup.in_place import check_infshapes
from mup_megatron.mup.optim import MuAdam, MuAdamW, MuSGD, split_groups
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError

_MU = {"muadam": MuAdam, "muadamw": MuAdamW, "musgd": MuSGD}
_CONFIG_RULES: dict[str, formulas.UpdateRule] = {"adam": "adam", "adamw": "adam", "lion": "adam", "sgd": "sgd"}
_ADAMS = ("adam", "adamw")
_EPS = 1e-8  # of Adam, torch's and DeepSpeed's
_DECAY = 0.01  # of torch.optim.AdamW, which DeepSpeed takes with `torch_adam`; of its own optimizers it is 0


def groups_of_config(
    model: torch.nn.Module, settings: dict[str, Any], parameters: Any
) -> tuple[torch.optim.Optimizer | None, list[dict[str, Any]]]:
    """Groups for the optimizer that the config's `optimizer` block names, and DeepSpeed builds.

    Args:
        model: to be trained.
        settings: DeepSpeed's config; its `optimizer` block holds base values. A block that names one of microsoft/mup's
            optimizers is taken out, since DeepSpeed would import that package.
        parameters: of the model, or groups of them; None takes all that are trained.

    Returns:
        The optimizer if it was built here, else None; and the groups.

    Raises:
        UserError: an optimizer without a rule, a value of "auto", L2 added to the gradient under Adam, or a parameter
            without an infinite shape.
    """
    block = settings["optimizer"] or {}
    kind, keys = str(block.get("type", "")).lower(), dict(block.get("params") or {})
    refuse_auto("optimizer.params", keys)
    given: list[Any] = list(parameters) if parameters is not None else trained(model)
    if given and isinstance(given[0], dict):
        given = [{**part, "params": _trained(part["params"])} for part in given]
    else:
        given = _trained(given)
    flat = [p for part in given for p in (part["params"] if isinstance(part, dict) else [part])]
    check_infshapes(model, flat)
    experts = any(map(is_moe_param, flat)) and not any("moe" in part for part in given if isinstance(part, dict))
    if kind in _MU:
        del settings["optimizer"]
        try:
            optimizer = _MU[kind](_experts_apart(given) if experts else given, **keys)
        except TypeError as error:
            raise UserError(f"optimizer.params of {block['type']}: {error}") from None
        return optimizer, optimizer.param_groups
    if kind not in _CONFIG_RULES:
        raise UserError(
            f"optimizer.type: there is no rule for {block.get('type')!r}; expected one of "
            f"{', '.join([*_CONFIG_RULES, *_MU])}, or optimizer=..."
        )
    if kind == "adamw" or (kind == "adam" and keys.get("adam_w_mode", True)):
        keys.setdefault("weight_decay", _DECAY if keys.get("torch_adam") else 0.0)
    decays = [keys.get("weight_decay"), *(part.get("weight_decay") for part in given if isinstance(part, dict))]
    if kind == "adam" and not keys.get("adam_w_mode", True) and any(decays):
        raise UserError(
            "optimizer.params.adam_w_mode: false adds weight decay to the gradient; expected true, or AdamW"
        )
    if "lr" not in keys:
        raise UserError("optimizer.params.lr: missing; the rate at the base is what the groups' rates follow from")
    eps = float(keys.get("eps", _EPS)) if kind in _ADAMS else None
    groups = [group for group in split_groups(given, _CONFIG_RULES[kind], keys, eps=eps) if group["params"]]
    return None, _named_apart(groups) if experts else groups


def _experts_apart(given: list[Any]) -> list[dict[str, Any]]:
    """Groups that have experts alone or none, as ZeRO wants them of an optimizer that DeepSpeed does not build."""
    groups = [dict(part) for part in given] if isinstance(given[0], dict) else [{"params": given}]
    apart = split_params_into_different_moe_groups_for_optimizer(_named_apart(groups))
    return [group for group in apart if group["params"]]


def _named_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each with a name of its own: of those of one name deepspeed.moe makes one group of experts."""
    for number, group in enumerate(groups):
        group["name"] = f"{group.get('name', 'group')} {number}"
    return groups


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that have gradients: what DeepSpeed takes where it is told nothing."""
    return _trained(model.parameters())


def _trained(parameters: Iterable[Any]) -> list[Any]:
    """Those that are, of parameters or of pairs with their names."""
    return [each for each in parameters if (each[1] if isinstance(each, tuple) else each).requires_grad]


def empty_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Empties groups of frozen parameters alone, which µP's split may have made, and with which ZeRO cannot begin."""
    for group in optimizer.param_groups:
        if not _trained(group["params"]):
            group["params"] = []
