"""The family of models that a check runs over: the base model and multiples of it, each in the config's layout.

Public names: `Member`, `members`, `default_factors`, `changed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mup_megatron.config import Config
from mup_megatron.config.load import override, parse_config
from mup_megatron.errors import ConfigError, UserError
from mup_megatron.layout import Layout, resolve_layout

Axis = Literal["width", "depth"]
"""What grows: every size that `base:` names, or the number of layers under a depth rule."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model of the family.

    Args:
        factor: its size over the base's.
        size: hidden size, or layers where depth grows.
        config: of this model.
        layout: how ranks split it.
    """

    factor: int
    size: int
    config: Config
    layout: Layout


def changed(config: Config, keys: Mapping[str, Any]) -> Config:
    """The config with dotted keys replaced, checked as a whole.

    Raises:
        ConfigError: the result is no config.
    """
    data = config.model_dump()
    source = config.source or "config"
    for key, value in keys.items():
        override(data, key, value, source)
    return parse_config(data, config.source)


def default_factors(config: Config, axis: Axis = "width") -> list[int]:
    """Powers of two from the base to the config's own model, four of them at least."""
    if axis == "depth":
        largest = config.model.num_layers // config.num_layers_base
    else:
        sizes = config.model.model_dump()
        largest = max((sizes[name] or 0) // size for name, size in config.base.width.sizes.items())
    return [2**power for power in range(max(4, largest.bit_length()))]


def members(
    config: Config, factors: Sequence[int], world_size: int, axis: Axis = "width", *, growing_tensor: bool = False
) -> list[Member]:
    """The family's models, smallest first.

    Args:
        config: the run.
        factors: sizes over the base's.
        world_size: processes.
        axis: what grows.
        growing_tensor: the tensor-parallel size grows with the width, up to the processes, instead of being the
            config's.

    Raises:
        UserError: fewer than two sizes, or one that is no positive number.
        ConfigError: `base:` names nothing that grows, or a size does not divide under the layout; names it.
    """
    factors = sorted(set(factors))
    if len(factors) < 2:
        raise UserError(f"--widths: {','.join(map(str, factors)) or 'none'}: a slope needs two different widths")
    if factors[0] < 1:
        raise UserError(f"--widths: {factors[0]}: expected whole factors of the base, for example 1,2,4,8")
    grows = {"num_layers": config.num_layers_base} if axis == "depth" else config.base.width.sizes
    if not grows:
        raise config.error("base", "names no size that grows, so there is nothing to check; expected hidden_size, ...")
    result: list[Member] = []
    tensor = config.parallel.tensor_model_parallel_size
    for factor in factors:
        keys = {f"model.{name}": size * factor for name, size in grows.items()}
        if growing_tensor:
            keys["parallel.tensor_model_parallel_size"] = min(factor, world_size)
        elif tensor == "auto" and result:
            # Fitted once, to the smallest, so that all are split alike.
            keys["parallel.tensor_model_parallel_size"] = result[0].layout.tensor
        try:
            member = changed(config, keys)
            layout = resolve_layout(member, world_size)
        except ConfigError as error:
            raise UserError(f"--widths: {factor} times the base: {error}") from None
        size = member.model.num_layers if axis == "depth" else member.model.hidden_size
        result.append(Member(factor=factor, size=size, config=member, layout=layout))
    return result
