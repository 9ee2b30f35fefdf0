"""The family of models that a check runs over: the base model and larger ones, each in the config's layout.

Public names: `Member`, `Point`, `members`, `models`, `scaled`, `grown`, `own_path`, `reference`, `default_factors`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

from mup_megatron.config import Config, derive
from mup_megatron.engines.setup import Setup, refuse
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.util.errors import ConfigError, UserError

Axis = Literal["width", "depth", "experts"]
"""What grows: every width that `base:` names, the number of layers under a depth rule, or of experts under theirs."""

_COMBINATIONS, _CANDIDATES = 4000, 200
"""Combinations of rounded sizes that are looked at for one point of a path, and how many of the nearest are tried."""


class Point(NamedTuple):
    """Sizes of one model of a family.

    Args:
        what: for messages.
        sizes: config key of `model:` to size.
    """

    what: str
    sizes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model of the family.

    Args:
        factor: its size over the base's.
        size: of the key that others are measured against (`over`).
        over: that key: hidden_size, unless another one grows more; num_layers where depth grows.
        sizes: every key that grows.
        config: of this model.
        layout: how ranks split it.
    """

    factor: float
    size: int
    over: str
    sizes: dict[str, int]
    config: Config
    layout: Layout

    @cached_property
    def setup(self) -> Setup:
        """The same, as engines take it. Raises ConfigError where the engine gets it wrong or lacks it."""
        return Setup(config=self.config, layout=self.layout, deepspeed=refuse(self.config, self.layout))


