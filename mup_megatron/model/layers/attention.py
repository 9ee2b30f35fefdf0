"""Core attention, cross-attention, and multi-latent attention (MLA) with TensorSpecs and at µP's softmax scale.

Public names: `SdpaAttention` (torch's scaled_dot_product_attention), `MegatronAttention` (megatron-core's own, for
MLA's head sizes too), `MLASelfAttention`, `CrossAttention`, `set_sink_spec`, `mark_causal`,
`context_parallel_positions`.

    s query positions   k key positions   b batch   a heads of this rank   g KV heads of this rank   d head size
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import CrossAttention as MegatronCrossAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.rules.shapes import FixedFanOut, Fused, Init, TensorSpec

_CAUSAL = "mup_is_causal"
_MASKS = "mup_masks_what_comes_later"


class SdpaAttention(MegatronModule):
    """Attention by torch.nn.functional.scaled_dot_product_attention, with megatron-core's core-attention interface.

    Args:
        config: of the model.
        layer_number: counted from 1.
        attn_mask_type: what holds where `forward` is not told.
        attention_type: unused, as upstream.
        attention_dropout: probability; the config's unless given.
        softmax_scale: of the logits; 1/sqrt(d) unless given.
        cp_comm_type: unused: keys and values are gathered (as `all_gather` of Transformer Engine).
        pg_collection: whose `cp` splits the sequence; parallel_state's unless given.
        k_channels: unused: MLA's head sizes come with the tensors.
        v_channels: unused for the same reason.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp = None
        if config.context_parallel_size > 1:
            self.cp = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Context [s, b, a·d_v].

        Args:
            query: [s, b, a, d].
            key: [k, b, g, d]; k is above s when decoding with a KV cache.
            value: [k, b, g, d_v].
            attention_mask: bool, broadcastable to [b, a, s, k], True where attention is masked; None means causal
                (the last query sees all keys) if the mask type is causal. Unused under context parallelism, where
                s is this rank's part of the sequence and the mask is causal.
            attn_mask_type: instead of the constructor's.
            attention_bias: added to the scaled logits, broadcastable to [b, a, s, k]; also of more positions, of which
                the last ones are meant (decoding).
            packed_seq_params: not supported.

        Raises:
            ValueError: an argument that is not supported.
        """
        if packed_seq_params is not None:
            raise ValueError("sdpa attention takes no packed_seq_params")
        if self.cp is None:
            mask, is_causal = self._mask(attention_mask, attn_mask_type or self.attn_mask_type, query, key)
        else:
            mask, is_causal = _causal_part(query.size(0), self.cp, query.device), False
            key, value = (gather_from_sequence_parallel_region(tensor, group=self.cp) for tensor in (key, value))
        if attention_bias is not None:
            mask, is_causal = _biased(attention_bias, mask, is_causal, query, key), False
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        scale = 1.0 / math.sqrt(query.size(-1)) if self.softmax_scale is None else self.softmax_scale
        dropout = self.dropout if self.training else 0.0
        fork = bool(dropout) and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if fork else nullcontext():
            context = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def _mask(
        attention_mask: torch.Tensor | None, mask_type: AttnMaskType, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor | None, bool]:
        """The mask of torch (True where attention goes), or that it is the plain causal one, which needs none."""
        rows, columns = query.size(0), key.size(0)
        if attention_mask is not None:
            if rows == columns and _is_causal(attention_mask, rows):
                return None, True
            return ~attention_mask, False
        if mask_type is not AttnMaskType.causal or rows == 1:
            return None, False
        if rows == columns:
            return None, True
        return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows), False


def _is_causal(mask: torch.Tensor, size: int) -> bool:
    """Whether the mask is the plain causal one. Looked at once per tensor: on a GPU the answer waits for it."""
    known = getattr(mask, _CAUSAL, None)
    if known is None or known[0] != mask._version:
        square = mask.numel() == size * size and mask.dtype == torch.bool
        causal = square and torch.equal(mask.view(size, size), torch.ones_like(mask.view(size, size)).triu(1))
        known = (mask._version, causal)
        setattr(mask, _CAUSAL, known)
    return known[1]


def _causal_part(size: int, cp: torch.distributed.ProcessGroup, device: torch.device) -> torch.Tensor:
    """True where this rank's queries attend, [s, cp · s]; keys come rank by rank, s positions each."""
    positions = context_parallel_positions(size, cp, device)
    return positions[cp.rank()][:, None] >= positions.flatten()


