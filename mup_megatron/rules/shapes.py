"""Global shapes, base shapes, and which dimensions grow: what the rules need to know about a tensor, without tensors.

Public names: `Fused`, `TensorSpec` (what a layer's shim says of a tensor), `InfDim` (microsoft/mup's term: a dimension
and its base), `TensorShape` (a spec joined with its base), `join_shapes`. base_shapes.py has files of base shapes.

All sizes are global, that is, unsharded. Whether a dimension grows is declared once for a family of models. It is never
inferred from a difference between target and base (docs/parametrization.md, section 1), because a growing dimension of
the target may have the base's size.
This module imports neither torch, nor megatron-core, nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Literal, NamedTuple

from mup_megatron.rules import formulas
from mup_megatron.util.errors import UserError

FixedFanOut = Literal["output_like", "hidden_like"]
"""Which init rule holds where the fan-in grows and the fan-out does not (docs/parametrization.md, section 2)."""


class Init(Enum):
    """The base distribution of a tensor; the standard deviations are Megatron's."""

    WEIGHT = "weight"  # N(0, init_method_std²)
    OUTPUT_PROJECTION = "output_projection"  # N(0, init_method_std² / 2L), L the base depth
    HYBRID_OUTPUT_PROJECTION = "hybrid_output_projection"  # N(0, init_method_std² / L): layers of one branch each
    EMBEDDING = "embedding"  # N(0, embedding_init_method_std²)
    RELATIVE_BIAS = "relative_bias"  # N(0, init_method_std²), as megatron-core's T5Model draws it
    ZEROS = "zeros"
    ONES = "ones"
    OWN = "own"  # what the layer's own constructor drew


