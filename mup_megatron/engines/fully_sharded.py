"""Parameters, gradients and optimizer state shared by data-parallel ranks: torch's FSDP2 in megatron-core's wrapper.

Public names: `wrap`, `whole`, `fill`, `own_part`. FSDP2 makes a DTensor of each parameter when it has its initial
value. It cuts the rank's slice along dimension 0 as `torch.chunk` does, so that the last ranks may hold fewer rows, or
none. The optimizer's state follows the parameter. What the engine gives and takes stays the whole slice.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.tensor import DTensor

from mup_megatron.model.parts import Part


class _FullySharded(TorchFullyShardedDataParallel):
    """megatron-core's; in 0.16.1 its own `finalize_model_grads` gives `finish_grad_sync` an argument that it lacks."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Nothing: FSDP2 has reduced the gradients when the backward pass ends."""


def wrap(
    chunk: LanguageModule, settings: DistributedDataParallelConfig, module: torch.nn.Module
) -> TorchFullyShardedDataParallel:
    """Shards a model over the data- and context-parallel ranks, layer by layer.

    megatron-core shards the embedding by itself, and its training script therefore refuses a tied head: the head would
    read a weight that was sharded again when the embedding had run. Here a tied embedding is sharded with the whole
    model, which keeps it together until the head has read it.

    Args:
        chunk: the model, with its initial values.
        settings: megatron-core's.
        module: the model, or what casts its inputs and outputs.
    """
    # Not megatron-core's ColumnParallelLinear, which it adds under Transformer Engine: here layers may be made of them.
    own: set[type] = {TransformerLayer, RotaryEmbedding}
    if not chunk.share_embeddings_and_output_weights:
        own.add(LanguageModelEmbedding)
    return _FullySharded(chunk.config, settings, module, sub_modules_to_wrap=own)


def whole(value: torch.Tensor) -> torch.Tensor:
    """The tensor that ranks share, put together; any other tensor as it is. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def fill(held: torch.Tensor, value: torch.Tensor) -> None:
    """Writes this rank's rows of a whole tensor into what the rank holds; all rows where it holds the tensor whole."""
    if isinstance(held, DTensor):
        own = held.to_local()
        own.copy_(value.narrow(0, _first_row(held), own.shape[0]))
    else:
        held.copy_(value)


def own_part(name: str, shared: DTensor) -> Part:
    """This rank's rows of a parameter or of its gradient, which no other data-parallel rank holds.

    Args:
        name: the parameter's global name.
        shared: a weight; or a gradient, the mean over the data-parallel ranks as FSDP2 leaves it.
    """
    columns = shared.numel() // shared.shape[0]
    return Part(name, shared.to_local(), start=_first_row(shared) * columns)


def _first_row(shared: DTensor) -> int:
    rows = shared.shape[0]
    return min(rows, shared.device_mesh.get_local_rank() * -(-rows // shared.device_mesh.size()))
