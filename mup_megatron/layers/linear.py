"""Shims of megatron-core's parallel linear layers: its own ("local"), and what Transformer Engine's share with them.

Upstream's layers take global sizes and divide them by the tensor-parallel size inside; here the global sizes go into a
TensorSpec before that. Weights are [fan-out, fan-in]. Public names: `ColumnParallelLinear`, `QKVColumnParallelLinear`,
`QueryUpColumnParallelLinear`, `KeyValueUpColumnParallelLinear`, `FC1ColumnParallelLinear`, `RowParallelLinear`; the
mixins `ColumnSpecs`, `RowSpecs` over any of upstream's layers, and `QKV`, `QueryUp`, `KeyValueUp`, `FC1`, which
say what the rows are.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mup_megatron.layers.tensor_spec import InitMethod, set_spec
from mup_megatron.shapes import Fused, Init, TensorSpec


class ColumnSpecs:
    """Over a column-parallel layer of upstream's: the fan-out (dimension 0) is what tensor parallelism splits."""

    weight: Any
    bias: Any

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        stride: int = 1,
        **kwargs: Any,
    ) -> None:
        upstream: Any = super()
        upstream.__init__(input_size, output_size, config=config, init_method=init_method, stride=stride, **kwargs)
        fused, expert = self.fused(config, output_size), kwargs.get("is_expert", False)
        if self.weight is not None:
            set_spec(
                self.weight,
                TensorSpec(
                    shape=(output_size, input_size),
                    fan_in=1,
                    fan_out=0,
                    init=init_method.init,
                    partition_dim=0,
                    partition_stride=stride,
                    fused=fused,
                    expert=expert,
                    **self.rules(config),
                ),
            )
        if kwargs.get("bias", True):
            set_spec(
                self.bias,
                TensorSpec(
                    shape=(output_size,),
                    fan_in=None,
                    fan_out=0,
                    init=Init.ZEROS,
                    partition_dim=0,
                    partition_stride=stride,
                    fused=fused,
                    expert=expert,
                ),
            )

    def fused(self, config: TransformerConfig, rows: int) -> Fused | None:
        """Blocks of the fan-out, `rows` in all; None for a layer that is one block."""
        return None

    def rules(self, config: TransformerConfig) -> dict[str, Any]:
        """What else the weight's TensorSpec says (`block_fixed_fan_out`, `query`)."""
        return {}


class RowSpecs:
    """Over a row-parallel layer of upstream's: the fan-in (dimension 1) is split, the bias is whole everywhere."""

    weight: Any
    bias: Any

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: InitMethod, **kwargs: Any
    ) -> None:
        upstream: Any = super()
        upstream.__init__(input_size, output_size, config=config, init_method=init_method, **kwargs)
        expert = kwargs.get("is_expert", False)
        set_spec(
            self.weight,
            TensorSpec(
                shape=(output_size, input_size),
                fan_in=1,
                fan_out=0,
                init=init_method.init,
                partition_dim=1,
                expert=expert,
            ),
        )
        if kwargs["bias"]:
            set_spec(
                self.bias, TensorSpec(shape=(output_size,), fan_in=None, fan_out=0, init=Init.ZEROS, expert=expert)
            )


class QKV:
    """The fused QKV projection, in Megatron's order: group by group, the group's query heads, the gates of their
    outputs where there are any, one key, one value."""

    def fused(self, config: TransformerConfig, rows: int) -> Fused:
        """Query rows (and as many of the output gate): heads · d; key and value rows: query groups · d."""
        head_size, groups = config.kv_channels, config.num_query_groups
        query = config.num_attention_heads // groups * head_size
        gate = (("gate", query),) if config.attention_output_gate else ()
        return Fused(runs=(("query", query), *gate, ("key", head_size), ("value", head_size)), repeats=groups)

    def rules(self, config: TransformerConfig) -> dict[str, Any]:
        """Under QK-norm the norm removes the scale of queries and keys, and g would only slow their direction."""
        normed: tuple[tuple[str, str], ...] = ()
        if config.qk_layernorm or config.qk_l2_norm:
            normed = (("query", "hidden_like"), ("key", "hidden_like"))
        return {"query": True, "block_fixed_fan_out": normed}


class QueryUp:
    """MLA's queries, from their latent or the hidden state: per head the part without positions, then the rotary."""

    def fused(self, config: MLATransformerConfig, rows: int) -> Fused:
        """Per head qk_head_dim and qk_pos_emb_head_dim rows."""
        runs = (("nope", config.qk_head_dim), ("rope", config.qk_pos_emb_head_dim))
        return Fused(runs=runs, repeats=config.num_attention_heads)

    def rules(self, config: TransformerConfig) -> dict[str, Any]:
        """All of it is the query."""
        return {"query": True}


class KeyValueUp:
    """MLA's keys and values from their latent: per head the key's part without positions, then the value."""

    def fused(self, config: MLATransformerConfig, rows: int) -> Fused:
        """Per head qk_head_dim and v_head_dim rows."""
        runs = (("nope", config.qk_head_dim), ("value", config.v_head_dim))
        return Fused(runs=runs, repeats=config.num_attention_heads)


class FC1:
    """The MLP's first layer: gate|up where the linear unit is gated, one block otherwise."""

    def fused(self, config: TransformerConfig, rows: int) -> Fused | None:
        """Gate and up, half of the rows each."""
        return Fused(runs=(("gate", rows // 2), ("up", rows // 2))) if config.gated_linear_unit else None


class ColumnParallelLinear(ColumnSpecs, tensor_parallel.ColumnParallelLinear):
    """megatron-core's ColumnParallelLinear, with TensorSpecs."""


class QKVColumnParallelLinear(QKV, ColumnParallelLinear):
    """The same for queries, keys and values."""


class QueryUpColumnParallelLinear(QueryUp, ColumnParallelLinear):
    """The same for MLA's queries."""


class KeyValueUpColumnParallelLinear(KeyValueUp, ColumnParallelLinear):
    """The same for MLA's keys and values."""


class FC1ColumnParallelLinear(FC1, ColumnParallelLinear):
    """The same for the MLP's first layer."""


class RowParallelLinear(RowSpecs, tensor_parallel.RowParallelLinear):
    """megatron-core's RowParallelLinear, with TensorSpecs."""
