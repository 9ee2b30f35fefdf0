"""Initial values that were drawn when the model was built, with a standard deviation that does not depend on width.

Public names: `warn`, `rescale`, `as_a_layers`. torch's own layers draw in proportion to fan_in^-1/2, which is µP's init
of a matrix inside; Hugging Face's models draw everything with one standard deviation, with which activations grow.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from mup_megatron.mup.foreign import is_transposed
from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.layer import MuReadout, MuSharedReadout
from mup_megatron.mup.parameters import clean_names, infshape_of, own_values, scale_
from mup_megatron.rules import formulas

_SAMPLE = 1 << 16
# Two standard deviations count as equal if their ratio is below the first number, two sizes as different if theirs is
# above the second.
_SAME, _OTHER = 1.05, 1.3


@torch.no_grad()
def rescale(model: torch.nn.Module) -> None:
    """From an init that does not depend on width to µP's; once. Gains, biases and embeddings stay as they are.

    Args:
        model: with base shapes.
    """
    seen: set[int] = set()  # parameters that several layers share
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            infshape = infshape_of(parameter)
            ratios = infshape.ratios
            if (infshape.ninf() == 2 and infshape.input_like is None) or infshape.output_like:
                output_like = infshape.output_like
                scale_(parameter, formulas.init_std(m_in=ratios.m_in, forward=ratios.forward, output_like=output_like))
                module._has_rescaled_params = True  # type: ignore[assignment]


def as_a_layers(weight: torch.Tensor, fan_in: int) -> bool:
    """Whether torch drew it for a Linear, between plus and minus fan_in^-1/2: not for an embedding, of any deviation.

    Of a normal draw the largest value lies beyond that bound, or the mean square far below a third of its square.
    """
    if weight.is_meta or not weight.numel():
        return True
    squares = weight.float().square() * fan_in
    return float(squares.max()) <= 1.01 and float(squares.mean()) > 0.25


def warn(model: torch.nn.Module, base: Any) -> None:
    """Warns where the values of matrices inside, or else of readouts, look drawn without regard to width.

    Args:
        model: with base shapes.
        base: what they came from; its values are looked at where it is a model that has any.
    """
    suspects = _suspects(model, base)
    if suspects:
        shown = ", ".join(suspects[:3]) + (", ..." if len(suspects) > 3 else "")
        warnings.warn(
            f"initial values of {shown} do not shrink with width as torch's own do, so activations would grow with it; "
            'pass rescale_params="constant" to set_base_shapes to rescale them, or draw them again with '
            "mup_megatron.mup.init",
            stacklevel=3,
        )
    elif suspects := _readouts(model, base):
        warnings.warn(
            f"initial values of {', '.join(suspects)} do not shrink with width as torch's own do, and are multiplied "
            "by the root of the width all the same, so logits would grow with it; draw them again with "
            "mup_megatron.mup.init, after set_base_shapes",
            stacklevel=3,
        )


def _suspects(model: torch.nn.Module, base: Any) -> list[str]:
    drawn = list(_matrices(model))
    suspects = [name for name, module, infshape, _ in drawn if is_transposed(module) and infshape.ratios.m_in != 1]
    if suspects or not drawn:
        return suspects
    before = _before(base)
    if before:
        return [name for name, _, infshape, std in drawn if _stands(infshape.ratios.m_in, std, before.get(name))]
    return _of_one_deviation(drawn)


def _readouts(model: torch.nn.Module, base: Any) -> list[str]:
    """Readouts whose values are as large as the base's; without values of a base, of a size that no rule explains."""
    before = _before(base)
    suspects = []
    for name, module, infshape, std in _matrices(model, of_readouts=True):
        m_in = infshape.fanin_fanout()[0].ratio
        if name in before:
            suspects += [name] if _stands(m_in, std, before[name]) else []
            continue
        fan_in, fan_out = _fans(infshape)
        values = own_values(module.weight)
        # LeCun, He, Glorot. Of few values the deviation is known less well.
        explained = [1 / fan_in, 2 / fan_in, 2 / (fan_in + fan_out)]
        same = max(_SAME, 1 + 4 / math.sqrt(2 * min(values.numel(), _SAMPLE)))
        by_rule = any(1 / same < std / math.sqrt(variance) < same for variance in explained)
        if m_in != 1 and not by_rule and not as_a_layers(values, fan_in):
            suspects.append(name)
    return suspects


def _before(base: Any) -> dict[str, float]:
    """Standard deviations in the base, where that is a model with values."""
    if not isinstance(base, torch.nn.Module):
        return {}
    return {name: std for name, _, _, std in _matrices(base, shaped=False)}


def _stands(m_in: Fraction, std: float, before: float | None) -> bool:
    """Whether a standard deviation is nearer to what it was in the base than to m_in^-1/2 of it."""
    if before is None or 1 / _OTHER < m_in < _OTHER:
        return False
    moved = math.log(std / before)
    return abs(moved) < abs(moved + math.log(m_in) / 2)


def _of_one_deviation(drawn: list[tuple[str, Any, InfShape, float]]) -> list[str]:
    """Matrices of one standard deviation that no rule of fan-in, fan-out or their sum explains."""
    grown = [entry for entry in drawn if entry[2].ratios.m_in != 1]
    for *_, std in grown:
        same = [entry for entry in grown if 1 / _SAME < entry[3] / std < _SAME]
        sizes = [_fans(infshape) for _, _, infshape, _ in same]
        rules_of_size = (lambda i, o: i, lambda i, o: o, lambda i, o: i + o)
        if all(
            max(rule(*size) for size in sizes) > _OTHER * min(rule(*size) for size in sizes) for rule in rules_of_size
        ):
            return [name for name, *_ in same]
    return []


def _fans(infshape: InfShape) -> tuple[int, int]:
    field = math.prod(dim.dim for dim in infshape[2:])
    fan_in, fan_out = infshape.fanin_fanout()
    return field * fan_in.dim, field * fan_out.dim


def _matrices(
    model: torch.nn.Module, shaped: bool = True, of_readouts: bool = False
) -> Iterator[tuple[str, Any, Any, float]]:
    """Matrices inside, or of readouts, that have values here: name, module, infinite shape, standard deviation.

    Where they are not `shaped` (a base's), both kinds are there, and the infinite shape is None.
    """
    clean = clean_names(name for name, _ in model.named_parameters())
    names = {id(parameter): clean[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        if not (isinstance(module, (torch.nn.Linear, _ConvNd)) or is_transposed(module)):
            continue
        weight = module.weight
        # Neither what is on the meta device nor a shard (DTensor) has values of its own to look at.
        if type(weight) is not torch.nn.Parameter or weight.is_meta or not (values := own_values(weight)).numel():
            continue
        infshape = infshape_of(weight) if shaped else None
        if infshape is not None and (infshape.tensor is not None or infshape.ninf() != (1 if of_readouts else 2)):
            continue
        if of_readouts and (not isinstance(module, MuReadout) or isinstance(module, MuSharedReadout)):
            continue
        std = float(values.flatten()[:_SAMPLE].float().std())
        if std > 0:
            yield names[id(weight)], module, infshape, std
