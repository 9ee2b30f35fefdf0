"""Positions as a bias on the attention logits: T5's relative positions, and ALiBi.

GPTModel has neither; megatron-core's T5Model has the first. Its own RelativePositionEmbedding makes the bias here too,
and TransformerBlock's argument `attention_bias` takes it to the layers. Public names: `RelativeBias`, `AlibiBias`,
`alibi_slopes`, `set_relative_bias_spec`, `attach_position_bias`, `NAME`.

    s query positions   k key positions   a heads of this rank
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.model.layers.attention import context_parallel_positions, mark_causal
from mup_megatron.model.layers.embedding import scale_output
from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.rules.shapes import Init, TensorSpec

NAME = "decoder_relative_pos_emb"
"""What the module is called in a model, as in megatron-core's T5Model."""


def set_relative_bias_spec(embedding: RelativePositionEmbedding) -> None:
    """Records the table of a relative position embedding, [buckets, heads], which every tensor-parallel rank holds.

    It is a lookup: of the buckets, whose number is fixed, to the heads. So it is input-like, whether heads grow or not.
    """
    table = embedding.relative_attention_bias.weight
    set_spec(table, TensorSpec(shape=tuple(table.shape), fan_in=0, fan_out=1, init=Init.RELATIVE_BIAS))


class RelativeBias(RelativePositionEmbedding):
    """T5's relative position bias of a decoder, one table for all layers (Raffel et al., arXiv 1910.10683, 2.1).

    megatron-core's module, but for where tensor parallelism splits it. Upstream's T5Model looks up the heads of all
    ranks, [s, k, heads], and keeps its own; here a rank takes its own columns of the table before it looks anything
    up. Both give each rank the gradient of the whole table: their backward pass gathers what the ranks have.

    Args:
        config: of the model.
        buckets: rows of the table.
        max_distance: from this distance on all keys share the last bucket.
        multiplier: on the bias.
        tp_group: tensor-parallel ranks, which split the heads.
    """

    def __init__(
        self, config: TransformerConfig, buckets: int, max_distance: int, multiplier: float, tp_group: Any
    ) -> None:
        super().__init__(
            bidirectional=False,
            init_method=config.init_method,
            num_attention_heads=config.num_attention_heads,
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=max_distance,
        )
        self._tp_group = tp_group
        set_relative_bias_spec(self)
        scale_output(self.relative_attention_bias, multiplier)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Bias [1, a, s, k] of queries and keys at these positions, [s] and [k]; -inf where a key comes later."""
        distances = keys[None, :] - queries[:, None]
        buckets = self._relative_position_bucket(
            distances,
            bidirectional=False,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        rows = torch.arange(self.relative_attention_num_buckets, device=keys.device)
        # Through the module, whose hooks gather what ZeRO 3 has partitioned.
        table = self.relative_attention_bias(rows)
        if self._tp_group.size() > 1:
            table = scatter_to_tensor_model_parallel_region(table, group=self._tp_group)
        bias = torch.nn.functional.embedding(buckets, table).permute(2, 0, 1)[None]
        return _causal(bias, distances)


def alibi_slopes(heads: int) -> list[float]:
    """Slope of each head (Press et al., arXiv 2108.12409, section 3 and its code): 2^(-8 i/n), i = 1 to n.

    That is for n a power of two. Other numbers take the slopes of the largest power below, and then every other slope
    of twice that power.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


class AlibiBias(torch.nn.Module):
    """ALiBi: minus the distance times a slope of each head, which is not trained (Press et al., arXiv 2108.12409).

    Args:
        config: of the model.
        multiplier: on the bias.
        tp_group: tensor-parallel ranks, which split the heads.
    """

    def __init__(self, config: TransformerConfig, multiplier: float, tp_group: Any) -> None:
        super().__init__()
        own = config.num_attention_heads // tp_group.size()
        slopes = alibi_slopes(config.num_attention_heads)[tp_group.rank() * own :][:own]
        # No buffer, which bf16 would round before it is multiplied.
        self._slopes = torch.tensor([multiplier * slope for slope in slopes], dtype=torch.float32, device="cpu")
        self._dtype = config.params_dtype

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """As `RelativeBias.forward`."""
        distances = keys[None, :] - queries[:, None]
        self._slopes = self._slopes.to(keys.device)  # once: the host waits for it
        return _causal((self._slopes[:, None, None] * distances).to(self._dtype)[None], distances)


