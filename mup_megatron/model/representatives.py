"""The tensors of a whole model from those of a few layers and one expert, so that its size costs nothing.

Layers of one kind, and all experts of a layer, have the same tensors: one of each is built, the others take its specs
under their own global names. Public names: `layer_kinds`, `representatives`, `replicate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mup_megatron.config import Model
from mup_megatron.rules.shapes import TensorSpec, layer_number, stack_of

_FIRST_EXPERT = ".local_experts.0."


def layer_kinds(model: Model) -> dict[str, list[str]]:
    """What each layer of each stack is; what makes the tensors of two layers differ must be told here."""
    if model.num_moe_experts is None:
        return {stack: ["dense"] * layers for stack, layers in model.stacks.items()}
    kinds = ["experts" if experts else "dense" for experts in model.expert_layers]
    return dict.fromkeys(model.stacks, kinds)


def representatives(kinds: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """The first layer of each kind in each stack, by global number."""
    return {stack: sorted({kind: of.index(kind) for kind in of}.values()) for stack, of in kinds.items()}


def replicate(
    built: Mapping[str, TensorSpec], kinds: Mapping[str, Sequence[str]], experts: int
) -> dict[str, TensorSpec]:
    """The tensors of the whole model, in its own order.

    Args:
        built: specs of a model whose stacks hold the representatives alone, numbered from 0, and whose layers of
            experts hold the first expert alone.
        kinds: of every layer, by stack.
        experts: number of experts in a layer that has any.
    """
    by_layer: dict[tuple[str, int], dict[str, TensorSpec]] = {}
    for name, spec in _all_experts(built, experts):
        number, stack = layer_number(name), stack_of(name)
        if number is not None and stack is not None:
            by_layer.setdefault((stack, number), {})[name.split(".", 3)[3]] = spec
    result: dict[str, TensorSpec] = {}
    done = set()
    for name, spec in _all_experts(built, experts):
        stack = stack_of(name)
        if stack is None:
            result[name] = spec
        elif stack not in done:
            done.add(stack)
            numbers = {kinds[stack][layer]: number for number, layer in enumerate(representatives(kinds)[stack])}
            for layer, kind in enumerate(kinds[stack]):
                rows = by_layer[stack, numbers[kind]].items()
                result.update({f"{stack}.layers.{layer}.{rest}": spec for rest, spec in rows})
    return result


def _all_experts(built: Mapping[str, TensorSpec], experts: int) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors with those of the first expert repeated for each of them, expert by expert."""
    for (before, is_expert), tensors in itertools.groupby(built.items(), lambda item: _before_expert(item[0])):
        if not is_expert:
            yield from tensors
            continue
        of_one = [(name.partition(_FIRST_EXPERT)[2], spec) for name, spec in tensors]
        for expert in range(experts):
            yield from ((f"{before}.local_experts.{expert}.{rest}", spec) for rest, spec in of_one)


def _before_expert(name: str) -> tuple[str, bool]:
    before, marker, _ = name.partition(_FIRST_EXPERT)
    return before, bool(marker)
