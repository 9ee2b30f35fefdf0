"""Infinite shapes by microsoft/mup's names: what a parameter carries as `p.infshape`.

Public names: `InfDim`, `InfShape`, `zip_infshape`. The numbers behind them are those of rules/shapes.py: exact ratios
of global sizes. rules/formulas.py says what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.rules import formulas, shapes
from mup_megatron.rules.formulas import Ratios
from mup_megatron.rules.shapes import TensorShape
from mup_megatron.util.errors import UserError


class InfDim(shapes.InfDim):
    """A dimension and its base; `base_dim` None is a dimension that is fixed ("finite")."""

    __slots__ = ()

    def isinf(self) -> bool:
        """Whether the dimension grows."""
        return self.grows

    def width_mult(self) -> float:
        """Size over base size; 1 where the dimension is fixed."""
        return float(self.ratio)

    def __str__(self) -> str:
        return repr(self) if self.grows else f"FinDim({self.dim})"


class InfShape(tuple[InfDim, ...]):
    """A tuple of InfDims, attached to a parameter as `p.infshape`.

    Attributes:
        main: the dimension that `width_mult` reads: the last that grows, which is the fan-in of a matrix. As in
            microsoft/mup it may be set by hand, with `main_idx`, where a tensor's dimensions stand in another order.
        fan_in_idx: the dimension that is the fan-in of a matrix: 1, as torch's layers have it, unless foreign.py of
            this package says otherwise.
        output_like: whether the tensor is output-like: a matrix from a dimension that grows to one that does not,
            without a forward multiplier. Its init and rate shrink as 1/m instead.
        hidden_like: the same, but with the init of a matrix inside, which shrinks as m^-1/2 (rules/formulas.py, g = 1).
        input_like: m_out of a tensor over which nothing is summed, although two of its dimensions may grow: gains of
            torch.nn.LayerNorm((heads, size)), an embedding of a vocabulary that grows; None elsewhere.
        folded: factor that the values hold in the forward pass's stead (rules/formulas.py, `Ratios`).
        kind: what per_tensor.py calls a matrix of a known architecture; None where what grows says it.
        per_tensor: factors of its own on rate, decay and initial values (per_tensor.py); None where there are none.
        name: of the parameter, for messages; empty where it is not known.
        tensor: the TensorSpec of a megatron-core layer's parameter, joined with its base; None for other parameters.
    """

    main: InfDim | None
    main_idx: int | None
    fan_in_idx: int
    output_like: bool
    hidden_like: bool
    input_like: Fraction | None = None
    folded: Fraction
    kind: str | None = None
    per_tensor: PerTensor | None = None
    name: str
    tensor: TensorShape | None

    def __new__(cls, dims: Iterable[InfDim], name: str = "", tensor: TensorShape | None = None) -> InfShape:
        """Raises ValueError where an element is no InfDim."""
        self = super().__new__(cls, dims)
        if not all(isinstance(dim, InfDim) for dim in self):
            raise ValueError("an InfShape consists of InfDims")
        self.name, self.tensor = name, tensor
        self.fan_in_idx, self.output_like, self.hidden_like, self.folded = 1, False, False, formulas.ONE
        self.main_idx = next((i for i in reversed(range(len(self))) if self[i].grows), None)
        self.main = None if self.main_idx is None else self[self.main_idx]
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.name, self.tensor

    def __repr__(self) -> str:
        return f"InfShape({list(self)!r})"

    @property
    def label(self) -> str:
        """What messages call the parameter."""
        return self.name or repr(self)

    def ninf(self) -> int:
        """How many dimensions grow."""
        return sum(dim.grows for dim in self)

    def width_mult(self) -> float:
        """Size over base size of the main dimension; 1 where nothing grows."""
        return 1.0 if self.main is None else self.main.width_mult()

    def fanin_fanout(self) -> tuple[InfDim, InfDim]:
        """Dimensions 1 and 0, as torch's layers have them; the other way round where `fan_in_idx` is 0.

        Raises:
            UserError: there is only one dimension.
        """
        if len(self) < 2:
            raise UserError(f"{self.label}: fan-in and fan-out need two dimensions")
        return self[self.fan_in_idx], self[1 - self.fan_in_idx]

    def read_transposed(self) -> None:
        """Takes dimension 0 for the fan-in, and 1 for the fan-out."""
        self.fan_in_idx = 0
        if self[0].grows:
            self.main_idx, self.main = 0, self[0]

    def fanin_fanout_mult_ratio(self) -> float:
        """m_in / m_out of `fanin_fanout`."""
        fan_in, fan_out = self.fanin_fanout()
        return float(fan_in.ratio / fan_out.ratio)

    def base_shape(self) -> list[int | None]:
        """Base size of each dimension, None where it is fixed: a line of a .bsh file."""
        return [dim.base_dim for dim in self]

    def shape(self) -> list[int]:
        """Size of each dimension."""
        return [dim.dim for dim in self]

    def serialize(self) -> dict[str, list[Any]]:
        """Base shape and shape as plain data."""
        return {"base_shape": self.base_shape(), "shape": self.shape()}

    @classmethod
    def deserialize(cls, data: dict[str, list[Any]]) -> InfShape:
        """What `serialize` gave."""
        return cls(InfDim(*pair) for pair in zip(data["base_shape"], data["shape"], strict=True))

    @classmethod
    def from_base_shape(cls, base_shape: Iterable[int | None]) -> InfShape:
        """A shape whose sizes are not known yet."""
        return cls(InfDim(base, None) for base in base_shape)  # type: ignore[arg-type]  # as microsoft/mup has it

    @property
    def ratios(self) -> Ratios:
        """What the rules see of the tensor.

        A tensor with one growing dimension is taken as input-like (m_in = 1): a readout in Table 8's form, which is
        what MuReadout is, has the same multipliers throughout (Tensor Programs V, Table 8). A parameter of
        megatron-core's layers has the ratios of its TensorShape, where fan-in, fan-out and blocks are known.

        Raises:
            UserError: more than two dimensions grow, for which there is no rule.
        """
        if self.tensor is not None:
            return self.tensor.ratios
        if self.input_like is not None:
            return Ratios(m_outs={None: self.input_like}, folded=self.folded)
        if self.ninf() > 2:
            raise UserError(f"{self.label}: {self.ninf()} dimensions grow; there is a rule for up to two")
        if self.main is None:
            return Ratios(folded=self.folded)
        if self.output_like or self.hidden_like:
            return Ratios(m_in=self.main.ratio, folded=self.folded)
        if self.ninf() == 1:
            return Ratios(m_outs={None: self.main.ratio}, folded=self.folded)
        m_out = next(dim.ratio for i, dim in enumerate(self) if dim.grows and i != self.main_idx)
        return Ratios(m_in=self.main.ratio, m_outs={None: m_out}, folded=self.folded)

    @property
    def readout(self) -> Ratios:
        """The ratios of the product that a readout makes with this weight, which carries the forward multiplier A."""
        return Ratios(readout=True) if self.main is None else Ratios(m_in=self.main.ratio, readout=True)


def zip_infshape(base_dims: Sequence[Any], dims: Sequence[int], fin_if_same: bool = True, name: str = "") -> InfShape:
    """Joins base sizes with sizes.

    Args:
        base_dims: InfDims, whose growth is known, or sizes.
        dims: sizes of the model.
        fin_if_same: whether a size that equals its base is a dimension that is fixed.
        name: of the parameter.

    Raises:
        UserError: another number of dimensions, or a fixed dimension that has another size; names the tensor.
    """
    if len(base_dims) != len(dims):
        raise UserError(f"{name or 'a tensor'} has shape {list(dims)} here and {len(base_dims)} dimensions in the base")
    result = []
    for base, dim in zip(base_dims, dims, strict=True):
        if not isinstance(base, InfDim):
            base = InfDim(None if fin_if_same and base == dim else base, dim)
        elif not base.grows and base.dim not in (None, dim):
            raise UserError(
                f"{name or 'a tensor'} has shape {list(dims)} here, but neither base nor delta moves the dimension "
                f"that is {base.dim} there and {dim} here; make the delta model differ from the base in it"
            )
        result.append(InfDim(base.base_dim, dim))
    return InfShape(result, name)