def _causal(bias: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The bias with the causal mask in it, once for all layers: each would make a copy of its own."""
    return mark_causal(bias.masked_fill(distances > 0, -torch.inf))


def attach_position_bias(model: GPTModel, bias: torch.nn.Module) -> None:
    """Puts the module into a model, and its bias on the way to the decoder's layers and multi-token prediction's.

    Hooks, because GPTModel builds no such module and no argument of its forward pass tells the positions; and on the
    blocks rather than on the model, because ZeRO 3 counts what runs before the model's own forward pass to no step.

    Args:
        model: this rank's part.
        bias: makes [1, a, s, k] of positions of queries and keys.
    """
    setattr(model, NAME, bias)
    if model.config.pipeline_model_parallel_size > 1:
        _mark_copies(model, bias)
    place = _Place(model)
    model.register_forward_pre_hook(place.note, with_kwargs=True)
    for block in (model.decoder, getattr(model, "mtp", None)):
        if block is not None:
            block.register_forward_pre_hook(place.hand_over, with_kwargs=True)


def _mark_copies(model: GPTModel, bias: torch.nn.Module) -> None:
    """Tells megatron-core that every pipeline stage has a copy of the table.

    finalize_model_grads then adds up their gradients, as of the embedders of its diffusion models, and the norm of the
    gradient counts the first stage's. A bucket of its own lets the distributed optimizer cut all copies alike.
    """
    for table in bias.parameters():
        model.config.has_cond_embedder = True
        table.pipeline_parallel = True  # type: ignore[attr-defined]
        table.shared_embedding = True  # type: ignore[attr-defined]
        table.shared = not model.pre_process  # type: ignore[attr-defined]


class _Place:
    """Where the tokens of the forward pass stand, and the hooks that need it.

    Args:
        model: see `attach_position_bias`.
    """

    def __init__(self, model: GPTModel) -> None:
        self._bias = getattr(model, NAME)
        self._cp = model.pg_collection.cp if model.config.context_parallel_size > 1 else None
        self._recomputes = model.config.recompute_granularity is not None
        self._queries = self._keys = torch.empty(0)

    def note(self, _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Positions of queries and keys: behind those in the cache, or this rank's part of the sequence."""
        tokens = args[0] if args else kwargs["input_ids"]
        context = kwargs.get("inference_context")
        size, before = tokens.size(1), 0 if context is None else context.sequence_len_offset
        if self._cp is None:
            self._keys = torch.arange(before + size, device=tokens.device)
            self._queries = self._keys[before:]
        else:
            parts = context_parallel_positions(size, self._cp, tokens.device)
            self._queries, self._keys = parts[self._cp.rank()], parts.flatten()

    def hand_over(
        self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Adds the bias to the block's arguments."""
        bias = self._bias(self._queries, self._keys)
        if self._recomputes and bias.requires_grad:
            bias = _collected(block, kwargs, bias)
        return args, {**kwargs, "attention_bias": bias}


def _collected(block: Any, kwargs: dict[str, Any], bias: torch.Tensor) -> torch.Tensor:
    """The bias cut off from its graph, its gradient handed on when all layers' has come together.

    megatron-core's checkpoints close over the bias instead of taking it as an argument. Each recomputed layer would
    then walk through the bias's graph by itself, which the first one frees.
    """
    leaf = mark_causal(bias.detach().requires_grad_())
    if kwargs.get("hidden_states") is not None:
        kwargs["hidden_states"] = _HandGradient.apply(kwargs["hidden_states"], bias, leaf)
    else:  # of a later pipeline stage
        block.set_input_tensor(_HandGradient.apply(block.input_tensor, bias, leaf))
    return leaf


class _HandGradient(torch.autograd.Function):
    """Nothing on the way forward; backward, which comes here last, the gradient of `leaf` becomes that of `bias`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, bias: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        """Returns `hidden`."""
        ctx.leaf = leaf
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Gradients of `hidden` and `bias`."""
        collected, ctx.leaf.grad = ctx.leaf.grad, None
        return gradient, collected, None
