"""The laws of a run's table, measured (laws.py).

Public names: `laws_of`, `size_of`, `TableOf`. The table is asked for the same run at other sizes, and the rules for
the same tensor at other ratios of its fan-in and fan-out. The powers follow from the answers, so no rule stands here a
second time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, Protocol

from mup_megatron.config import Config, derive, growing_sizes
from mup_megatron.rules.apply import Rules, larger_side_growth, orthogonalised
from mup_megatron.rules.laws import Law, Laws, Side, Size, TensorLaws
from mup_megatron.rules.shapes import InfDim, Init, TensorShape, without_numbers
from mup_megatron.rules.table import Parametrization, TensorHyperparameters
from mup_megatron.util.errors import UserError

_SIZES_OF_TRAINING = ("training.global_batch_size", "training.train_steps")
_FAR = 2**20
_RATIOS = (
    *((Fraction(_FAR), Fraction(1)), (Fraction(1), Fraction(_FAR))),
    *((Fraction(1, _FAR), Fraction(1)), (Fraction(1), Fraction(1, _FAR))),
)
"""Ratios of fan-in and fan-out at which the rules are asked, beside 1 and 1."""
_POWERS_OF_TWO = {Fraction(2) ** power for power in range(-8, 9)}
_DIGITS = 9
"""Decimals of a power, whose fractions are halves and what a config says."""


class TableOf(Protocol):
    """`model.build.parametrize` of one vocabulary."""

    def __call__(self, config: Config, *, names: Collection[str] = ()) -> Parametrization:
        """The table of a run: of these tensors alone, of all unless given."""
        ...


def laws_of(config: Config, table_of: TableOf) -> Laws:
    """Measures the table over the sizes.

    Args:
        config: the run. Its weights are not stored at unit scale, whose θ is no power of a size.
        table_of: makes the table of a run.

    Raises:
        UserError: the table of this run cannot be made.
    """
    table = table_of(config)
    kinds: dict[tuple[Any, ...], str] = {}
    for name, row in table.tensors.items():
        # Layers of one kind, and experts, share their spec.
        kinds.setdefault((without_numbers(name), id(row.shape.spec), row.group, tuple(row.init_std.values())), name)
    elsewhere = _elsewhere(table, partial(table_of, names=kinds.values()))
    fields = [field.name for field in dataclasses.fields(table.forward)]
    return Laws(
        parametrization=config.parametrization.name,
        sizes={
            size: Size(target=size_of(config, size), base=_base_of(config, size), along=other.along)
            for size, other in elsewhere.items()
        },
        forward={
            name: _over_sizes(getattr(table.forward, name), elsewhere, partial(_forward, name)) for name in fields
        },
        tensors=[_tensor(table, elsewhere, name) for name in kinds.values()],
    )


def size_of(config: Config, size: str) -> int:
    """A size of a run by its key (`model.hidden_size`)."""
    section, _, name = size.partition(".")
    found: int = getattr(getattr(config, section), name)
    return found


def _base_of(config: Config, size: str) -> int | None:
    grown = growing_sizes(config).get(size.removeprefix("model."))
    return grown.base if grown else None


class _Elsewhere(NamedTuple):
    """The table where one size is `factor` times the target's, and those that go along with it are."""

    factor: Fraction
    table: Parametrization
    along: list[str]


def _elsewhere(table: Parametrization, table_of: Callable[[Config], Parametrization]) -> dict[str, _Elsewhere]:
    """The table where each size alone is doubled, or halved, by size.

    Growing sizes that cannot be moved alone are moved together: hidden size and heads where the head size is fixed, the
    two parts of a head of latent attention, which a tensor has the sum of.
    """
    model = table.config.model
    # What the model leaves to follow from its other sizes is moved with these.
    named = [f"model.{name}" for name in growing_sizes(table.config) if getattr(model, name) is not None]
    sizes = list(dict.fromkeys([*named, "model.num_layers", *_SIZES_OF_TRAINING]))
    found = {size: _moved(table, table_of, [size]) for size in sizes}
    bound = [size for size in named if found[size] is None]
    if len(bound) > 1:
        found[bound[0]] = _moved(table, table_of, bound)
    return {size: moved for size, moved in found.items() if moved is not None}


