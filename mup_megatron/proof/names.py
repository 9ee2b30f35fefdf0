"""Names of modules and of parts of parameters, as the coordinate check compares them over a family of models.

Public names: `named`, `part_name`, `in_family`, `in_whole_model`, `branch`, `in_experts`, `expert_of`. A part is a
block of a fused parameter (`...linear_qkv.weight[key]`), or a parameter that is one block. Where depth grows, the last
layer of every model is `decoder.layers.last` (an encoder's likewise).
"""

from __future__ import annotations

from collections.abc import Container

from mup_megatron.proof.roles import ATTENTION, FEED_FORWARD, ROUTER
from mup_megatron.rules.shapes import stack_of


def part_name(name: str, block: str | None) -> str:
    """`...linear_qkv.weight[key]` of a parameter and a block; the parameter's own name where it is one block."""
    return name if block is None else f"{name}[{block}]"


def named(name: str) -> tuple[str, str | None]:
    """Parameter and block of `...linear_qkv.weight[key]`; None where the parameter is one block."""
    tensor, _, block = name.partition("[")
    return tensor, block.removesuffix("]") or None


def in_family(name: str, layers: int) -> str | None:
    """A name that models of every depth have: of a stack's layers the first keeps its number, the last is `last`.

    Returns:
        None for a layer in between.
    """
    parts = name.split(".")
    if stack_of(name) is None or parts[2] == "0":
        return name
    return ".".join([*parts[:2], "last", *parts[3:]]) if int(parts[2]) == layers - 1 else None


def in_whole_model(name: str, layers: int) -> str:
    """The other way round."""
    stack = stack_of(name)
    return name.replace(f"{stack}.layers.last.", f"{stack}.layers.{layers - 1}.") if stack else name


def expert_of(name: str) -> int:
    """The number of the expert that a module or parameter belongs to; 0 outside of experts."""
    after = name.partition(".local_experts.")[2].partition(".")[0]
    return int(after.partition("[")[0]) if after else 0


def in_experts(name: str, layers: int, parameters: Container[str]) -> tuple[str, str] | None:
    """Where in an MLP of experts something is: its layer, and `experts.` or `router.logits.` there; None elsewhere."""
    layer, mlp, inside = in_whole_model(f"{name}.", layers).partition(".mlp.")
    return (layer, inside) if mlp and f"{layer}.mlp.router.weight" in parameters else None


def branch(name: str) -> str:
    """The residual branch that a module or parameter is in; itself outside of one, and a router."""
    if name.endswith((ROUTER, *(f"{ROUTER}.{part}" for part in ("logits", "weight", "bias")))):
        return name
    for kind in (*ATTENTION, FEED_FORWARD):
        before, found, _ = f"{name}.".partition(f"{kind}.")
        if found:
            return _any_layer(before) + kind
    return name


def _any_layer(name: str) -> str:
    """All layers are alike in this; `last` too."""
    parts = name.split(".")
    return ".".join([*parts[:2], *parts[3:]]) if stack_of(name) else name
