"""Sizes that a config says by itself, worked out by hand: of initial values, of rates, of outputs.

Public names: `Size`, `drawn_std`, `initial_size`, `ERRORS`, `first_rate`, `factor`, `output_size`, `is_orthogonal`,
`of_layers`. A slope does not see a factor that is the same at every width; these sizes do. As in theory.py, nothing
here calls the rules that are under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from mup_megatron.config import Config
from mup_megatron.proof.names import in_whole_model
from mup_megatron.proof.roles import ATTENTION, HEAD_NORMS, KEY_VALUE
from mup_megatron.rules.kinds import names
from mup_megatron.rules.shapes import Init, TensorShape

ERRORS = 6.0
"""How many standard errors a measured size of initial values may be off: with 10,000 sizes looked at, one in 50,000
checks of correct code fails (2e-9 each)."""


class Size(NamedTuple):
    """The mean absolute value that initial values should have, and the standard error of a measurement of it.

    Args:
        mean: over all elements.
        error: as a share of the mean; 0 for constants, which are exact.
    """

    mean: float
    error: float = 0.0


def drawn_std(config: Config, shape: TensorShape, block: str | None) -> float:
    """Standard deviation of initial values at the base, with the config's factors on them; 0 for constants.

    Megatron's: output projections take it over the root of twice the layers of the base, those of layers of one branch
    over the root of the layers.
    """
    hparams, init = config.hparams, shape.spec.init
    if init in (Init.ZEROS, Init.ONES, Init.OWN):
        return 0.0
    std = hparams.init_method_std
    if init is Init.EMBEDDING and hparams.embedding_init_method_std is not None:
        std = hparams.embedding_init_method_std
    if init is Init.OUTPUT_PROJECTION:
        std /= math.sqrt(2 * config.num_layers_base)
    if init is Init.HYBRID_OUTPUT_PROJECTION:
        std /= math.sqrt(config.num_layers_base)
    return std * factor(config, shape, block, "init")


def initial_size(config: Config, shape: TensorShape, block: str | None, *, output_like: bool) -> Size | None:
    """The size of initial values that Tensor Programs V says (Table 8), in numbers.

    N(0, σ²) has the mean absolute value σ (2/π)^1/2 and the variance of absolute values σ² (1 - 2/π). So the mean over
    n numbers has the standard error (π/2 - 1)^1/2 n^-1/2, as a share of it. σ falls as n_in^-1/2, as 1/n_in where the
    tensor is output-like, and not at all for embeddings and the readout (A = 1/n_in).

    Args:
        config: of the model.
        shape: of the tensor.
        block: of a fused one.
        output_like: whether the fan-in grows and the fan-out does not, and the rule for it is `output_like`.

    Returns:
        None where the layer draws values of its own, or no rule holds.
    """
    spec = shape.spec
    if spec.init is Init.OWN or spec.standard:
        return None
    if spec.init in (Init.ZEROS, Init.ONES):
        return Size(float(spec.init is Init.ONES))
    std = drawn_std(config, shape, block)
    if not (spec.readout or spec.is_lookup):
        std *= _ratio(shape) ** (-1.0 if output_like else -0.5)
    rows = shape.fan_outs[block].dim / sum(dim.dim for dim in shape.fan_outs.values())
    count = math.prod(spec.shape) * rows
    return Size(std * math.sqrt(2 / math.pi), math.sqrt((math.pi / 2 - 1) / count))


def first_rate(config: Config, shape: TensorShape) -> float:
    """The rate of Adam: 1/n_in, 1 for a readout; inside the blocks times m_L^(α-1)."""
    rate = config.hparams.lr / (1.0 if shape.spec.readout else _ratio(shape))
    exponent = config.parametrization.depth_exponent
    if of_layers(shape) and exponent is not None:
        rate *= (config.model.num_layers / config.num_layers_base) ** (exponent - 1)
    return rate * factor(config, shape, next(iter(shape.fan_outs)), "lr")


def factor(config: Config, shape: TensorShape, block: str | None, what: str) -> float:
    """The product of what entries of `hparams.per_tensor` say of a block: its `init`, `lr` or `weight_decay`."""
    entries = config.hparams.per_tensor.items()
    return math.prod(getattr(said, what) for entry, said in entries if names(entry, shape, block))


def _ratio(shape: TensorShape) -> float:
    return shape.fan_in.dim / (shape.fan_in.base_dim or shape.fan_in.dim)


def output_size(name: str, config: Config, shapes: Mapping[str, TensorShape]) -> int:
    """Coordinates of a module's output; the residual stream's where no weight says otherwise."""
    model = config.model
    name = in_whole_model(f"{name}.", model.num_layers)
    kind = next((kind for kind in ATTENTION if f"{kind}." in name), ATTENTION[0])
    before, _, after = name.partition(f"{kind}.")
    per_head = after.startswith(HEAD_NORMS) and f"{before}{kind}{KEY_VALUE}" in shapes
    if after.startswith("core_attention") or per_head:  # of all heads
        shape = shapes.get(f"{before}{kind}.linear_proj.weight")
        return shape.fan_in.dim if shape is not None else model.hidden_size
    shape = shapes.get(f"{name}weight")
    return shape.fan_out.dim if shape is not None else model.hidden_size


def is_orthogonal(config: Config, shape: TensorShape) -> bool:
    """Megatron-core's Muon and SOAP take matrices that are neither embedding nor readout."""
    spec = shape.spec
    return config.optimizer.name in ("muon", "soap") and len(spec.shape) == 2 and not (spec.is_lookup or spec.readout)


def of_layers(shape: TensorShape) -> bool:
    """Whether it is in a layer, or is a table that all layers share."""
    return shape.layer is not None or shape.spec.init is Init.RELATIVE_BIAS
