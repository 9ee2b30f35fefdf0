"""The scale of attention's logits, worked out from queries, keys, values and output. Public name: `softmax_scale`.

Kernels do not tell their scale. It is fitted to the output of a few queries (Gauss-Newton). Dropout and sinks hide the
weights of a softmax, but not the ratio of two of them: the second query of causal attention sees two keys, so its
output is p₀v₀ + p₁v₁, and log(p₁/p₀) is the scale times the difference of the two products q·k.

    s query positions   k key positions   b batch   a heads of this rank   g KV heads of this rank   d head size
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state

from mup_megatron.audit.multiple import DEVIATIONS, Measured, rounding

_QUERIES = 64
_SEEN = 0.01
"""Weight that a key must have to count as seen, and share of an output that the two keys may leave unexplained."""
_ROUNDS = 6


def softmax_scale(module: Any, args: Any, kwargs: Any, output: Any, expected: float) -> Measured | None:
    """The scale in one call of a core attention of megatron-core's interface; None where it cannot be told.

    Args:
        module: the core attention.
        args: of the call: query [s, b, a, d], key [k, b, g, d], value [k, b, g, d_v], mask, kind of mask.
        kwargs: of the call.
        output: [s, b, a·d_v], or a tuple that begins with it.
        expected: where the fit begins.
    """
    names = ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in names[:3])
    output = output[0] if isinstance(output, tuple) else output
    config = module.config
    if (
        value is None
        or query.dim() != 4
        or given.get("packed_seq_params") is not None
        or getattr(config, "attn_logit_softcapping", None)
    ):
        return None
    key, value = (tensor.repeat_interleave(query.size(2) // tensor.size(2), dim=2) for tensor in (key, value))
    output = output.reshape(*query.shape[:3], -1)
    mask, bias = given.get("attention_mask"), given.get("attention_bias")
    kind = given.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    causal = "causal" in str(getattr(kind, "name", kind))
    if causal and parallel_state.get_context_parallel_rank() > 0:
        return None  # keys of the first positions are elsewhere
    hidden = (module.training and config.attention_dropout) or getattr(config, "softmax_type", "vanilla") != "vanilla"
    if hidden:
        return _of_two(query[1], key[:2], value[:2], output[1], bias) if causal and query.size(0) > 1 else None
    length = query.size(0) // 2 if config.context_parallel_size > 1 else query.size(0)  # a rank has two parts
    count = min(_QUERIES, length)
    if causal:  # of keys that come later nothing is seen
        key, value = key[:count], value[:count]
    added = query.new_zeros((1, 1, count, key.size(0)), dtype=torch.float64)
    if mask is not None and query.size(0) == mask.size(-2):
        added = torch.where(mask[..., :count, : key.size(0)], -math.inf, added)
    elif causal:
        added = added.masked_fill(added.new_ones(count, count).triu(1).bool(), -math.inf)
    elif mask is not None:
        added = torch.where(mask, -math.inf, added)
    if bias is not None:
        added = added + bias[..., :count, : key.size(0)].double()
    return _fitted(query[:count], key, value, output[:count], added, expected)


def _of_two(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, bias: torch.Tensor | None
) -> Measured:
    """Least squares over batch and heads, from what the second query gives the two keys that it sees."""
    share = rounding(output)
    query, key, value, output = (tensor.double() for tensor in (query, key, value, output))
    gram = torch.einsum("kbad,lbad->bakl", value, value)
    inverse = torch.linalg.pinv(gram)
    weights = torch.einsum("bakl,lbad,bad->bak", inverse, value, output)
    explained = torch.einsum("bak,kbad->bad", weights, value)
    left = (output - explained).square().sum(-1) / output.square().sum(-1)
    tells = (weights > _SEEN).all(-1) & (left < _SEEN)
    weights = weights.clamp(min=_SEEN)
    logs = (weights[..., 1] / weights[..., 0]).log()
    if bias is not None:
        row = bias[..., -1 if bias.size(-2) == 1 else 1, :2].double()
        logs = logs - (row[..., 1] - row[..., 0])
    products = torch.einsum("bad,bad->ba", query, key[1] - key[0]) * tells
    # The output is rounded, and so are the two weights inside a kernel.
    step = share**2 * output.square().mean(-1)
    over, signs = 1.0 / weights, inverse.new_tensor([[1, -1], [-1, 1]])
    spread = (inverse * over[..., :, None] * over[..., None, :] * signs).sum((-1, -2))
    variance = step * spread.abs() + 2 * share**2
    size = products.square().sum()
    noise = DEVIATIONS * (products.square() * variance).sum().sqrt() / size
    return Measured((products * logs).sum() / size, noise, torch.zeros_like(size))


def _fitted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    added: torch.Tensor,
    expected: float,
) -> Measured:
    """The scale at which outputs are nearest to what is there.

    Args:
        query: [s, b, a, d].
        key: [k, b, a, d].
        value: [k, b, a, d_v].
        output: [s, b, a, d_v].
        added: to the scaled logits; broadcast to [b, a, s, k].
        expected: where the fit begins.
    """
    share = rounding(output)
    query, key, value, output = (tensor.double() for tensor in (query, key, value, output))
    products = torch.einsum("sbad,kbad->bask", query, key)
    # Of a query that pads nothing is asked: it sees no key.
    sees = (added > -math.inf).any(-1).expand(products.shape[:-1]).permute(2, 0, 1)[..., None]
    scale = torch.full((), expected, dtype=torch.float64, device=query.device)
    for _ in range(_ROUNDS):
        weights = (scale * products + added).softmax(-1).nan_to_num(0.0)
        off = torch.where(sees, output - torch.einsum("bask,kbad->sbad", weights, value), 0.0)
        mean = (weights * products).sum(-1, keepdim=True)
        slope = torch.einsum("bask,kbad->sbad", weights * (products - mean), value)
        scale = scale + (off * slope).sum() / slope.square().sum()
    # The output is rounded, and so are the weights inside a kernel.
    noise = DEVIATIONS * math.sqrt(2) * share * output.square().mean().sqrt() / slope.square().sum().sqrt()
    strange = (off.square().sum() / output.square().sum() - _SEEN).clamp(min=0.0)
    return Measured(scale, noise, strange)
