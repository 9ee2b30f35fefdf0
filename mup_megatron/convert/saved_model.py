"""The model of a checkpoint, on this rank, in evaluation mode. Public name: `load_saved`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from mup_megatron.convert.saved_run import SavedRun
from mup_megatron.parallel.layout import Layout

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel


def load_saved(run: SavedRun, layout: Layout, rank: int, device: torch.device) -> list[GPTModel]:
    """This rank's part of a checkpoint's model, a chunk per virtual pipeline stage. Collective.

    Needs megatron-core's parallel_state (runtime.start_distributed).

    Args:
        run: the checkpoint, whose config may be derived for another layout.
        layout: how ranks split the model here, whatever it was in the run.
        rank: of this process.
        device: where the weights go.

    Raises:
        UserError: the checkpoint lacks a tensor, has another shape, or is damaged.
    """
    from mup_megatron.engines.saved_weights import read_into
    from mup_megatron.engines.state import load_weights
    from mup_megatron.model.build import build_model, parametrize

    parametrization = parametrize(run.config, int(run.tokenizer.vocab_size))
    chunks = build_model(parametrization, layout, rank, device)
    if layout.world_size == 1 or run.manifest.key_prefix is not None:
        read_into(chunks, run.weights(), layout, rank)
    else:  # where each rank reads what it needs
        load_weights(chunks, parametrization, layout, rank, run.path)
    for chunk in chunks:
        # Heads that predict further ahead are for training. Of megatron-core 0.16 they run while decoding too, and
        # fail.
        chunk.mtp_process, chunk.config.mtp_num_layers = False, None
        if run.config.model.activation_func == "gelu":
            _compute_as_trained(chunk, fused=run.fused_activation)
        if run.config.training.precision == "bf16":
            _cast(chunk)
        chunk.eval()
    return chunks


def _compute_as_trained(model: GPTModel, *, fused: bool) -> None:
    """Has the GELU that the run had: megatron-core's kernel of bias and GELU, on GPUs alone, is the tanh approximation.

    Args:
        model: this rank's part.
        fused: whether the run had that kernel.
    """
    here = model.config.bias_activation_fusion
    for config in (model.config, getattr(model, "encoder_config", model.config)):  # of T5's decoder, and encoder
        config.bias_activation_fusion = here and fused
    for module in model.modules() if fused and not here else ():
        if getattr(module, "activation_func", None) is torch.nn.functional.gelu:
            module.activation_func = partial(torch.nn.functional.gelu, approximate="tanh")


def _cast(model: GPTModel) -> None:
    """All bf16 but a router's expert bias, as the engines cast a model that they train."""
    from mup_megatron.model.global_names import named_buffers

    kept = [(buffer, buffer.clone()) for _, buffer in named_buffers(model)]
    model.bfloat16()
    for buffer, value in kept:
        buffer.data = value
