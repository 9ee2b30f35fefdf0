"""Which sizes of a config grow from base to target: those that `base:` names, and those that follow from them.

Public names: `GrowingSize`, `growing_sizes`.
"""

from __future__ import annotations

from typing import NamedTuple

from mup_megatron.config.schema import Config, Model


class GrowingSize(NamedTuple):
    """A size that grows.

    Args:
        base: in the base model.
        target: in the target.
        follows: what it is computed from, where no key names it; None where `base:` does.
    """

    base: int
    target: int
    follows: str | None = None


# Sizes that follow from others until their keys are set, as TransformerConfig has it: Model's property, and the rule.
_FOLLOWING: dict[str, tuple[str, str]] = {
    "ffn_hidden_size": ("ffn_size", "4 * hidden_size"),
    "moe_ffn_hidden_size": ("moe_ffn_size", "ffn_hidden_size"),
    "num_query_groups": ("query_groups", "num_attention_heads"),
    "kv_channels": ("head_size", "hidden_size / num_attention_heads"),
}


def growing_sizes(config: Config) -> dict[str, GrowingSize]:
    """Every size that grows, by key: those that `base:` names, then those that follow from them.

    A size that neither `model:` nor `base:` names follows from others and grows where they do; one that `model:` alone
    names is fixed. Empty where `base.file` tells tensor by tensor what grows.

    Args:
        config: the run, checked.
    """
    if config.base.file is not None:
        return {}
    base = config.model.resized(config.base.width)
    enlarged = base.resized(config.base.enlarged())
    growth = {}
    for name, size in config.base.sizes.items():
        attribute = _FOLLOWING[name][0] if name in _FOLLOWING else name
        growth[name] = GrowingSize(size, getattr(config.model, attribute))
    for name, (attribute, rule) in _FOLLOWING.items():
        follows = name not in growth and getattr(config.model, name) is None and _has(config.model, name)
        if follows and getattr(base, attribute) != getattr(enlarged, attribute):
            growth[name] = GrowingSize(getattr(base, attribute), getattr(config.model, attribute), rule)
    return growth


def _has(model: Model, name: str) -> bool:
    """Whether the architecture has a size of that name."""
    if name.startswith("moe_"):
        return model.num_moe_experts is not None
    return not (model.multi_latent_attention and name in ("num_query_groups", "kv_channels"))
