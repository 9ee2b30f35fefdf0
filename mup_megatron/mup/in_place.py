"""Optimizer groups in µP for an optimizer that somebody else built: torch's, Apex's, DeepSpeed's.

Public names: `split_in_place`, `check_infshapes`, `rule_of`. Hugging Face's Trainer and DeepSpeed build
optimizers from settings of their own; the groups are split afterwards, and the optimizer stays the same object.
"""

from __future__ import annotations

from typing import Any

import torch

from mup_megatron.mup.optim import check_decay, split_groups, watched
from mup_megatron.mup.parameters import clean_names
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError

# By class name, since Apex's and DeepSpeed's need not be importable. What divides each coordinate of the gradient by
# its own size is Adam's rule; the sign is the extreme of that.
_RULES: dict[str, formulas.UpdateRule] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"), "adam"),
    **dict.fromkeys(("FusedAdam", "DeepSpeedCPUAdam", "ZenFlowCPUAdam", "DeepSpeedCPUAdagrad"), "adam"),
    **dict.fromkeys(("Lion", "FusedLion", "DeepSpeedCPULion"), "adam"),
    "SGD": "sgd",
}
_PACKAGES = ("torch", "apex", "deepspeed", "transformer_engine", "bitsandbytes", "lion_pytorch", "mup_megatron")
"""Whose classes have the rules of their names. Others' do not: GaLore's AdamW steps in a subspace."""


def rule_of(optimizer: torch.optim.Optimizer) -> formulas.UpdateRule | None:
    """How an optimizer's rate scales, by the class that it is of or derives from; None where that is not known."""
    known = (kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] in _PACKAGES)
    return next((_RULES[kind.__name__] for kind in known if kind.__name__ in _RULES), None)


def split_in_place(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Splits an optimizer's groups by the rules, whose values are taken as the base's. The optimizer stays the same.

    Args:
        model: whose parameters it steps.
        optimizer: that has not stepped yet.

    Raises:
        UserError: it has no rule, has stepped, adds L2 to the gradient under Adam, has a group of µP's already, or a
            parameter has no infinite shape. Nothing has been changed then.

    Its steps warn where a schedule has set rates that are no longer in µP's ratios.
    """
    name, rule = type(optimizer).__name__, rule_of(optimizer)
    if rule is None:
        raise UserError(
            f"optimizer: there is no rule for {name} of {type(optimizer).__module__}; expected one of "
            f"{', '.join(sorted(_RULES))}, of {', '.join(_PACKAGES)}, or a class that derives from one"
        )
    # torch's Adagrad makes its state before the first step.
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise UserError(f"optimizer: {name} has state already; expected one that has not stepped yet")
    if optimizer.defaults.get("initial_accumulator_value"):
        raise UserError(
            f"optimizer: initial_accumulator_value of {name}: no rule scales what it adds to squares of gradients; "
            "expected 0"
        )
    check_decay(optimizer)
    check_infshapes(model, [parameter for group in optimizer.param_groups for parameter in group["params"]])
    eps = optimizer.defaults.get("eps") if rule == "adam" else None
    groups = split_groups(optimizer.param_groups, rule, optimizer.defaults, eps=eps)
    optimizer.param_groups.clear()
    for group in groups:
        if group["params"]:
            optimizer.add_param_group(group)
    watched(optimizer)


def check_infshapes(model: torch.nn.Module, parameters: list[Any]) -> None:
    """Every parameter has an infinite shape.

    Raises:
        UserError: names those that have none.
    """
    wanted = set(map(id, parameters))
    names = [name for name, p in model.named_parameters() if id(p) in wanted and getattr(p, "infshape", None) is None]
    if names:
        clean = clean_names(name for name, _ in model.named_parameters())
        shown = ", ".join([clean[name] for name in names[:5]] + ["..."] * (len(names) > 5))
        raise UserError(
            f"no infinite shape on {shown}; call mup_megatron.mup.set_base_shapes or prepare_hf on the model first"
        )
