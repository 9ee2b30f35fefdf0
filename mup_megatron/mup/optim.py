"""Optimizers in µP by microsoft/mup's names: torch's own, over groups whose rates follow the rules.

Public names: `MuAdam`, `MuAdamW`, `MuSGD`, `split_groups`, `is_parametrized`, `watched`, `without_multiplier`,
`other_ratio`, `of_one_rate`, `check_decay`, `adds_l2`. Another optimizer that normalises each coordinate of the
gradient is `MuAdam(params, impl=Optimizer, ...)`, one that does not `MuSGD(params, impl=Optimizer, ...)`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.mup.parameters import infshape_of
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError

_Scaling = tuple[int, Fraction | float, Fraction, float, float]

MULTIPLIER = "lr_multiplier"
"""Key of a group's learning-rate multiplier; its presence says that the group's rates are µP's already."""
SCALES_EPS = "scales_eps"
"""Key that says whether a group's epsilon is scaled; groups of older checkpoints do not have it."""
SOURCE = "source"
"""Key of the number of the group that a group was split from."""


def MuAdam(params: Any, impl: Any = torch.optim.Adam, **kwargs: Any) -> Any:  # microsoft/mup's name
    """Adam: the rate of a matrix is divided by m_in and its decay multiplied with it (Tensor Programs V, Table 8).

    Args:
        params: parameters that have infinite shapes, or groups of them.
        impl: the optimizer's class.
        kwargs: its arguments; `lr` and `weight_decay` are the base's.

    Raises:
        UserError: a parameter has no infinite shape, or more than two dimensions that grow; a group is µP's already, or
            has no rate; `impl` adds a weight decay to the gradient, or its step follows the size of whole tensors; or
            `decoupled_wd=True`.

    Its steps warn where a schedule has set rates that are no longer in µP's ratios.
    """
    _refuse_decoupled(kwargs)
    optimizer = impl(split_groups(params, "adam", kwargs, eps=None), **kwargs)
    _check_coordinates(optimizer)
    check_decay(optimizer)
    return watched(optimizer)


def MuAdamW(params: Any, **kwargs: Any) -> Any:
    """AdamW, as MuAdam."""
    return MuAdam(params, **{"impl": torch.optim.AdamW, **kwargs})


def MuSGD(params: Any, impl: Any = torch.optim.SGD, **kwargs: Any) -> Any:
    """SGD: the rate of a matrix times m_out/m_in, that of a vector times its own ratio, decay the inverse.

    Args, errors: as of MuAdam.
    """
    _refuse_decoupled(kwargs)
    return watched(impl(split_groups(params, "sgd", kwargs, eps=None), **kwargs))


def _refuse_decoupled(kwargs: dict[str, Any]) -> None:
    """The argument of microsoft/mup's repository that release 1.0.0 has not: its default is what is done here."""
    if kwargs.pop("decoupled_wd", False):
        raise UserError(
            "optimizer: decoupled_wd=True leaves the decay of matrices alone, so that lr · λ falls with width; "
            "expected it left out: their decay is multiplied with width here"
        )


