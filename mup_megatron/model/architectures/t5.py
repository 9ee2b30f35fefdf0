"""Encoder and decoder: megatron-core's T5Model. Public names: `build`.

Both stacks share the word embedding and learned positions, and the readout where it is tied. Upstream's layers are
pre-LN, a norm follows each stack, and the decoder's layers attend to the encoder's output.
"""

from __future__ import annotations

import copy
from functools import partial

from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.config import Config, Model
from mup_megatron.model.architectures import Part
from mup_megatron.model.layers.embedding import scale_input, scale_output, set_embedding_specs, set_readout_spec
from mup_megatron.model.layers.encoder_decoder import stack_spec
from mup_megatron.model.layers.position_bias import set_relative_bias_spec
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import ForwardMultipliers


def build(
    config: Config, model: Model, vocabulary: int, forward: ForwardMultipliers, layout: Layout, part: Part
) -> T5Model:
    """A T5Model, both stacks on every rank; see Architecture.build. Upstream has no pipeline for it."""
    common = core_config(config, model, forward, layout, part.device)
    model = part.kernels(model)
    encoder, decoder = len(part.layers["encoder"]), len(part.layers["decoder"])
    spec = partial(stack_spec, model, residual_multiplier=forward.residual)
    built = T5Model(
        config=_of_stack(common, decoder),
        encoder_config=_of_stack(common, encoder),
        transformer_encoder_layer_spec=spec("encoder", layers=encoder),
        transformer_decoder_layer_spec=spec("decoder", layers=decoder),
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        relative_attention_num_buckets=model.relative_attention_num_buckets,
        relative_attention_max_distance=model.relative_attention_max_distance,
        pg_collection=part.groups,
    )
    set_embedding_specs(built.embedding)
    scale_output(built.embedding, forward.embedding)
    if model.position_embedding_type == "relative":
        for positions in (built.encoder_relative_pos_emb, built.decoder_relative_pos_emb):
            set_relative_bias_spec(positions)
            scale_output(positions.relative_attention_bias, forward.relative_bias)
    set_readout_spec(built.output_layer, tied=built.share_embeddings_and_output_weights)
    scale_input(built.output_layer, forward.readout)
    return built.to(part.device) if part.device.type == "cuda" else built


def _of_stack(common: TransformerConfig, layers: int) -> TransformerConfig:
    """The config of one stack: they differ in their depth alone."""
    own = copy.copy(common)
    own.num_layers = layers
    return own