def context_parallel_positions(size: int, cp: torch.distributed.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Positions that each context-parallel rank holds, [cp, s].

    Each rank holds two of 2 · cp equal parts of the sequence, one from either end: `data.gpt.sequence_part`.

    Args:
        size: s, of one rank.
        cp: the ranks that split the sequence.
        device: where to make them.
    """
    ranks, half = cp.size(), size // 2
    parts = torch.arange(2 * ranks * half, device=device).view(2 * ranks, half)
    return torch.stack([parts[:ranks], parts[ranks:].flip(0)], dim=1).view(ranks, size)


def mark_causal(bias: torch.Tensor) -> torch.Tensor:
    """Says of an attention bias that it is -inf wherever a key comes after the query, so that no mask is needed."""
    setattr(bias, _MASKS, True)
    return bias


def _biased(
    bias: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Bias and mask (True where attention goes) as one, which torch's attention adds to the logits."""
    masks, bias = getattr(bias, _MASKS, False), _of_last(bias, query, key).to(query.dtype)
    if is_causal and not masks:
        mask = torch.ones(query.size(0), key.size(0), dtype=torch.bool, device=query.device).tril()
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def _of_last(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The part of an attention bias that these queries and keys need: when decoding, the last query sees all keys."""
    rows, columns = query.size(0), key.size(0)
    if bias.shape[-2:] == (rows, columns):
        return bias
    return bias[..., columns - rows : columns, :columns]


class MegatronAttention(DotProductAttention):
    """megatron-core's DotProductAttention, which takes no attention bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        set_sink_spec(self, self.config)
        self._bias: torch.Tensor | None = None
        self.scale_mask_softmax.register_forward_pre_hook(self._add_bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        attention_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See upstream, and for the bias `SdpaAttention`."""
        self._bias = None if attention_bias is None else _of_last(attention_bias, query, key).to(query.dtype)
        if self.config.multi_latent_attention:  # parts of one tensor, which upstream's `view` refuses
            key, value = key.contiguous(), value.contiguous()
        try:
            return super().forward(query, key, value, *args, **kwargs)
        finally:
            self._bias = None

    def _add_bias(self, _softmax: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Adds the bias to the scaled logits, [b, a, s, k], before they are masked."""
        return None if self._bias is None else (inputs[0] + self._bias, *inputs[1:])


def set_sink_spec(attention: Any, config: TransformerConfig) -> None:
    """Records the learnable softmax offset, [heads], where there is one.

    It is the logit of one more key of each head, the same for every query, so a vector as a bias is: the other logits
    keep their size over width, and so must it (docs/parametrization.md, section 3). Tensor parallelism splits heads.
    """
    if config.softmax_type == "learnable":
        heads = (config.num_attention_heads,)
        spec = TensorSpec(shape=heads, fan_in=None, fan_out=0, init=Init.WEIGHT, partition_dim=0)
        set_spec(attention.softmax_offset, spec)


class MLASelfAttention(multi_latent_attention.MLASelfAttention):
    """megatron-core's multi-latent attention, [s, b, hidden] to [s, b, hidden].

    Its softmax scale is the config's: upstream works out its own and ignores `config.softmax_scale`. Upstream builds
    its down-projections itself and admits no subclass of them, so their specs are set here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        normed: FixedFanOut | None = "hidden_like" if config.qk_layernorm else None
        runs = (("rank", config.kv_lora_rank), ("rope", config.qk_pos_emb_head_dim))
        _set_down_projection_spec(
            self.linear_kv_down_proj,
            config.hidden_size,
            fused=Fused(runs=runs),
            block_fixed_fan_out=(("rank", normed),) if normed else (),
        )
        if config.q_lora_rank is not None:
            _set_down_projection_spec(
                self.linear_q_down_proj, config.hidden_size, rows=config.q_lora_rank, fixed_fan_out=normed
            )
        if self.pg_collection.tp.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gather)

    @property
    def softmax_scale(self) -> float:
        """µP's scale of the attention logits, YaRN's factor in it (`Parametrization.forward`)."""
        return self.config.softmax_scale

    @softmax_scale.setter
    def softmax_scale(self, upstream: float) -> None:
        """Upstream sets its own here, then builds the core attention with what the attribute says."""

    def _gather(self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
        """Gathers the rows of the down-projection that tensor-parallel ranks hold, so that gradients come back whole.

        Upstream gathers them too. But all heads share the rotary part of the key, and upstream's ranks each return its
        gradient from their own heads alone, instead of the sum.

        Returns:
            [s, b, rank + rope], or this rank's part of the sequence under sequence parallelism; what upstream takes
            from a projection that is not split.
        """
        rows, bias = output
        gathered = gather_from_tensor_model_parallel_region(rows)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(gathered), bias
        rank, rope = gathered.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        shared = copy_to_tensor_model_parallel_region(rope)
        if shared.requires_grad:
            # megatron-core 0.16 sums a copy of a gradient that is not contiguous, and hands back the unsummed one.
            shared.register_hook(lambda gradient: gradient.contiguous())
        return torch.cat([rank, shared], dim=-1), bias

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The spec's own layers; megatron-core 0.19 would norm uncompressed queries too, by Transformer Engine."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def _set_down_projection_spec(
    layer: Any, hidden: int, *, rows: int | None = None, fused: Fused | None = None, **rules: Any
) -> None:
    """Records a down-projection, [rank, hidden], whose rows tensor parallelism splits."""
    size = sum(fused.fan_outs.values()) if fused else rows
    set_spec(
        layer.weight,
        TensorSpec(
            shape=(size or 0, hidden), fan_in=1, fan_out=0, init=Init.WEIGHT, partition_dim=0, fused=fused, **rules
        ),
    )


class CrossAttention(MegatronCrossAttention):
    """megatron-core's cross-attention, [t, b, hidden] and the encoder's [s, b, hidden] to [t, b, hidden].

    Its softmax scale is the config's, as self-attention's.
    """

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> Any:
        """See upstream, which would keep keys and values in the cache's place of the layer's self-attention.

        The encoder's output is the same at every decoding step, so cross-attention needs no cache.

        Args:
            hidden_states: [t, b, hidden], the decoder's.
            attention_mask: bool, [b, 1, t, s], True where attention is masked.
            kwargs: `key_value_states`, the encoder's output, and others of upstream.
        """
        kwargs["inference_context"] = None
        return super().forward(hidden_states, attention_mask, **kwargs)