def split_groups(
    params: Iterable[Any], rule: formulas.UpdateRule, defaults: dict[str, Any], *, eps: float | None
) -> list[dict[str, Any]]:
    """Optimizer groups in µP: each group given is split into one per set of equal multipliers.

    Args:
        params: parameters that have infinite shapes, or groups of them with keys of their own.
        rule: how the optimizer's update scales.
        defaults: the optimizer's arguments, at the base: `lr`, and perhaps `weight_decay`.
        eps: Adam's epsilon at the base, which the rules scale where a group names none; None leaves it alone, as
            microsoft/mup does.

    Returns:
        Groups in microsoft/mup's order: matrices, vectors, and last what is not scaled, even if that is nothing.
        Beside `lr` and `weight_decay` (and `eps`) they hold `lr_multiplier`, which a schedule may read,
        `scales_eps`, and `source`, the number of the group that they come from.

    Raises:
        UserError: as of MuAdam.
    """
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    result = []
    for number, given in enumerate(groups):
        if MULTIPLIER in given:
            raise UserError(
                f"optimizer: the rates of its group {number} are µP's already, and the rules would hold twice; "
                "expected groups with the base's values alone"
            )
        base = {"lr": defaults.get("lr"), "weight_decay": defaults.get("weight_decay", 0.0), **given}
        if base["lr"] is None:
            raise UserError(
                f"optimizer: its group {number} has no learning rate; expected lr=..., the rate at the base"
            )
        # Dimensions that grow (of Adam's vectors none matters), multiplier of the rate, of epsilon, factors of its own.
        none = PerTensor()
        split: dict[_Scaling, list[Any]] = {(0, formulas.ONE, formulas.ONE, 1.0, 1.0): []}
        entries = list(given["params"])
        if entries and isinstance(entries[0], tuple):  # of named_parameters(), which torch's optimizers take
            base["param_names"], entries = [name for name, _ in entries], [parameter for _, parameter in entries]
        named = dict(zip(map(id, entries), base.get("param_names", ()), strict=False))
        for parameter in entries:
            infshape = infshape_of(parameter)
            ratios = infshape.ratios
            if rule == "sgd" and len(set(ratios.m_outs.values())) > 1:
                blocks = ", ".join(f"{block} {float(m):g}" for block, m in ratios.m_outs.items())
                raise UserError(
                    f"optimizer: SGD needs one learning rate per tensor, and the blocks of one of shape "
                    f"{tuple(parameter.shape)} grow by different factors ({blocks}); expected Adam, or blocks that "
                    "grow together"
                )
            lr = formulas.learning_rate(rule, m_in=ratios.m_in, m_out=ratios.m_out, forward=ratios.forward)
            epsilon = formulas.ONE if eps is None else formulas.epsilon(m_out=ratios.m_out, forward=ratios.forward)
            kind = infshape.ninf() if rule == "sgd" or infshape.ninf() == 2 else 0
            own = infshape.per_tensor or none
            split.setdefault((kind, lr, epsilon, own.lr, own.weight_decay), []).append(parameter)
        for (_, lr, epsilon, own_lr, own_decay), parameters in sorted(split.items(), key=lambda item: -item[0][0]):
            group = {**base, "params": parameters, MULTIPLIER: float(lr) * own_lr, SOURCE: number}
            for key in {"lr", "initial_lr"} & set(base):  # a schedule was built on the groups already
                group[key] = scaled(base[key], lr) * own_lr
            group["weight_decay"] = scaled(base["weight_decay"], formulas.weight_decay("independent", lr)) * own_decay
            if eps is not None:
                group["eps"] = scaled(base.get("eps", eps), epsilon)
            group[SCALES_EPS] = eps is not None
            if named:
                group["param_names"] = [named[id(parameter)] for parameter in parameters]
            result.append(group)
    return result


_OF_WHOLE_TENSORS = ("Adafactor", "LAMB", "Lamb", "FusedLAMB", "FusedLamb", "LARS", "Muon", "Shampoo", "SOAP")
"""Optimizers whose step is that of no single coordinate: by class name, as they are of several packages."""


def _check_coordinates(optimizer: Any) -> None:
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    scales = getattr(optimizer, "defaults", {}).get("scale_parameter", True)  # transformers' Adafactor can leave it
    if scales and not set(names).isdisjoint(_OF_WHOLE_TENSORS):
        raise UserError(
            f"optimizer: the step of {names[0]} follows the size of whole tensors, for which MuAdam has no rule; "
            "expected Adam, AdamW, or another that divides each coordinate of the gradient by its own size"
        )


def check_decay(optimizer: Any) -> None:
    """No optimizer of Adam's kind may take a decay as a part of the gradient.

    Over width the gradient of a matrix inside falls as 1/m, its weights as m^-1/2, and its decay grows as m: what is
    added would overtake the gradient as m^3/2.

    Raises:
        UserError: it does.
    """
    for group in optimizer.param_groups:
        if group.get("weight_decay") and adds_l2(optimizer, group):
            raise UserError(
                f"optimizer: {type(optimizer).__name__} adds its weight decay to the gradient, whose scale then "
                "decides what is left of it; expected AdamW, or weight_decay=0"
            )


