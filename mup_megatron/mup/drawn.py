"""Initial values that were drawn when the model was built, with a standard deviation that does not depend on width.

Public names: `warn`, `rescale`. torch's own layers draw in proportion to fan_in^-1/2, which is µP's init of a matrix
inside; Hugging Face's models draw everything with one standard deviation, with which activations grow with width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from mup_megatron.mup.foreign import is_transposed
from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.parameters import clean_names, infshape_of, scale_
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


def warn(model: torch.nn.Module, base: Any) -> None:
    """Warns where the values of matrices inside look drawn without regard to width.

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


def _suspects(model: torch.nn.Module, base: Any) -> list[str]:
    drawn = list(_matrices(model))
    suspects = [name for name, module, infshape, _ in drawn if is_transposed(module) and infshape.ratios.m_in != 1]
    if suspects or not drawn:
        return suspects
    if isinstance(base, torch.nn.Module):
        before = {name: std for name, _, _, std in _matrices(base, shaped=False)}
        for name, _, infshape, std in drawn:
            m_in = float(infshape.ratios.m_in)
            if name in before and not 1 / _OTHER < m_in < _OTHER:
                ratio = std / before[name]
                # Nearer to what does not move than to m_in^-1/2.
                if abs(math.log(ratio)) < abs(math.log(ratio) + math.log(m_in) / 2):
                    suspects.append(name)
        if before:
            return suspects
    return _of_one_deviation(drawn)


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


def _matrices(model: torch.nn.Module, shaped: bool = True) -> Iterator[tuple[str, Any, Any, float]]:
    """Matrices inside that have values here: name, module, infinite shape (if `shaped`), standard deviation."""
    clean = clean_names(name for name, _ in model.named_parameters())
    names = {id(parameter): clean[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        if not (isinstance(module, (torch.nn.Linear, _ConvNd)) or is_transposed(module)):
            continue
        weight = module.weight
        # Neither what is on the meta device, nor what is partitioned, nor a shard has values of its own to look at.
        if type(weight) is not torch.nn.Parameter or weight.is_meta or not weight.numel():
            continue
        infshape = infshape_of(weight) if shaped else None
        if infshape is not None and (infshape.tensor is not None or infshape.ninf() != 2):
            continue
        std = float(weight.detach().flatten()[:_SAMPLE].float().std())
        if std > 0:
            yield names[id(weight)], module, infshape, std
