"""Shims of Transformer Engine's modules, as megatron-core wraps them; imported only where a config asks for them.

Norms and linear layers are Transformer Engine's, unfused, in the places of megatron-core's local spec. Every tensor has
the name, shape and spec that it has there, so that rules, initial values and checkpoints are the same, and `explain`
needs no Transformer Engine. Public names: those of linear.py and `TENorm`, `TEDotProductAttention`,
`grouped_experts`.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version

from mup_megatron.model.layers.attention import set_sink_spec
from mup_megatron.model.layers.linear import (
    FC1,
    QKV,
    ColumnSpecs,
    Grouped,
    KeyValue,
    KeyValueUp,
    Query,
    QueryUp,
    RowSpecs,
)
from mup_megatron.model.layers.norm import Gains, set_gain_specs
from mup_megatron.util.errors import UserError

_OLDEST = "1.10.0"


class ColumnParallelLinear(ColumnSpecs, te.TEColumnParallelLinear):
    """megatron-core's TEColumnParallelLinear, with TensorSpecs."""


class QKVColumnParallelLinear(QKV, ColumnParallelLinear):
    """Of queries, keys and values in one weight."""


class QueryColumnParallelLinear(Query, ColumnParallelLinear):
    """Of the queries of cross-attention."""


class KeyValueColumnParallelLinear(KeyValue, ColumnParallelLinear):
    """Of the keys and values of cross-attention."""


class QueryUpColumnParallelLinear(QueryUp, ColumnParallelLinear):
    """Of MLA's queries, from their latent vector."""


class KeyValueUpColumnParallelLinear(KeyValueUp, ColumnParallelLinear):
    """Of MLA's keys and values, from their latent vector."""


class FC1ColumnParallelLinear(FC1, ColumnParallelLinear):
    """Of the MLP's first layer."""


class RowParallelLinear(RowSpecs, te.TERowParallelLinear):
    """megatron-core's TERowParallelLinear, with TensorSpecs."""


if te.TEColumnParallelGroupedLinear is not None:  # Transformer Engine 1.9 and newer

    class FC1GroupedLinear(Grouped, FC1, ColumnSpecs, te.TEColumnParallelGroupedLinear):
        """The first layers of all experts that a rank holds, as one; with a TensorSpec for each."""

    class FC2GroupedLinear(Grouped, RowSpecs, te.TERowParallelGroupedLinear):
        """Their second layers."""


def grouped_experts() -> Any:
    """megatron-core's TEGroupedMLP over the grouped layers, as a layer spec holds it.

    Raises:
        UserError: a Transformer Engine without them.
    """
    if te.TEColumnParallelGroupedLinear is None:
        raise UserError(
            f"Transformer Engine {te.get_te_version()} has no grouped linear layers; expected 1.9.0 or newer, or "
            "experts one by one (model.moe_grouped_gemm: false; without --moe-grouped-gemm)"
        )
    layers = {"linear_fc1": FC1GroupedLinear, "linear_fc2": FC2GroupedLinear}
    submodules = getattr(experts, "GroupedMLPSubmodules", None)
    if submodules is None:  # before 0.17
        return ModuleSpec(module=experts.TEGroupedMLP, submodules=MLPSubmodules(**layers))
    return functools.partial(experts.TEGroupedMLP, submodules=submodules(**layers))


class TEDotProductAttention(te.TEDotProductAttention):
    """megatron-core's TEDotProductAttention.

    Raises:
        UserError: a Transformer Engine that ignores the softmax scale, which µP sets.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not is_te_min_version(_OLDEST):
            raise UserError(
                f"Transformer Engine {te.get_te_version()} ignores the softmax scale; expected {_OLDEST} or newer, or "
                "model.core_attention: sdpa"
            )
        super().__init__(*args, **kwargs)
        set_sink_spec(self, self.config)


class TENorm:
    """Transformer Engine's LayerNorm or RMSNorm as megatron-core makes it, with TensorSpecs."""

    gains: Gains = "trained"
    per_head = False

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        """An instance of Transformer Engine's class."""
        norm: Any = te.TENorm(config, hidden_size, eps)
        zero_centered = config.layernorm_zero_centered_gamma
        set_gain_specs(norm, hidden_size, config.sequence_parallel, cls.gains, cls.per_head, zero_centered)
        return norm
