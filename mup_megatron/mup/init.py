"""Init by microsoft/mup's names, which are those of torch.nn.init, on tensors that have infinite shapes.

Public names: `uniform_`, `normal_`, `trunc_normal_`, `ones_`, `eye_`, `xavier_uniform_`, `xavier_normal_`,
`kaiming_uniform_`, `kaiming_normal_`. At the base shape they are torch's own. Elsewhere the standard deviation is the
one that the tensor has at its base shape times the rules' multiplier (rules/formulas.py, `init_std`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.parameters import infshape_of
from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError


def uniform_(tensor: torch.Tensor, a: float = 0, b: float = 1) -> torch.Tensor:
    """U(a, b) at the base; for what depends on no width."""
    scale = _scale(tensor, centred=a == -b)
    return torch.nn.init.uniform_(tensor, a * scale, b * scale)


def normal_(tensor: torch.Tensor, mean: float = 0, std: float = 1) -> torch.Tensor:
    """N(mean, std²) at the base; for what depends on no width."""
    scale = _scale(tensor, centred=mean == 0)
    return torch.nn.init.normal_(tensor, mean * scale, std * scale)


def trunc_normal_(tensor: torch.Tensor, mean: float = 0, std: float = 1, a: float = -2, b: float = 2) -> torch.Tensor:
    """N(mean, std²) cut off at a and b, at the base; for what depends on no width."""
    scale = _scale(tensor, centred=mean == 0 and a == -b)
    return torch.nn.init.trunc_normal_(tensor, mean * scale, std * scale, a * scale, b * scale)


def ones_(tensor: torch.Tensor) -> torch.Tensor:
    """Ones, in a tensor of which at most one dimension grows; a gain that a forward factor is folded into holds it."""
    _scale(tensor, centred=False)
    return torch.nn.init.constant_(tensor, float(infshape_of(tensor).folded))


def eye_(tensor: torch.Tensor) -> torch.Tensor:
    """The identity, in a tensor of which at most one dimension grows."""
    _scale(tensor, centred=False)
    return torch.nn.init.eye_(tensor)


def xavier_uniform_(tensor: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
    """Glorot's uniform init at the base."""
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return torch.nn.init.uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
    """Glorot's normal init at the base."""
    return torch.nn.init.normal_(tensor, 0.0, _xavier_std(tensor, gain))


def kaiming_uniform_(
    tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """He's uniform init at the base."""
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return torch.nn.init.uniform_(tensor, -bound, bound)


def kaiming_normal_(
    tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """He's normal init at the base."""
    return torch.nn.init.normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))


def _scale(tensor: torch.Tensor, *, centred: bool) -> float:
    """The multiplier of a standard deviation that is the base's.

    Raises:
        UserError: no infinite shape, a partition of ZeRO 3, or a mean other than 0 where two dimensions grow.
    """
    infshape = infshape_of(tensor)
    if hasattr(tensor, "ds_shape") and tensor.numel() == 0:
        raise UserError(
            f"{infshape.label}: ZeRO 3 has partitioned this parameter; initialise it inside "
            "deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)"
        )
    if not centred and infshape.ninf() != 1 and infshape.input_like is None:
        raise UserError(
            f"{infshape.label}: {infshape.ninf()} dimensions grow; a mean other than 0 needs a tensor with one"
        )
    ratios = infshape.ratios
    own = 1.0 if infshape.per_tensor is None else infshape.per_tensor.init
    return formulas.init_std(m_in=ratios.m_in, forward=ratios.forward, output_like=infshape.output_like) * own


def _base_fans(infshape: InfShape) -> tuple[int, int]:
    """Fan-in and fan-out at the base, receptive field included."""
    fan_in, fan_out = infshape.fanin_fanout()
    field = math.prod(dim.base_dim or dim.dim for dim in infshape[2:])
    return field * (fan_in.base_dim or fan_in.dim), field * (fan_out.base_dim or fan_out.dim)


def _xavier_std(tensor: torch.Tensor, gain: float) -> float:
    scale = _scale(tensor, centred=True)
    fan_in, fan_out = _base_fans(infshape_of(tensor))
    return gain * math.sqrt(2.0 / (fan_in + fan_out)) * scale


def _kaiming_std(tensor: torch.Tensor, a: float, mode: str, nonlinearity: Any) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise UserError(f"mode: {mode!r}; expected fan_in or fan_out")
    scale = _scale(tensor, centred=True)
    fan = _base_fans(infshape_of(tensor))[0 if mode == "fan_in" else 1]
    return torch.nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan) * scale
