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
def rescale(model: torch.nn.Module, base: Any) -> None:
    """From an init that does not depend on width to µP's; once. Gains, biases and embeddings stay as they are.

    A warning names matrices that shrink with width already, as those of torch.nn.MultiheadAttention do.

    Args:
        model: with base shapes.
        base: what they came from; its values are looked at where it is a model that has any.
    """
    names, here, before = _names(model), _deviations(model), _before(base)
    shrunk: list[str] = []
    seen: set[int] = set()  # parameters that several layers share
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            infshape, name = infshape_of(parameter), names[id(parameter)]
            ratios = infshape.ratios
            if _is_inside(infshape) and _stands(ratios.m_in, here.get(name), before.get(name)) is False:
                shrunk.append(name)
            if (infshape.ninf() == 2 and infshape.input_like is None) or infshape.output_like:
                output_like = infshape.output_like
                scale_(parameter, formulas.init_std(m_in=ratios.m_in, forward=ratios.forward, output_like=output_like))
                module._has_rescaled_params = True  # type: ignore[assignment]
    if shrunk:
        warnings.warn(
            f"initial values of {_listed(shrunk)} shrink with width already, against the base's, and were divided by "
            "the root of the width once more; draw them again with mup_megatron.mup.init",
            stacklevel=3,
        )


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
        warnings.warn(
            f"initial values of {_listed(suspects)} do not shrink with width as torch's own do, so activations would "
            'grow with it; pass rescale_params="constant" to set_base_shapes to rescale them, or draw them again with '
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


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _suspects(model: torch.nn.Module, base: Any) -> list[str]:
    drawn = list(_matrices(model))
    suspects = [name for name, module, infshape, _ in drawn if is_transposed(module) and infshape.ratios.m_in != 1]
    if suspects:
        return suspects
    if not (before := _before(base)):
        return _of_one_deviation(drawn)
    names, here = _names(model), _deviations(model)
    inside = {names[id(each)]: shape for each in model.parameters() if _is_inside(shape := infshape_of(each))}
    return [name for name, shape in inside.items() if _stands(shape.ratios.m_in, here.get(name), before.get(name))]


def _is_inside(infshape: InfShape) -> bool:
    """Whether it is a matrix inside, of whatever layer; megatron-core's shims draw by the rules."""
    return infshape.ninf() == 2 and infshape.input_like is None and infshape.tensor is None


def _readouts(model: torch.nn.Module, base: Any) -> list[str]:
    """Readouts whose values are as large as the base's; without values of a base, of a size that no rule explains."""
    before = _before(base)
    suspects = []
    for name, module, infshape, std in _matrices(model, of_readouts=True):
        m_in = infshape.fanin_fanout()[0].ratio
        if name in before:
            suspects += [name] * bool(_stands(m_in, std, before[name]))
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
    return _deviations(base) if isinstance(base, torch.nn.Module) else {}


def _names(model: torch.nn.Module) -> dict[int, str]:
    clean = clean_names(name for name, _ in model.named_parameters())
    return {id(parameter): clean[name] for name, parameter in model.named_parameters()}


def _deviations(model: torch.nn.Module) -> dict[str, float]:
    """Standard deviation by name, of each parameter that has values here and is no constant."""
    names = _names(model)
    found = {names[id(parameter)]: _deviation(parameter) for parameter in model.parameters()}
    return {name: std for name, std in found.items() if std is not None}


def _deviation(weight: Any) -> float | None:
    # Neither what is on the meta device nor a shard (DTensor) has values of its own to look at.
    if type(weight) is not torch.nn.Parameter or weight.is_meta or (values := own_values(weight)).numel() < 2:
        return None
    std = float(values.flatten()[:_SAMPLE].float().std())
    return std if std > 0 else None


def _stands(m_in: Fraction, std: float | None, before: float | None) -> bool | None:
    """Whether a deviation is nearer to what it was in the base than to m_in^-1/2 of it; None where nothing tells."""
    if std is None or before is None or 1 / _OTHER < m_in < _OTHER:
        return None
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


def _matrices(model: torch.nn.Module, of_readouts: bool = False) -> Iterator[tuple[str, Any, Any, float]]:
    """Matrices inside, or of readouts, of the layers that are known here: name, module, infinite shape, deviation."""
    names = _names(model)
    for module in model.modules():
        if not (isinstance(module, (torch.nn.Linear, _ConvNd)) or is_transposed(module)):
            continue
        weight = module.weight
        if (std := _deviation(weight)) is None:
            continue
        infshape = infshape_of(weight)
        if infshape.tensor is not None or infshape.ninf() != (1 if of_readouts else 2):
            continue
        if of_readouts and (not isinstance(module, MuReadout) or isinstance(module, MuSharedReadout)):
            continue
        yield names[id(weight)], module, infshape, std
