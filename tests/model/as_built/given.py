"""What a script hands to GPTModel for a config: upstream's own layer specs, without a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

from mup_megatron.config import Config
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import ForwardMultipliers

NEUTRAL = ForwardMultipliers(softmax_scale=1.0, readout=1.0, embedding=1.0, residual=1.0)


@contextlib.contextmanager
def one_stage() -> Iterator[None]:
    """What megatron-core's specs ask of the pipeline."""
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)
    yield
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_pipeline_model_parallel_world_size(None)


def given_of(config: Config, vocabulary: int, layout: Layout | None = None, rank: int = 0, chunk: int = 0) -> Any:
    """The arguments of GPTModel's constructor by which a script builds the config's model.

    Args:
        config: of the model.
        vocabulary: padded.
        layout: how ranks split the model, whose process groups are there; None is one rank without any.
        rank: global rank of this process.
        chunk: of the model on this rank.
    """
    model = config.model
    split = layout is not None
    layout = layout or Layout(
        world_size=1,
        tensor=1,
        data=1,
        sequence_parallel=False,
        zero_stage=0,
        micro_batches=1,
        stages=((range(model.num_layers),),),
    )
    kernels = {"use_transformer_engine": model.transformer_impl == "transformer_engine"}
    core = core_config(config, model, NEUTRAL, layout, torch.device("cpu"))
    if model.num_moe_experts is not None:
        core.moe_layer_freq = [int(experts) for experts in model.expert_layers]
    stage, interleaved = layout.pipeline_rank(rank), layout.virtual_pipeline > 1
    is_last = (stage, chunk) == (layout.pipeline - 1, layout.virtual_pipeline - 1)
    virtual = {"vp_stage": chunk if interleaved else None}
    with contextlib.nullcontext() if split else one_stage():
        block = get_gpt_decoder_block_spec(
            core,
            **kernels,
            normalization=core.normalization,
            qk_l2_norm=core.qk_l2_norm,
            **virtual,
        )
        mtp = None
        if core.mtp_num_layers and is_last:
            mtp = get_gpt_mtp_block_spec(core, block, **kernels, **virtual)
    return {
        "config": core,
        "transformer_layer_spec": block,
        "mtp_block_spec": mtp,
        "vocab_size": vocabulary,
        "max_sequence_length": config.max_position_embeddings,
        "pre_process": (stage, chunk) == (0, 0),
        "post_process": is_last,
        **virtual,
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
        "position_embedding_type": model.position_embedding_type,
        "rotary_percent": model.rotary_percent,
        "rotary_base": model.rotary_base,
    }
