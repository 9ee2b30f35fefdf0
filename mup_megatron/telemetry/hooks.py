"""Which modules are measured, and what beside their outputs: inputs and logits of attention, logits of routers.

Public names: `measured_modules`; `attention_hook` and `router_hook`, forward pre-hooks; `attention_logits`.

    s sequence   b batch   a heads of this rank   g KV heads of this rank   d head size   p queries that are measured
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

from mup_megatron.rules.shapes import STACKS

_QUERIES = 64
"""Attention logits are measured for so many queries, evenly spaced over the sequence: all would need memory for s²."""


_LOOKED_UP = ("decoder_relative_pos_emb", "encoder_relative_pos_emb")
"""Relative position embeddings, whose output is not measured: it is the table's, which is, with -inf at keys that come
later."""


def measured_modules(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Those whose output tells something.

    Not identities and dropout, nor what lies inside core attention: that depends on the kernel, so that the inputs of
    core attention are measured instead. A stack's output is another one on every pipeline stage.

    Args:
        modules: of a model, by global name, parents before children.
    """
    inside: tuple[str, ...] = ()
    for name, module in modules:
        if inside and name.startswith(inside):
            continue
        if name.endswith("core_attention"):
            inside = (*inside, f"{name}.")
        if not isinstance(module, torch.nn.Dropout | IdentityOp) and name not in (*STACKS, *_LOOKED_UP):
            yield name, module


def attention_hook(name: str, see: Callable[..., None], logits: bool) -> Callable[..., None]:
    """Measures query, key and value, and the attention logits, computed here because fused kernels never show them."""

    def hook(module: Any, inputs: Any) -> None:
        query, key, value = inputs[:3]
        for part, tensor in (("query", query), ("key", key), ("value", value)):
            see(f"{name}.{part}", tensor)
        if logits:
            see(f"{name}.logits", *attention_logits(module, query.detach(), key.detach()))

    return hook


def _softmax_scale(module: Any, query: torch.Tensor) -> float:
    scale = getattr(module, "softmax_scale", None)
    return 1.0 / math.sqrt(query.size(-1)) if scale is None else float(scale)


def _is_causal(module: Any) -> bool:
    """Whether queries see no later keys; Transformer Engine names kinds of masks as megatron-core does."""
    kind = getattr(module, "attn_mask_type", None)
    return getattr(kind, "name", kind) not in ("padding", "arbitrary", "no_mask")


def attention_logits(module: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention logits of some queries, [b, a, p, s], and a mask, [p, s], that is 1 where the query may see the key.

    Causal attention has t = s, and a query sees no later keys. In other attention it sees all, also those that only
    pad.

    Args:
        module: core attention, which says its softmax scale (the logits are scale · q·k) and the kind of its mask.
        query: [t, b, a, d].
        key: [s, b, g, d].
    """
    scale, causal = _softmax_scale(module, query), _is_causal(module)
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
