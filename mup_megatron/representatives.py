"""The tensors of a whole model from those of a few layers and one expert, so that its size costs nothing.

Layers of one kind, and all experts of a layer, have the same tensors: one of each is built, the others take its specs
under their own global names. Public names: `layer_kinds`, `representatives`, `replicate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mup_megatron.config import Model
from mup_megatron.shapes import TensorSpec, layer_number

_FIRST_EXPERT = ".local_experts.0."


def layer_kinds(model: Model) -> list[str]:
    """What each decoder layer is; what makes the tensors of two layers differ must be told here."""
    return ["experts" if experts else "dense" for experts in model.expert_layers]


def representatives(kinds: Sequence[str]) -> list[int]:
    """The first layer of each kind, by global number."""
    return sorted({kind: kinds.index(kind) for kind in kinds}.values())


def replicate(built: Mapping[str, TensorSpec], kinds: Sequence[str], experts: int) -> dict[str, TensorSpec]:
    """The tensors of the whole model, in its own order.

    Args:
        built: specs of a model whose decoder holds the representatives alone, numbered from 0, and whose layers of
            experts hold the first expert alone.
        kinds: of every decoder layer.
        experts: number of experts in a layer that has any.
    """
    numbers = {kinds[layer]: number for number, layer in enumerate(representatives(kinds))}
    by_layer: dict[int, dict[str, TensorSpec]] = {}
    for name, spec in _all_experts(built, experts):
        number = layer_number(name)
        if number is not None:
            by_layer.setdefault(number, {})[name.split(".", 3)[3]] = spec
    result: dict[str, TensorSpec] = {}
    decoded = False
    for name, spec in _all_experts(built, experts):
        if layer_number(name) is None:
            result[name] = spec
        elif not decoded:
            decoded = True
            for layer, kind in enumerate(kinds):
                rows = by_layer[numbers[kind]].items()
                result.update({f"decoder.layers.{layer}.{rest}": spec for rest, spec in rows})
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
