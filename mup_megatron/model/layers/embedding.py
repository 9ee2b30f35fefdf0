"""Embedding, readout and further heads, which upstream's models build themselves: TensorSpecs set after construction,
scaling by hooks.

No spec reaches these layers, and a hook holds on every path that calls them: training, evaluation, generation and
multi-token prediction. Public names: `set_embedding_specs`, `set_readout_spec`, `set_linear_specs`,
`scale_output`, `scale_input`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from mup_megatron.model.layers.tensor_spec import set_spec
from mup_megatron.rules.shapes import FixedFanOut, Init, TensorSpec


def set_embedding_specs(embedding: LanguageModelEmbedding) -> None:
    """Records word, position and token type embeddings, [fan-in, fan-out]; others than words are whole."""
    words = embedding.word_embeddings
    set_spec(words.weight, _words((words.num_embeddings, words.embedding_dim)))
    if embedding.add_position_embedding:
        _set_whole_embedding(embedding.position_embeddings)
    if embedding.num_tokentypes > 0:
        _set_whole_embedding(embedding.tokentype_embeddings)


def _set_whole_embedding(table: torch.nn.Embedding) -> None:
    shape = tuple(table.weight.shape)
    set_spec(cast(torch.nn.Parameter, table.weight), TensorSpec(shape=shape, fan_in=0, fan_out=1, init=Init.EMBEDDING))


def _words(shape: tuple[int, int]) -> TensorSpec:
    return TensorSpec(shape=shape, fan_in=0, fan_out=1, init=Init.EMBEDDING, partition_dim=0)


def set_readout_spec(output_layer: tensor_parallel.ColumnParallelLinear, *, tied: bool) -> None:
    """Sets the TensorSpecs of the language-model head, [vocabulary, hidden], and of its bias where it has one.

    A tied head has no weight of its own, but on the last of several pipeline stages, where it is a copy of the
    embedding and gets its TensorSpec. The bias, [vocabulary], is added to the logits after the multiplier.
    """
    shape = (output_layer.output_size, output_layer.input_size)
    if output_layer.bias is not None:
        bias = TensorSpec(shape=shape[:1], fan_in=None, fan_out=0, init=Init.ZEROS, partition_dim=0)
        set_spec(output_layer.bias, bias)
    if output_layer.weight is None:
        return
    head = TensorSpec(
        shape=shape,
        fan_in=1,
        fan_out=0,
        init=Init.WEIGHT,
        partition_dim=0,
        readout=True,
        fixed_fan_out="output_like",
    )
    set_spec(output_layer.weight, _words(shape) if tied else head)


def set_linear_specs(linear: torch.nn.Linear, *, fixed_fan_out: FixedFanOut | None = None) -> None:
    """Records a linear layer of torch, [fan-out, fan-in] and a bias, which every tensor-parallel rank holds whole.

    Args:
        linear: whose sizes are the global ones.
        fixed_fan_out: see TensorSpec.
    """
    shape = (linear.out_features, linear.in_features)
    weight = TensorSpec(shape=shape, fan_in=1, fan_out=0, init=Init.WEIGHT, fixed_fan_out=fixed_fan_out)
    set_spec(cast(torch.nn.Parameter, linear.weight), weight)
    set_spec(linear.bias, TensorSpec(shape=shape[:1], fan_in=None, fan_out=0, init=Init.ZEROS))


def scale_output(module: torch.nn.Module, multiplier: float) -> None:
    """Multiplies what the module returns (the embedding: [s, b, h])."""
    if multiplier != 1.0:
        module.register_forward_hook(lambda _module, _inputs, output: output * multiplier)


def scale_input(module: torch.nn.Module, multiplier: float) -> None:
    """Multiplies the module's first argument (the readout's: [s, b, h]).

    The input has s·b·h numbers, fewer under sequence parallelism; the logits, which megatron-core's own MuP
    multiplies, have s·b·v.
    """

    def scale(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * multiplier, *inputs[1:])

    if multiplier != 1.0:
        module.register_forward_pre_hook(scale)
