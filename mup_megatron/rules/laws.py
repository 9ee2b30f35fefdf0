"""The table as a function of the sizes: what each tensor gets if the model is wider, deeper or trained for longer.

Public names: `Law`, `Side`, `Size`, `TensorLaws`, `Laws`. Every number of the table is a constant times powers of the
sizes and of the tensor's own ratios. measured_laws.py measures them. They are plain data (`dataclasses.asdict`), which
report/explorer.py puts into a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Law:
    """A constant times powers of ratios.

    Args:
        constant: the value where all ratios are 1.
        powers: exponent of each ratio, by its name; of a size it is size / the target's. None stands for 0.
    """

    constant: float
    powers: dict[str, float]

    def at(self, ratios: Mapping[str, float]) -> float:
        """The value at some ratios."""
        return self.constant * math.prod(ratios[name] ** power for name, power in self.powers.items())


@dataclass(frozen=True, kw_only=True)
class Side:
    """A dimension of a tensor, or of one of its blocks.

    Args:
        base: its base size; None where it is fixed.
        size: over the sizes of the model.
    """

    base: int | None
    size: Law

    def ratio(self, ratios: Mapping[str, float]) -> float:
        """Size / base size; 1 where the dimension is fixed."""
        return self.size.at(ratios) / self.base if self.base else 1.0


@dataclass(frozen=True, kw_only=True)
class TensorLaws:
    """One tensor, for all that differ by the number of layer and expert alone.

    Args:
        name: global name without these numbers.
        kind: embedding, readout, matrix, or vector (gains and biases).
        fan_in: its fan-in.
        rows: what Muon orthogonalises at once; of a tensor that is one block, its fan-out.
        fan_outs: of each block; {"": fan-out} for a tensor that is one block.
        init: standard deviation of each block, over the ratios of `at` with the block's own m_out.
        values: lr, eps and weight_decay over the ratios of `at`, and forward over those of the sizes.
        one_rate: whether the optimizer gives all blocks one rate, so that they must grow together.
        update_rule: how the optimizer's update scales.
    """

    name: str
    kind: str
    fan_in: Side
    rows: Side
    fan_outs: dict[str, Side]
    init: dict[str, Law]
    values: dict[str, Law]
    one_rate: bool
    update_rule: str

    def at(self, ratios: Mapping[str, float]) -> dict[str, Any]:
        """What the tensor gets: lr, eps, weight_decay, forward, and init by block.

        Args:
            ratios: of every size, to the target's.
        """
        blocks = {block: self._ratios(side, ratios) for block, side in self.fan_outs.items()}
        whole = {**self._ratios(self.rows, ratios), "m_out": max(own["m_out"] for own in blocks.values())}
        return {
            **{name: law.at(whole) for name, law in self.values.items()},
            "init": {block: law.at(blocks[block]) for block, law in self.init.items()},
        }

    def is_refused(self, ratios: Mapping[str, float]) -> bool:
        """Whether the optimizer, which has one rate for the tensor, would have to give its blocks others."""
        rates = [self.values["lr"].at(self._ratios(side, ratios)) for side in self.fan_outs.values()]
        return self.one_rate and not all(math.isclose(rate, rates[0], rel_tol=1e-9) for rate in rates)

    def _ratios(self, rows: Side, ratios: Mapping[str, float]) -> dict[str, float]:
        """The sizes' ratios, and those of a matrix of these rows: of fan-in, of fan-out and of the larger of both."""
        sides = (rows, self.fan_in)
        base = max(side.base or side.size.at(ratios) for side in sides)
        larger = max(side.size.at(ratios) for side in sides) / base
        return {**ratios, "m_in": self.fan_in.ratio(ratios), "m_out": rows.ratio(ratios), "larger": larger}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size that the table is a function of.

    Args:
        target: of the run.
        base: where hyperparameters are defined; None of a size that does not grow.
        along: keys of the sizes that the config lets grow with it alone.
    """

    target: int
    base: int | None
    along: list[str]


@dataclass(frozen=True, kw_only=True)
class Laws:
    """The table of one parametrization, over the sizes that the config lets grow.

    Args:
        parametrization: its name.
        sizes: by key (`model.hidden_size`); a size that the config allows neither doubled nor halved is not here.
        forward: multipliers of the forward pass (`ForwardMultipliers`), over the sizes.
        tensors: of the whole model.
    """

    parametrization: str
    sizes: dict[str, Size]
    forward: dict[str, Law]
    tensors: list[TensorLaws]