def _moved(
    table: Parametrization, table_of: Callable[[Config], Parametrization], sizes: list[str]
) -> _Elsewhere | None:
    """The table where these sizes are doubled, or halved; None where neither is a run, or dimensions are sums."""
    for factor in (Fraction(2), Fraction(1, 2)):
        try:
            keys = {size: int(size_of(table.config, size) * factor) for size in sizes}
            moved = table_of(derive(table.config, keys))
        except UserError:
            continue
        if _is_product(table, moved):
            return _Elsewhere(factor, moved, sizes[1:])
    return None


def _is_product(here: Parametrization, there: Parametrization) -> bool:
    """Whether all dimensions, and the head size that the attention scale has, are products of what was moved.

    A head of latent attention has two parts; one of them doubled is no power of two of the whole.
    """
    # Layers and experts of one kind share their dimensions (join_shapes), which are compared once.
    pairs = {
        (id(shape.infshape), id(there.shapes[name].infshape)): (shape, there.shapes[name])
        for name, shape in here.shapes.items()
        if name in there.shapes
    }
    ratios = {
        Fraction(moved.dim, dim.dim)
        for shape, other in pairs.values()
        for dim, moved in zip(_dims(shape), _dims(other), strict=True)
    }
    heads = math.log2(there.forward.softmax_scale / here.forward.softmax_scale) * 2
    return ratios <= _POWERS_OF_TWO and math.isclose(heads, round(heads), abs_tol=1e-9)


def _dims(shape: TensorShape) -> list[InfDim]:
    return [shape.fan_in, *shape.fan_outs.values()]


def _over_sizes(here: float, elsewhere: Mapping[str, _Elsewhere], of: Callable[[Parametrization], float]) -> Law:
    """A number of the table as a law of the sizes, from its value at the target's and its values elsewhere."""
    powers = {size: _power(of(other.table) / here, other.factor) for size, other in elsewhere.items() if here}
    return Law(constant=here, powers={size: power for size, power in powers.items() if power})


def _power(ratio: float, factor: Fraction) -> float:
    """The exponent of `factor` that gives a ratio."""
    return round(math.log(ratio, factor), _DIGITS)


def _forward(name: str, table: Parametrization) -> float:
    found: float = getattr(table.forward, name)
    return found


def _tensor(table: Parametrization, elsewhere: Mapping[str, _Elsewhere], name: str) -> TensorLaws:
    row, shape = table.tensors[name], table.shapes[name]
    rule = row.group.update_rule

    def side(of: Callable[[TensorShape], InfDim]) -> Side:
        size = _over_sizes(of(shape).dim, elsewhere, lambda other: of(other.shapes[name]).dim)
        return Side(base=of(shape).base_dim, size=size)

    rows = _Rows.of(table, elsewhere, name)
    values = {"lr": rows.law(_rate, row.lr)}
    if row.eps is not None:
        values["eps"] = rows.law(_epsilon, row.eps)
    values["weight_decay"] = rows.law(_decay, row.weight_decay)
    values["forward"] = _over_sizes(
        row.forward_multiplier, elsewhere, lambda other: other.tensors[name].forward_multiplier
    )
    return TensorLaws(
        name=without_numbers(name),
        kind=_kind(row),
        fan_in=side(lambda shape: shape.fan_in),
        rows=side(_rows),
        fan_outs={block or "": side(partial(_fan_out, block)) for block in shape.fan_outs},
        init={block or "": rows.law(partial(_std, block), std, block) for block, std in row.init_std.items()},
        values=values,
        one_rate=len(shape.fan_outs if rule in ("sgd", "soap") else orthogonalised(shape)) > 1,
        update_rule=rule,
    )


def _fan_out(block: str | None, shape: TensorShape) -> InfDim:
    return shape.fan_outs[block]


def _rows(shape: TensorShape) -> InfDim:
    return next(iter(orthogonalised(shape).values()))


def _rate(row: TensorHyperparameters) -> float:
    return float(row.group.lr)


def _epsilon(row: TensorHyperparameters) -> float:
    return float(row.group.eps)


def _decay(row: TensorHyperparameters) -> float:
    return float(row.group.weight_decay)


