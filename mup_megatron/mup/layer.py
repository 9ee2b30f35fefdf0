"""Readouts by microsoft/mup's names, and the rescaling of torch's default init.

Public names: `MuReadout`, `MuSharedReadout`, `rescale_linear_bias`, `rescale_gate`. The readout has Table 8's form
(Tensor Programs V): A = 1/m_in in the forward pass, constant init.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mup_megatron.mup.parameters import infshape_of, scale_


class MuReadout(torch.nn.Linear):
    """A linear layer from a dimension that grows to one that does not: logits = output_mult · A · (W x) + b.

    Args:
        in_features: as of torch.nn.Linear, and what follows.
        readout_zero_init: weight and bias start at zero (paper, appendix D.2).
        output_mult: α_output, tunable.
    """

    def __init__(self, *args: Any, readout_zero_init: bool = False, output_mult: float = 1.0, **kwargs: Any) -> None:
        self.output_mult, self.readout_zero_init = output_mult, readout_zero_init
        # Of the module: what torch.compile and ONNX trace is a stand-in for the weight, without its infinite shape.
        self._width_mult: float | None = None
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """torch.nn.Linear's init, or zeros."""
        if not self.readout_zero_init:
            super().reset_parameters()
            return
        self.weight.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def width_mult(self) -> float:
        """1/A: how much wider the input is than in the base.

        Raises:
            UserError: the model has no base shapes yet.
        """
        return _width_mult(self.weight) if self._width_mult is None else self._width_mult

    def record_width_mult(self) -> None:
        """Reads the weight's infinite shape, once it has one."""
        self._width_mult = _width_mult(self.weight)

    def _rescale_parameters(self) -> None:
        """From torch's init, which shrinks as fan_in^-1/2, to a constant one; once."""
        factor = math.sqrt(self.width_mult())
        if self.bias is not None:
            scale_(self.bias, factor)
        scale_(self.weight, factor)
        self._has_rescaled_params = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of shape (..., out_features)."""
        return super().forward(self.output_mult * x / self.width_mult())


class MuSharedReadout(MuReadout):
    """A readout that shares its weight with an embedding.

    Args:
        weight: of a torch.nn.Embedding, of shape (vocabulary, width).
        bias: whether to have one, of its own.
        kwargs: of MuReadout.
    """

    def __init__(self, weight: torch.nn.Parameter, bias: bool = True, **kwargs: Any) -> None:
        vocabulary, width = weight.shape
        super().__init__(width, vocabulary, bias=bias, **kwargs)
        self.weight = weight

    def _rescale_parameters(self) -> None:
        """The bias alone: the weight is the embedding's, whose default init is constant already."""
        if self.bias is not None:
            scale_(self.bias, math.sqrt(self.width_mult()))
        self._has_rescaled_params = True


def _width_mult(weight: torch.Tensor) -> float:
    return float(1 / infshape_of(weight).readout.forward)


def rescale_linear_bias(linear: torch.nn.Module) -> None:
    """From torch's init of a bias, which shrinks as fan_in^-1/2, to a constant one; once.

    Args:
        linear: a Linear or a convolution, with base shapes.
    """
    if isinstance(linear.bias, torch.nn.Parameter):
        fan_in, _ = infshape_of(linear.weight).fanin_fanout()
        scale_(linear.bias, math.sqrt(fan_in.ratio))
        linear._has_rescaled_params = True  # type: ignore[assignment]


def rescale_gate(linear: torch.nn.Linear) -> None:
    """From torch's init of a weight, which shrinks as fan_in^-1/2, to an output-like one, which does as 1/fan_in; once.

    Args:
        linear: a layer without a forward multiplier, with base shapes.
    """
    scale_(linear.weight, 1 / math.sqrt(infshape_of(linear.weight).ratios.m_in))
    linear._has_rescaled_params = True  # type: ignore[assignment]
