"""Models that predict the next token: megatron-core's GPTModel. Public names: `build`, `attach`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel

from mup_megatron.config import Config, Model
from mup_megatron.model.architectures import Part
from mup_megatron.model.layers.embedding import scale_input, scale_output, set_embedding_specs, set_readout_spec
from mup_megatron.model.layers.position_bias import AlibiBias, RelativeBias, attach_position_bias
from mup_megatron.model.layers.spec import block_spec, mtp_spec
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import ForwardMultipliers


def build(
    config: Config, model: Model, vocabulary: int, forward: ForwardMultipliers, layout: Layout, part: Part
) -> GPTModel:
    """A GPTModel; see Architecture.build."""
    transformer_config = core_config(config, model, forward, layout, part.device)
    model, groups = part.kernels(model), part.groups
    arguments: dict[str, Any] = {} if groups is None else {"pg_collection": groups}
    multi_token_prediction = mtp_spec(
        transformer_config,
        model,
        residual_multiplier=config.hparams.residual_multiplier,
        one_expert=part.one_expert,
        unsharded=groups,
    )
    built = GPTModel(
        config=transformer_config,
        transformer_layer_spec=block_spec(
            transformer_config,
            model,
            layers=part.layers["decoder"],
            residual_multiplier=forward.residual,
            one_expert=part.one_expert,
        ),
        mtp_block_spec=multi_token_prediction if part.last else None,
        pre_process=part.first,
        post_process=part.last,
        vp_stage=part.chunk,
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        # GPTModel makes no bias on attention logits; one is attached afterwards.
        position_embedding_type="none" if model.biases_attention else model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        **arguments,
    )
    attach(built, forward)
    if model.biases_attention:
        attach_position_bias(built, _position_bias(built, model, forward.relative_bias))
    return built.to(part.device) if part.device.type == "cuda" else built


def _position_bias(built: GPTModel, model: Model, multiplier: float) -> torch.nn.Module:
    """The module that makes the bias on attention logits."""
    tp = built.pg_collection.tp
    if model.position_embedding_type == "alibi":
        return AlibiBias(built.config, multiplier, tp)
    buckets, distance = model.relative_attention_num_buckets, model.relative_attention_max_distance
    return RelativeBias(built.config, buckets, distance, multiplier, tp)


def attach(built: LanguageModule, forward: ForwardMultipliers) -> None:
    """Records and scales what no layer spec reaches: embedding and readout."""
    if hasattr(built, "embedding"):
        set_embedding_specs(built.embedding)
        scale_output(built.embedding, forward.embedding)
    if built.post_process:
        set_readout_spec(built.output_layer, tied=built.share_embeddings_and_output_weights)
        scale_input(built.output_layer, forward.readout)