def default_factors(config: Config, axis: Axis = "width") -> list[int]:
    """Powers of two from the base to the config's own model, four of them at least."""
    sizes = config.model.model_dump()
    largest = max((sizes[name] or 0) // size for name, size in _grows(config, axis).items())
    return [2**power for power in range(max(4, largest.bit_length()))]


def members(config: Config, factors: Sequence[int], world_size: int, axis: Axis = "width") -> list[Member]:
    """The family's models at whole factors of the base, smallest first: `models` of `scaled`."""
    return models(config, scaled(config, factors, axis), world_size, axis)


def scaled(config: Config, factors: Sequence[int], axis: Axis = "width") -> list[Point]:
    """Every size that grows, times each factor.

    Args:
        config: the run.
        factors: sizes over the base's.
        axis: what grows.

    Raises:
        UserError: fewer than two sizes, or one that is no positive number.
    """
    factors = sorted(set(factors))
    if len(factors) < 2:
        raise UserError(f"--widths: {','.join(map(str, factors)) or 'none'}: a slope needs two different widths")
    if factors[0] < 1:
        raise UserError(f"--widths: {factors[0]}: expected whole factors of the base, for example 1,2,4,8")
    grows = _grows(config, axis)
    return [
        Point(f"--widths: {factor} times the base", {name: size * factor for name, size in grows.items()})
        for factor in factors
    ]


def grown(config: Config, factors: Mapping[str, Sequence[int | Fraction]]) -> list[Point]:
    """Sizes that grow by factors of their own; what is not named stays at its base.

    Args:
        config: the run.
        factors: key of `base:` to its factors, as many for each; one below 1 is a size that falls, as that of an
            expert does where experts become more and finer.

    Raises:
        UserError: a key that `base:` does not name, factors that are no positive numbers or of unequal number, or
            nothing that grows from each model to the next.
    """
    base = {**config.base.width.sizes, **config.base.experts}
    numbers = {len(each) for each in factors.values()}
    for key, each in factors.items():
        if key not in base:
            raise UserError(f"--growth {key}: base: does not name it; expected one of {', '.join(base)}")
        if min(each, default=0) <= 0 or any((base[key] * by) % 1 for by in each):
            raise UserError(
                f"--growth {key}={','.join(map(str, each))}: expected factors above 0 that make whole sizes of "
                f"{base[key]}, for example 1,2,4"
            )
    if len(numbers) != 1 or numbers == {1}:
        raise UserError("--growth: expected as many factors for every key, and two or more")
    rows = zip(*factors.values(), strict=True)
    points = [{**base, **{key: int(base[key] * by) for key, by in zip(factors, row, strict=True)}} for row in rows]
    key = reference(points)
    if any(one[key] >= other[key] for one, other in itertools.pairwise(points)):
        raise UserError(f"--growth {key}: the size that grows most has to grow with every model, for example 1,2,4")
    return [Point("--growth: " + ", ".join(f"{key} {size}" for key, size in each.items()), each) for each in points]


def own_path(config: Config, world_size: int) -> list[Point]:
    """The config's own way from the base to its target: even steps of every size's logarithm, rounded to what divides.

    Steps are about doublings of what grows most, three at least. Sizes that grow by one ratio stay in proportion where
    they divide. A point that no rounding makes a model of is left out.

    Raises:
        UserError: the config's own sizes are the base's.
        ConfigError: the config's own model does not fit its layout.
    """
    base = _grows(config, "width")
    resolve_layout(config, world_size)
    target = {key: _own_size(config, key) for key in base}
    most = max(target[key] / base[key] for key in base)
    if most <= 1:
        raise UserError("coord-check: the config's own sizes are the base's, so nothing grows; expected --widths 1,2,4")
    steps = max(3, round(math.log2(most)))
    points = [base]
    for number in range(1, steps):
        share = number / steps
        wanted = {key: base[key] ** (1 - share) * target[key] ** share for key in base}
        found = _round(config, base, target, wanted, world_size)
        if found is not None and all(size >= points[-1][key] for key, size in found.items()) and found != points[-1]:
            points.append(found)
    points = [point for point in points if point != target] + [target]
    key = reference(points)
    kept = [points[0], *(b for a, b in itertools.pairwise(points) if b[key] > a[key])]
    return [Point(f"{key} {point[key]}", point) for point in kept]


def _own_size(config: Config, key: str) -> int:
    """A size of the config's own model; what it leaves open as megatron-core fills it."""
    model = config.model
    filled = {
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_size,
        "moe_ffn_hidden_size": model.moe_ffn_size,
    }
    size = getattr(model, key)
    return int(filled[key] if size is None else size)


def _round(
    config: Config, base: dict[str, int], target: dict[str, int], wanted: dict[str, float], world_size: int
) -> dict[str, int] | None:
    """The nearest sizes that make a model; None where none do."""
    together: dict[float, list[str]] = {}
    for key in base:
        together.setdefault(round(target[key] / base[key], 9), []).append(key)
    choices = []
    for keys in together.values():
        exact = wanted[keys[0]] / base[keys[0]]
        unit, factors = reduce(math.gcd, (base[key] for key in keys)), set()
        while unit:
            factors |= {max(1.0, step / unit) for step in (math.floor(exact * unit), math.ceil(exact * unit))}
            unit //= 2
        choices.append([{key: round(base[key] * factor) for key in keys} for factor in sorted(factors)])
    merged = (
        {key: size for part in row for key, size in part.items()}
        for row in itertools.islice(itertools.product(*choices), _COMBINATIONS)
    )
    ordered = sorted(merged, key=lambda sizes: sum(math.log(sizes[key] / wanted[key]) ** 2 for key in sizes))
    for sizes in ordered[:_CANDIDATES]:
        try:
            resolve_layout(derive(config, {f"model.{key}": sizes[key] for key in base}), world_size)
        except ConfigError:
            continue
        return {key: sizes[key] for key in base}
    return None


def _grows(config: Config, axis: Axis) -> dict[str, int]:
    """What grows, at the base."""
    if axis == "experts":
        grows = config.base.experts
        if not grows:
            raise config.error("base.num_moe_experts", "missing, so no number of experts grows; expected it")
        return grows
    grows = {"num_layers": config.num_layers_base} if axis == "depth" else config.base.width.sizes
    if not grows:
        raise config.error("base", "names no size that grows, so there is nothing to check; expected hidden_size, ...")
    return grows


def reference(points: Sequence[Mapping[str, int]]) -> str:
    """The key that grows most; of those hidden_size."""
    ratios = {key: points[-1][key] / points[0][key] for key in points[0]}
    most = max(ratios.values())
    keys = [key for key in ratios if ratios[key] >= most * (1 - 1e-9)]
    return "hidden_size" if "hidden_size" in keys else keys[0]


def models(
    config: Config, points: Sequence[Point], world_size: int, axis: Axis = "width", *, growing_tensor: bool = False
) -> list[Member]:
    """The family's models, smallest first.

    Args:
        config: the run.
        points: of `scaled`, `grown` or `own_path`.
        world_size: processes.
        axis: what grows.
        growing_tensor: the tensor-parallel size grows with the width, up to the processes, instead of being the
            config's.

    Raises:
        UserError: a size does not divide under the layout; names it.
    """
    base = {**config.base.width.sizes, **config.base.experts} if axis == "width" else _grows(config, axis)
    over = reference([point.sizes for point in points])
    result: list[Member] = []
    tensor = config.parallel.tensor_model_parallel_size
    for point in points:
        factor = point.sizes[over] / base[over]
        keys: dict[str, Any] = {f"model.{name}": size for name, size in point.sizes.items()}
        if growing_tensor:
            keys["parallel.tensor_model_parallel_size"] = min(round(factor), world_size)
        elif tensor == "auto" and result:
            # Fitted once, to the smallest, so that all are split alike.
            keys["parallel.tensor_model_parallel_size"] = result[0].layout.tensor
        try:
            member = derive(config, keys)
            layout = resolve_layout(member, world_size)
        except ConfigError as error:
            raise UserError(f"{point.what}: {error}") from None
        result.append(
            Member(
                factor=int(factor) if factor == int(factor) else round(factor, 4),
                size=point.sizes[over],
                over=over,
                sizes=dict(point.sizes),
                config=member,
                layout=layout,
            )
        )
    return result
