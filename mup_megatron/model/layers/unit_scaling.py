"""Layers whose weights are stored over θ multiply their outputs by θ (docs/parametrization.md, section 11).

Public name: `multiply_back`. A hook on the layer holds on every path that calls it: training, evaluation, generation,
recomputation and multi-token prediction. Upstream's linear layers add their bias inside; a layer that is scaled leaves
that to the hook, which adds it after θ, because a bias is stored as it is. The head multiplies its input and not its
logits, as it does with its other multipliers (embedding.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel

from mup_megatron.model.layers.embedding import scale_input, scale_output
from mup_megatron.rules.table import WORD_EMBEDDINGS

_LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
_TABLES = (tensor_parallel.VocabParallelEmbedding, torch.nn.Embedding)
_HEAD = "output_layer"


def multiply_back(modules: Iterable[tuple[str, Any]], thetas: Mapping[str, float], *, tied: bool) -> set[str]:
    """Has every layer of a chunk multiply by the θ of its weight.

    Args:
        modules: of the chunk, by global name.
        thetas: by global name of the weight, where it is not 1.
        tied: whether the head is the word embeddings.

    Returns:
        The weights that a layer was found for.
    """
    reached = set()
    for name, module in modules:
        weight = WORD_EMBEDDINGS if tied and name == _HEAD else f"{name}.weight"
        theta = thetas.get(weight)
        if theta is None or not isinstance(module, (*_LINEAR, *_TABLES)):
            continue
        reached.add(weight)
        if name == _HEAD:
            scale_input(module, theta)
        elif isinstance(module, _TABLES):
            scale_output(module, theta)
        else:
            _scale_linear(module, theta)
    return reached


def _scale_linear(layer: Any, theta: float) -> None:
    """Multiplies what one of megatron-core's linear layers gives before its bias is added."""
    adds = layer.bias is not None and not layer.skip_bias_add
    if adds:
        layer.skip_bias_add = True  # so that it returns the bias beside the output

    def scale(_layer: Any, _inputs: Any, result: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        output, bias = result[0] * theta, result[1]
        return (output + bias, None) if adds else (output, bias)

    layer.register_forward_hook(scale)