STACKS = ("encoder", "decoder")
"""What megatron-core's models call a sequence of transformer layers: GPTModel has a decoder, BertModel an encoder."""


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Blocks with fan-outs of their own that share dimension 0 of one tensor.

    Dimension 0 is `repeats` times the sequence of `runs`: Megatron's fused QKV is, for each query group, the query
    heads of the group, one key head, one value head; gate|up is one gate and one up, once.

    Args:
        runs: (block name, rows) in order.
        repeats: how often the sequence is repeated.
    """

    runs: tuple[tuple[str, int], ...]
    repeats: int = 1

    @property
    def fan_outs(self) -> dict[str, int]:
        """Global fan-out of each block."""
        return {name: rows * self.repeats for name, rows in self.runs}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a layer shim knows about a parameter from its constructor's arguments, before anything is sharded.

    Args:
        shape: global shape.
        fan_in: index of the fan-in dimension; None for gains and biases.
        fan_out: index of the fan-out dimension.
        init: base distribution.
        partition_dim: dimension that tensor parallelism splits; None where every rank holds the whole.
        partition_stride: how many interleaved pieces each rank holds of that dimension (megatron-core's
            `partition_stride`; 2 for gate|up).
        fused: blocks of dimension 0, if there are several.
        readout: the tensor turns the trunk's output into logits and carries the forward multiplier A = 1/m_in.
        fixed_fan_out: which init rule holds where the fan-in grows and the fan-out does not; None leaves it to the
            config's `fixed_fan_out_init` (`Parametrization.is_output_like`). For a fused tensor: of every block that
            `block_fixed_fan_out` does not name.
        block_fixed_fan_out: (block name, rule) of the blocks that have a rule of their own.
        query: its output is attention's query (in a fused tensor: the output of the block `query`).
        expert: it belongs to an expert, so that expert tensor parallelism splits it.
        frozen: it is not trained.
        standard: no rule holds for it: it has its base values at every width, as in the standard parametrization.
    """

    shape: tuple[int, ...]
    fan_in: int | None
    fan_out: int
    init: Init
    partition_dim: int | None = None
    partition_stride: int = 1
    fused: Fused | None = None
    readout: bool = False
    fixed_fan_out: FixedFanOut | None = None
    block_fixed_fan_out: tuple[tuple[str, FixedFanOut], ...] = ()
    query: bool = False
    expert: bool = False
    frozen: bool = False
    standard: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where the blocks do not fill dimension 0."""
        if self.fused and sum(self.fused.fan_outs.values()) != self.shape[0]:
            raise ValueError(f"blocks {self.fused.fan_outs} do not add up to {self.shape[0]} rows")

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of the slice that each of `ranks` ranks holds (`Layout.slice_of`)."""
        return tuple(size // ranks if i == self.partition_dim else size for i, size in enumerate(self.shape))

    def fixed_fan_out_of(self, block: str | None) -> FixedFanOut | None:
        """The rule of one block, as `fixed_fan_out`."""
        return dict(self.block_fixed_fan_out).get(block or "", self.fixed_fan_out)

    def is_query(self, block: str | None) -> bool:
        """Whether the block (None: the whole tensor) puts out attention's query."""
        return self.query and (self.fused is None or "query" not in self.fused.fan_outs or block == "query")

    @property
    def is_lookup(self) -> bool:
        """Whether it is a table of rows that are looked up, and no matrix that multiplies anything."""
        return self.init in (Init.EMBEDDING, Init.RELATIVE_BIAS)

    @property
    def is_decayed(self) -> bool:
        """Whether Megatron applies weight decay to it: not to biases, not to one-dimensional tensors."""
        return len(self.shape) > 1


class InfDim(NamedTuple):
    """A dimension and its base (microsoft/mup's `InfDim`); `base_dim` None means that the dimension is fixed."""

    base_dim: int | None
    dim: int

    @property
    def grows(self) -> bool:
        """Whether the dimension is one of those that grow with the family."""
        return self.base_dim is not None

    @property
    def ratio(self) -> Fraction:
        """Ratio m = size / base size, exact; 1 where the dimension is fixed."""
        return Fraction(self.dim, self.base_dim) if self.base_dim is not None else Fraction(1)


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """A parameter's global shape joined with its base.

    Args:
        name: global name, layer numbers counted over the whole model.
        spec: what the shim of its layer says.
        infshape: one InfDim per dimension.
        blocks: InfDim of the fan-out of each block, for fused tensors.
        layer: number of the transformer layer that holds it, from 0; None outside the blocks.
    """

    name: str
    spec: TensorSpec
    infshape: tuple[InfDim, ...]
    blocks: dict[str, InfDim] | None = None
    layer: int | None = None

    @property
    def fan_in(self) -> InfDim:
        """Fan-in; a fixed 1 for gains and biases."""
        return InfDim(None, 1) if self.spec.fan_in is None else self.infshape[self.spec.fan_in]

    @property
    def fan_out(self) -> InfDim:
        """Fan-out of the whole tensor."""
        return self.infshape[self.spec.fan_out]

    @property
    def fan_outs(self) -> dict[str | None, InfDim]:
        """Fan-out per block; {None: fan-out} for a tensor that is one block."""
        blocks: list[tuple[str | None, InfDim]] = list((self.blocks or {}).items())
        return dict(blocks or [(None, self.fan_out)])

    @property
    def ratios(self) -> formulas.Ratios:
        """What the rules see of the tensor."""
        m_outs = {block: dim.ratio for block, dim in self.fan_outs.items()}
        return formulas.Ratios(m_in=self.fan_in.ratio, m_outs=m_outs, readout=self.spec.readout)

    @property
    def base_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has in the base model."""
        return tuple(dim.base_dim or dim.dim for dim in self.infshape)


def layer_number(name: str) -> int | None:
    """Number of the layer in a global parameter name: 3 for `decoder.layers.3.mlp.linear_fc1.weight`.

    None outside the stacks: multi-token prediction (`mtp.layers.0...`) has a depth of its own, which is the base's.
    """
    parts = name.split(".")
    return int(parts[2]) if stack_of(name) else None


def stack_of(name: str) -> str | None:
    """The stack that a parameter or module is a layer's of, by its global name; None outside of the layers."""
    stack, _, rest = name.partition(".")
    return stack if stack in STACKS and rest.startswith("layers.") else None


def expert_number(name: str) -> int | None:
    """Number of the expert in a global parameter name: 3 for `...experts.local_experts.3.linear_fc1.weight`."""
    parts = name.split(".")
    return int(parts[parts.index("local_experts") + 1]) if "local_experts" in parts else None


def without_numbers(name: str) -> str:
    """A global name with the numbers of layer and expert left out, as a star each."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def join_shapes(
    target: Mapping[str, TensorSpec], base: Mapping[str, TensorSpec], enlarged: Mapping[str, TensorSpec]
) -> dict[str, TensorShape]:
    """Joins three builds of one family: a dimension grows if its size differs between `base` and `enlarged`.

    Args:
        target: specs of the model to be trained, by global name.
        base: specs of the model where hyperparameters are defined.
        enlarged: specs of the base model with every declared key enlarged (microsoft/mup's delta model).

    Raises:
        UserError: the builds have different tensors, or a fixed dimension of the target is not the base's.
    """
    result = {}
    # Layers and experts of one kind share a spec and are joined once. The key is the identity of the specs, because
    # computing the hash of a spec takes longer than joining it.
    joined: dict[tuple[int, ...], tuple[tuple[InfDim, ...], dict[str, InfDim] | None]] = {}
    for name, spec in target.items():
        if name not in base or name not in enlarged:
            raise UserError(f"the base model has no tensor {name}; base and target must have the same layers")
        specs = (spec, base[name], enlarged[name])
        key = tuple(map(id, specs))
        if key not in joined:
            joined[key] = _join(name, *specs)
        infshape, blocks = joined[key]
        result[name] = TensorShape(name=name, spec=spec, infshape=infshape, blocks=blocks, layer=layer_number(name))
    missing = set(base) - set(target)
    if missing:
        raise UserError(f"the target has no tensor {min(missing)}, which the base has")
    return result


def _join(
    name: str, target: TensorSpec, base: TensorSpec, enlarged: TensorSpec
) -> tuple[tuple[InfDim, ...], dict[str, InfDim] | None]:
    """Dimensions and blocks of one tensor."""
    infshape = _infinite(name, target.shape, base.shape, enlarged.shape)
    if target.fused is None:
        return infshape, None
    sizes = [fused.fan_outs if fused else {} for fused in (target.fused, base.fused, enlarged.fused)]
    names = tuple(sizes[0])
    dims = _infinite(name, *(tuple(block.get(part, 0) for part in names) for block in sizes))
    return infshape, dict(zip(names, dims, strict=True))


def _infinite(
    name: str, target: tuple[int, ...], base: tuple[int, ...], enlarged: tuple[int, ...]
) -> tuple[InfDim, ...]:
    if not len(target) == len(base) == len(enlarged):
        raise UserError(f"{name} has {len(target)} dimensions here and {len(base)} in the base")
    dims = tuple(
        InfDim(small if small != large else None, size)
        for size, small, large in zip(target, base, enlarged, strict=True)
    )
    for size, small, dim in zip(target, base, dims, strict=True):
        if not dim.grows and size != small:
            raise UserError(
                f"{name} has shape {list(target)} here and {list(base)} in the base, but no key declared under base: "
                f"moves the dimension that differs ({small} to {size})"
            )
    return dims
