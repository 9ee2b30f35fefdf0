"""megatron-core's HybridModel: one layer of a kind behind the other, in the order of a pattern of letters.

Public names: `PATTERN`, `hybrid_model`, `hybrid_parts`, `hybrid_stages`.

`*` is attention, `-` an MLP, `E` experts, `M` Mamba, `G` a gated delta net; `|` parts pipeline stages, and behind `/`
come the layers that predict a token ahead (megatron-core's hybrid_layer_allocation.py). A layer there holds one
residual branch, where a layer of GPTModel holds two.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.parallel.stages import Stages
from mup_megatron.util.errors import UserError

PATTERN = "hybrid_layer_pattern"
"""The argument of HybridModel that names its layers."""
_AHEAD = "/"
_HOME = "megatron.core.models.hybrid"


@functools.cache
def hybrid_model() -> Any:
    """HybridModel; None where the installed megatron-core has none (before 0.19)."""
    if importlib.util.find_spec(_HOME) is None:
        return None
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel


def hybrid_stages(config: TransformerConfig, pattern: str | None) -> Stages:
    """Where HybridModel puts its layers: per pipeline stage, per chunk of it.

    Args:
        config: the script's.
        pattern: of the layers.

    Raises:
        UserError: the pattern is not one that this project knows.
    """
    segments = _segments(pattern)
    stages = config.pipeline_model_parallel_size
    if len(segments) == 1 and stages > 1:
        segments = _shared_out(segments[0], config)
    firsts = [sum(map(len, segments[:number])) for number in range(len(segments))]
    ranges = [range(first, first + len(segment)) for first, segment in zip(firsts, segments, strict=True)]
    return tuple(tuple(ranges[stage::stages]) for stage in range(stages))


def _segments(pattern: str | None) -> list[str]:
    if not pattern:
        raise UserError("the script's HybridModel has no hybrid_layer_pattern; expected --hybrid-layer-pattern")
    return pattern.partition(_AHEAD)[0].split("|")


def _shared_out(letters: str, config: TransformerConfig) -> list[str]:
    """The layers of each pipeline stage where no `|` says them: equally many, but for the first and last that say."""
    stages = config.pipeline_model_parallel_size
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    others = stages - (first is not None) - (last is not None)
    left = len(letters) - (first or 0) - (last or 0)
    if left < 0 or (left % others if others else left):
        raise UserError(
            f"--hybrid-layer-pattern {letters}: {len(letters)} layers cannot be shared out over {stages} pipeline "
            "stages; expected | between the stages"
        )
    counts = [left // others] * others
    counts = [*([] if first is None else [first]), *counts, *([] if last is None else [last])]
    return [letters[sum(counts[:stage]) : sum(counts[: stage + 1])] for stage in range(stages)]


def check_repeated(pattern: str | None, base: int) -> None:
    """Whether a model is a base of another depth, several times over: then a depth rule knows how much deeper it is.

    Args:
        pattern: of the model.
        base: layers of the base.

    Raises:
        UserError: the base would have another mix of layers.
    """
    letters = "".join(_segments(pattern))
    if letters[:base] * (len(letters) // base) != letters:
        raise UserError(
            f"base.num_layers: {base}: --hybrid-layer-pattern {pattern} does not repeat its first {base} layers, so a "
            "base of that depth has another mix of layers; expected a number of layers that the pattern repeats"
        )


def hybrid_parts(
    core: TransformerConfig, given: Mapping[str, Any], layers: Sequence[int]
) -> tuple[list[int], dict[str, Any]]:
    """What the build of a chunk's layers needs: of the layers of one letter one is built.

    Args:
        core: a copy of the script's config.
        given: what the script constructs HybridModel with, by parameter name.
        layers: global numbers of the chunk's layers, from 0.

    Returns:
        For each layer the number of the built one that is like it, and the arguments that differ from the script's.

    Raises:
        UserError: the stack has layers of Transformer Engine, which is not installed.
    """
    if _has_stand_ins(given.get("hybrid_stack_spec")):
        raise UserError(
            f"--hybrid-layer-pattern {given[PATTERN]}: the script's stack has layers of Transformer Engine, which is "
            "not installed; expected it, or --spec of a stack of other layers"
        )
    letters = "".join(_segments(given[PATTERN]))
    kinds = list(dict.fromkeys(letters[layer] for layer in layers))
    core.num_layers = len(kinds)
    ahead = "".join(given[PATTERN].partition(_AHEAD)[1:])
    return [kinds.index(letters[layer]) for layer in layers], {PATTERN: "".join(kinds) + ahead}


def _has_stand_ins(spec: Any) -> bool:
    """Whether a spec has a class that is a mock, which is what megatron-core has where a package is not installed."""
    if isinstance(spec, Mock):
        return True
    parts: Iterable[Any] = ()
    if isinstance(spec, functools.partial):
        parts = (spec.func, *spec.args, *spec.keywords.values())
    elif isinstance(spec, Mapping):
        parts = spec.values()
    elif isinstance(spec, list | tuple):
        parts = spec
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = vars(spec).values()
    return any(_has_stand_ins(part) for part in parts)
