"""What modules and parameters are, by their names in megatron-core: what theory.py knows of attention, experts, heads.

Public names: `Roles`, `ROLES` (a table per family), and ends of names that mean the same in every family.
"""

from __future__ import annotations

from dataclasses import dataclass

from mup_megatron.config.model import Family

ATTENTION = (".self_attention", ".cross_attention")
FEED_FORWARD = ".mlp"
ROUTER = ".router"

GATE = ".shared_experts.gate_weight"

CLASSIFIERS = (f"{ROUTER}.weight", GATE, "binary_head.weight")
"""Parameters that turn features into a fixed number of logits, without a multiplier: output-like under every rule."""

KEY_VALUE = ".linear_qkv.weight"
"""What gives keys and values; the latents of multi-latent attention are another way."""

KEY_BIAS = (".linear_qkv.bias[key]", ".linear_kv.bias[key]")
"""Whose gradient is zero in exact arithmetic: softmax does not see what all keys share. It moves by rounding noise."""

NORMED = (".linear_qkv.weight[query]", ".linear_qkv.weight[key]", "_down_proj.weight", "_down_proj.weight[rank]")
"""Parts whose output a norm takes, where queries and keys (of latents: the ranks that they are made of) are normed."""

HEAD_NORMS = ("q_layernorm", "k_layernorm")
"""Norms of each head by itself; under multi-latent attention the first is of the rank that queries are made of."""

SCORED = (
    *(".query", ".key", ".q_layernorm", ".k_layernorm", ".linear_q", ".linear_q_up_proj", ".linear_q_down_proj"),
    ".pre_cross_attn_layernorm",
)
"""What only attention's logits are made of. The norm before cross-attention feeds only its queries."""

_NORMS_WITHOUT_QUERY = (".k_layernorm", ".q_layernorm", ".pre_cross_attn_layernorm")

WITHOUT_QUERY: dict[str, tuple[str, ...]] = {
    "initial": (
        *(".linear_qkv.weight[query]", ".linear_q.weight"),
        *(f".linear_q_{kind}proj.weight[{part}]" for kind in ("", "up_") for part in ("nope", "rope")),
    ),
    "output": (".query", ".core_attention.logits", ".linear_q_up_proj", ".linear_q_proj", ".linear_q"),
    # Of keys, and of what a query of zero weights is made of.
    "gradient": (".core_attention.key", ".linear_q_down_proj", *_NORMS_WITHOUT_QUERY),
    "update": (
        *(".linear_qkv.weight[key]", ".linear_kv.weight[key]", ".linear_q_down_proj.weight"),
        *(".linear_kv_up_proj.weight[nope]", ".linear_kv_down_proj.weight[rope]"),
        *(f"{norm}.{part}" for norm in _NORMS_WITHOUT_QUERY for part in ("weight", "bias")),
    ),
}
"""By quantity, what is zero before the first step, or in it, where queries start at zero."""

_BEFORE_ATTENTION = (".input_layernorm", ".pre_cross_attn_layernorm")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Names that are one thing in one family and another in the next.

    Args:
        logits: modules that turn features into logits, the readout's first.
        behind: beginnings of names of what reads the residual stream behind the layers.
        before_attention: ends of names of norms whose output goes into attention alone.
    """

    logits: tuple[str, ...]
    behind: tuple[str, ...] = ()
    before_attention: tuple[str, ...] = _BEFORE_ATTENTION


ROLES: dict[Family, Roles] = {
    "gpt": Roles(logits=("output_layer",)),
    # A head of two classes beside the readout.
    "bert": Roles(logits=("output_layer", "binary_head"), behind=("lm_head.", "pooler.")),
    # The head holds the readout; the norm after the encoder feeds all keys and values of the decoder's.
    "t5": Roles(
        logits=("lm_head", "lm_head.output_layer"),
        behind=("lm_head.",),
        before_attention=(*_BEFORE_ATTENTION, "encoder.final_layernorm"),
    ),
}
"""By the model's family."""
