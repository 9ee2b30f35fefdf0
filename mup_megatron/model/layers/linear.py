"""Shims of megatron-core's parallel linear layers: its own ("local"), and what Transformer Engine's share with them.

Upstream's layers take global sizes and divide them by the tensor-parallel size inside; here the global sizes go into a
TensorSpec before that. Weights are [fan-out, fan-in]. Public names: `ColumnParallelLinear`, `QKVColumnParallelLinear`,
`QueryColumnParallelLinear`, `KeyValueColumnParallelLinear`, `QueryUpColumnParallelLinear`,
`KeyValueUpColumnParallelLinear`, `FC1ColumnParallelLinear`, `RowParallelLinear`; the mixins `ColumnSpecs`, `RowSpecs`
over any of upstream's layers, `Grouped` over those of several experts, and `QKV`, `Query`, `KeyValue`, `QueryUp`,
`KeyValueUp`, `FC1`, which say what the rows are.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mup_megatron.model.layers.tensor_spec import InitMethod, set_spec
from mup_megatron.rules.shapes import Fused, Init, TensorSpec


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
        weight, bias = self.specs(
            input_size, output_size, config, init_method.init, stride=stride, expert=kwargs.get("is_expert", False)
        )
        if self.weight is not None:
            set_spec(self.weight, weight)
        if kwargs.get("bias", True):
            set_spec(self.bias, bias)

    def specs(
        self, columns: int, rows: int, config: TransformerConfig, init: Init, *, stride: int = 1, expert: bool
    ) -> tuple[TensorSpec, TensorSpec]:
        """Of weight and bias, by global sizes."""
        split: dict[str, Any] = {"partition_dim": 0, "partition_stride": stride, "expert": expert}
        split["fused"] = self.fused(config, rows)
        return (
            TensorSpec(shape=(rows, columns), fan_in=1, fan_out=0, init=init, **split, **self.rules(config)),
            TensorSpec(shape=(rows,), fan_in=None, fan_out=0, init=Init.ZEROS, **split),
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
        weight, bias = self.specs(input_size, output_size, config, init_method.init, expert=expert)
        set_spec(self.weight, weight)
        if kwargs["bias"]:
            set_spec(self.bias, bias)

    def specs(
        self, columns: int, rows: int, config: TransformerConfig, init: Init, *, expert: bool
    ) -> tuple[TensorSpec, TensorSpec]:
        """Of weight and bias, by global sizes."""
        return (
            TensorSpec(shape=(rows, columns), fan_in=1, fan_out=0, init=init, partition_dim=1, expert=expert),
            TensorSpec(shape=(rows,), fan_in=None, fan_out=0, init=Init.ZEROS, expert=expert),
        )


class Grouped:
    """Over `ColumnSpecs` or `RowSpecs` and a grouped layer of upstream's: `weight0`, `weight1`, ... of its experts.

    Each of them is the weight that the same expert has as a layer of its own; moe.py names them so.
    """

    specs: Any

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: InitMethod,
        bias: bool,
        **kwargs: Any,
    ) -> None:
        # Past the constructors of ColumnSpecs and RowSpecs, which are of one layer.
        after: Any = RowSpecs if isinstance(self, RowSpecs) else ColumnSpecs
        upstream: Any = super(after, self)
        upstream.__init__(
            num_gemms, input_size, output_size, config=config, init_method=init_method, bias=bias, **kwargs
        )
        # Each rank halves its own rows into gate and up, as it does where the MLP says that stride.
        halves = {"stride": 2} if config.gated_linear_unit and not isinstance(self, RowSpecs) else {}
        weight, of_bias = self.specs(input_size, output_size, config, init_method.init, expert=True, **halves)
        for number in range(num_gemms):
            set_spec(getattr(self, f"weight{number}"), weight)
            if bias:
                set_spec(getattr(self, f"bias{number}"), of_bias)


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


class Query:
    """The queries of cross-attention, which come from the decoder: heads · d rows, one block."""

    def rules(self, config: TransformerConfig) -> dict[str, Any]:
        """All of it is the query."""
        return {"query": True}


class KeyValue:
    """The fused keys and values of cross-attention, which come from the encoder: per head its key, then its value.

    That is how megatron-core's CrossAttention splits them, which has as many key/value heads as query heads.
    """

    def fused(self, config: TransformerConfig, rows: int) -> Fused:
        """Per head d rows of the key and d of the value."""
        head_size = config.kv_channels
        return Fused(runs=(("key", head_size), ("value", head_size)), repeats=config.num_attention_heads)


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


class RowParallelLinear(RowSpecs, tensor_parallel.RowParallelLinear):
    """megatron-core's RowParallelLinear, with TensorSpecs."""
