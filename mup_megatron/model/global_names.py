"""Names of a model's parts over the whole model: layers, stages and experts are counted globally, not on this rank.

Public names: `global_names`, `Named`, `named_parameters`, `named_modules`, `named_buffers`. A parameter has one name in
every layout, which the table (rules/table.py), initial values (init.py) and checkpoints know it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from mup_megatron.model.layers.moe import global_expert_names
from mup_megatron.model.layers.tensor_spec import spec_of
from mup_megatron.rules.shapes import stack_of
from mup_megatron.rules.table import WORD_EMBEDDINGS
from mup_megatron.util.errors import UserError

Named = Sequence[tuple[str, torch.nn.Parameter]]
"""Parameters with their global names. The last pipeline stage may hold two copies of an embedding under one name: with
multi-token prediction, what it embeds by, and the tied head."""


def named_parameters(model: LanguageModule | Sequence[LanguageModule]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by global name: layers and experts counted over the whole model, not over this rank's part.

    The copy of a tied embedding that the last pipeline stage holds as its head bears the embedding's name.

    Args:
        model: this rank's part, or its chunks.

    Raises:
        UserError: a parameter without a TensorSpec; names it.
    """
    for chunk in [model] if isinstance(model, LanguageModule) else model:
        global_name = global_names(chunk)
        for local_name, parameter in chunk.named_parameters():
            name = global_name(local_name)
            if spec_of(parameter) is None:
                raise UserError(
                    f"{name}: its layer does not say its global shape (no TensorSpec), so no rule can be applied to it"
                )
            yield name, parameter


def named_modules(model: LanguageModule | Sequence[LanguageModule]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules by global name, as `named_parameters`; lists of modules and the chunks themselves are left out."""
    for chunk in [model] if isinstance(model, LanguageModule) else model:
        global_name = global_names(chunk)
        for name, module in chunk.named_modules():
            if name and not isinstance(module, torch.nn.ModuleList):
                yield global_name(f"{name}.").removesuffix("."), module


def named_buffers(model: LanguageModule | Sequence[LanguageModule]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model keeps beside its parameters (a router's expert bias), by global name; the same on every rank."""
    for chunk in [model] if isinstance(model, LanguageModule) else model:
        global_name = global_names(chunk)
        for prefix, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield global_name(f"{prefix}.{name}"), buffer


def global_names(chunk: LanguageModule) -> Callable[[str], str]:
    """From a chunk's own names of parameters and modules to those of the whole model."""
    global_expert_name = global_expert_names(chunk)

    def global_name(local_name: str) -> str:
        if local_name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            return WORD_EMBEDDINGS
        name = global_expert_name(local_name)
        if stack := stack_of(name):
            _, _, index, rest = name.split(".", 3)
            name = f"{stack}.layers.{getattr(chunk, stack).layers[int(index)].layer_number - 1}.{rest}"
        return name

    return global_name
