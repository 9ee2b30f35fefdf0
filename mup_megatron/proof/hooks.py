"""What the coordinate check measures beside outputs of modules: inputs and logits of attention, logits of routers.

Public names: `attention_hook`, `router_hook`, forward pre-hooks of core attention and of a router.

    s sequence   b batch   a heads of this rank   g KV heads of this rank   d head size   p queries that are measured
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_QUERIES = 64
"""Attention logits are measured for so many queries, evenly spaced over the sequence: all would need memory for s²."""


def attention_hook(name: str, see: Callable[..., None], logits: bool) -> Callable[..., None]:
    """Measures query, key and value, and the attention logits, computed here because fused kernels never show them."""

    def hook(module: Any, inputs: Any) -> None:
        query, key, value = inputs[:3]
        for part, tensor in (("query", query), ("key", key), ("value", value)):
            see(f"{name}.{part}", tensor)
        if logits:
            scale, causal = _softmax_scale(module, query), _is_causal(module)
            see(f"{name}.logits", *_attention_logits(query.detach(), key.detach(), scale, causal=causal))

    return hook


def _softmax_scale(module: Any, query: torch.Tensor) -> float:
    scale = getattr(module, "softmax_scale", None)
    return 1.0 / math.sqrt(query.size(-1)) if scale is None else float(scale)


def _is_causal(module: Any) -> bool:
    """Whether queries see no later keys; Transformer Engine names kinds of masks as megatron-core does."""
    kind = getattr(module, "attn_mask_type", None)
    return getattr(kind, "name", kind) not in ("padding", "arbitrary", "no_mask")


def _attention_logits(
    query: torch.Tensor, key: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention logits of some queries, [b, a, p, s], and a mask that is 1 where the query may see the key.

    Args:
        query: [t, b, a, d].
        key: [s, b, g, d].
        scale: softmax scale: the logits are scale · q·k.
        causal: whether t = s, and the query sees no later keys. Otherwise it sees all, also those that only pad.
    """
    length, heads = query.size(0), query.size(2)
    positions = torch.linspace(0, length - 1, min(length, _QUERIES), device=query.device).round().long()
    key = key.repeat_interleave(heads // key.size(2), dim=2)
    logits = torch.einsum("pbad,sbad->baps", query[positions].float(), key.float()) * scale
    keys = torch.arange(key.size(0), device=query.device)
    mask = (keys[None, :] <= (positions[:, None] if causal else len(keys))).float()
    return logits * mask, mask.expand(len(positions), len(keys))


def router_hook(name: str, see: Callable[..., None]) -> Callable[..., None]:
    """Measures the logits of a router, because its module returns probabilities."""

    def hook(module: Any, inputs: Any) -> None:
        with torch.no_grad():
            see(f"{name}.logits", module.gating(inputs[0].detach()))

    return hook