def adds_l2(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer of Adam's kind takes a group's weight decay as a part of the gradient."""
    if hasattr(optimizer, "adam_w_mode"):  # Apex's and DeepSpeed's
        return not optimizer.adam_w_mode
    coupled = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop)
    if isinstance(optimizer, torch.optim.AdamW):
        return False
    if type(optimizer).__name__ == "DeepSpeedCPUAdagrad":  # whose class is there where its kernel is
        return True
    return isinstance(optimizer, (*coupled, torch.optim.Adagrad)) and not group.get("decoupled_weight_decay", False)


def is_parametrized(optimizer: Any) -> bool:
    """Whether the groups' rates are µP's already: built by MuAdam and its kin, or by `optim.parameter_groups`."""
    return all(MULTIPLIER in group for group in optimizer.param_groups)


def watched(optimizer: Any) -> Any:
    """The optimizer, whose steps warn from now on where a group is not µP's, or rates are not in µP's ratios."""
    if hasattr(optimizer, "register_step_pre_hook"):
        optimizer.register_step_pre_hook(partial(_warn, apart=not of_one_rate(optimizer.param_groups)))
    return optimizer


def _warn(optimizer: Any, *_: Any, apart: bool) -> None:
    rates = (group["lr"] for group in optimizer.param_groups)
    if any(isinstance(rate, torch.Tensor) and rate.is_cuda for rate in rates):
        return  # to look at one would wait for the device at every step
    if problem := without_multiplier(optimizer) or other_ratio(optimizer, apart=apart):
        warnings.warn(problem, stacklevel=2)


_EXPECTED = (
    "; a scheduler has set one rate for all groups; expected one that scales each group's own rate, such as LambdaLR"
)


def without_multiplier(optimizer: Any) -> str | None:
    """That a group is there whose rate no rule has made, in words; None where all are µP's."""
    if is_parametrized(optimizer):
        return None
    return (
        "the optimizer's groups are no longer those that were made here: one has no multiplier; a checkpoint of "
        "another optimizer was loaded, or a group was added; expected groups as MuAdam, MuAdamW and MuSGD make them"
    )


def other_ratio(optimizer: Any, *, apart: bool = False) -> str | None:
    """Which rate is no longer in the ratio of its multiplier, in words; None if all are.

    Within the groups of one source the ratios are known. Between sources, each with a rate of its own, it is known that
    a schedule does not make different rates equal.

    Args:
        optimizer: its groups are µP's.
        apart: whether the groups' rates differed at the start.
    """
    base: dict[int, float] = {}
    for group in optimizer.param_groups:
        multiplier = group.get(MULTIPLIER)
        if not multiplier:
            continue
        given = float(group["lr"])
        rate = given / multiplier
        expected = base.setdefault(group.get(SOURCE, 0), rate)
        if not math.isclose(rate, expected, rel_tol=1e-6, abs_tol=1e-30):
            return (
                f"the learning rates are no longer µP's: a group has {given:g} where its multiplier makes it "
                f"{expected * multiplier:g}{_EXPECTED}"
            )
    if apart and of_one_rate(optimizer.param_groups):
        return (
            f"the learning rates are no longer µP's: all groups have {float(optimizer.param_groups[0]['lr']):g}, and "
            f"their rates differed at the start{_EXPECTED}"
        )
    return None


def of_one_rate(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether several groups of different multipliers have one rate, above 0."""
    rates, multipliers = ({float(group.get(key, 1.0)) for group in groups} for key in ("lr", MULTIPLIER))
    return len(multipliers) > 1 and len(rates) == 1 and rates != {0.0}


def scaled(value: Any, multiplier: Fraction | float) -> Any:
    """A value times a multiplier, rounded once where either the multiplier or its inverse is a whole number."""
    return value * float(multiplier) if multiplier >= 1 else value / float(1 / multiplier)