def _std(block: str | None, row: TensorHyperparameters) -> float:
    return row.init_std[block]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What the rules say of one tensor at other ratios, and at the ratio 1 of the run at other sizes.

    Args:
        shape: of the tensor.
        at_base: its row at the ratio 1.
        at_ratios: its rows at `_RATIOS`.
        at_sizes: factor on each size, with the tensor's row.
    """

    shape: TensorShape
    at_base: TensorHyperparameters
    at_ratios: list[TensorHyperparameters]
    at_sizes: dict[str, tuple[Fraction, TensorHyperparameters]]

    @classmethod
    def of(cls, table: Parametrization, elsewhere: Mapping[str, _Elsewhere], name: str) -> _Rows:
        """Asks the rules."""

        def rules(of: Parametrization) -> Rules:
            return Rules(of.config, of.shapes, of.base_head_size)

        shape, asked = table.shapes[name], rules(table)
        base = _with_ratios(shape, Fraction(1), Fraction(1))
        return cls(
            shape=shape,
            at_base=asked.row(base),
            at_ratios=[asked.row(_with_ratios(shape, *ratios)) for ratios in _RATIOS],
            at_sizes={size: (other.factor, rules(other.table).row(base)) for size, other in elsewhere.items()},
        )

    def law(self, of: Callable[[TensorHyperparameters], float], value: float, block: str | None = None) -> Law:
        """The law of a number of the row.

        Args:
            of: the number, up to a constant.
            value: what it is at the target.
            block: whose m_out it depends on; None for the largest of the blocks.
        """
        here = of(self.at_base)
        if not here:
            return Law(constant=value, powers={})
        told = [_power(of(row) / here, Fraction(_FAR)) for row in self.at_ratios]
        powers = _powers(told, sees_larger=self.at_base.group.update_rule == "muon")
        own = _ratios(self.shape, block)
        at_target = math.prod(own[ratio] ** power for ratio, power in powers.items())
        powers |= {size: _power(of(row) / here, factor) for size, (factor, row) in self.at_sizes.items()}
        return Law(constant=value / at_target, powers={ratio: power for ratio, power in powers.items() if power})


def _with_ratios(shape: TensorShape, m_in: Fraction, m_out: Fraction) -> TensorShape:
    """A tensor with these ratios of fan-in and fan-outs where they grow, and a square base: rules see ratios alone."""

    def at(dim: InfDim, ratio: Fraction) -> InfDim:
        return InfDim(None, _FAR) if dim.base_dim is None else InfDim(_FAR, int(_FAR * ratio))

    ratios = {shape.spec.fan_in: m_in, shape.spec.fan_out: m_out}
    return dataclasses.replace(
        shape,
        infshape=tuple(at(dim, ratios.get(axis, Fraction(1))) for axis, dim in enumerate(shape.infshape)),
        blocks={block: at(dim, m_out) for block, dim in shape.blocks.items()} if shape.blocks else None,
    )


def _powers(told: list[float], *, sees_larger: bool) -> dict[str, float]:
    """Powers of a tensor's own ratios, from those of `_FAR` that the answers at `_RATIOS` are.

    Args:
        told: where fan-in alone is larger, fan-out alone, fan-in smaller, fan-out smaller.
        sees_larger: whether the rule sees which side is the larger one, as Muon's does. A side that shrinks from a
            square is not it.
    """
    wider, taller, narrower, shorter = told
    if not sees_larger:
        return {"m_in": wider, "m_out": taller}
    return {"m_in": -narrower, "m_out": -shorter, "larger": wider + narrower or taller + shorter}


def _ratios(shape: TensorShape, block: str | None) -> dict[str, float]:
    """A tensor's own ratios, by name; m_out is that of one block where one is told, else the largest."""
    outs = {name: dim.ratio for name, dim in shape.fan_outs.items()}
    m_out = outs[block] if block is not None else max(outs.values())
    larger = larger_side_growth(_rows(shape), shape.fan_in)
    return {"m_in": float(shape.fan_in.ratio), "m_out": float(m_out), "larger": float(larger)}


def _kind(row: TensorHyperparameters) -> str:
    spec = row.shape.spec
    if spec.init is Init.EMBEDDING:
        return "embedding"
    return "vector" if len(spec.shape) < 2 else "readout" if spec.readout else "matrix"
