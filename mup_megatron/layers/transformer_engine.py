"""Shims of Transformer Engine's modules, as megatron-core wraps them; imported only where a config asks for them.

Norms and linear layers are Transformer Engine's, unfused, in the places of megatron-core's local spec. Every tensor has
the name, shape and spec that it has there, so that rules, initial values and checkpoints are the same, and `explain`
needs no Transformer Engine. Public names: those of linear.py and `TENorm`, `TEDotProductAttention`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine as te
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version

from mup_megatron.errors import UserError
from mup_megatron.layers.attention import set_sink_spec
from mup_megatron.layers.linear import FC1, QKV, ColumnSpecs, KeyValueUp, QueryUp, RowSpecs
from mup_megatron.layers.norm import Gains, set_gain_specs

_OLDEST = "1.10.0"


class ColumnParallelLinear(ColumnSpecs, te.TEColumnParallelLinear):
    """megatron-core's TEColumnParallelLinear, with TensorSpecs."""


class QKVColumnParallelLinear(QKV, ColumnParallelLinear):
    """The same for queries, keys and values."""


class QueryUpColumnParallelLinear(QueryUp, ColumnParallelLinear):
    """The same for MLA's queries."""


class KeyValueUpColumnParallelLinear(KeyValueUp, ColumnParallelLinear):
    """The same for MLA's keys and values."""


class FC1ColumnParallelLinear(FC1, ColumnParallelLinear):
    """The same for the MLP's first layer."""


class RowParallelLinear(RowSpecs, te.TERowParallelLinear):
    """megatron-core's TERowParallelLinear, with TensorSpecs."""


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
