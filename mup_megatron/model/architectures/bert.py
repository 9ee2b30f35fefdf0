"""Models that predict masked tokens from both directions: megatron-core's BertModel. Public names: `build`, `attach`.

As upstream builds it: norms before each branch and after the last layer (pre-LN), learned or rotary positions, a
language-model head of a linear layer, GELU and a norm before the readout, which has a bias. With `bert_binary_head`
there are token types, and a pooler and a head of two classes on the first position.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.bert import bert_model
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mup_megatron.config import Config, Model
from mup_megatron.model.architectures import Part
from mup_megatron.model.layers.embedding import (
    scale_input,
    scale_output,
    set_embedding_specs,
    set_linear_specs,
    set_readout_spec,
)
from mup_megatron.model.layers.spec import dense_layer, norm_of
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import ForwardMultipliers


class BertModel(bert_model.BertModel):
    """megatron-core's BertModel, which takes a block's spec and this project's attention."""

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        """The form of the padding mask. Upstream reads it from the spec of one layer, by the class of its attention,
        and takes every class but its own for Transformer Engine's.

        megatron-core's attention takes [b, 1, s, s]. torch's takes [b, 1, 1, s]: in the other form a padded query would
        see no key at all.
        """
        layer = self.transformer_layer_spec.layer_specs[0].submodules
        core = layer.self_attention.submodules.core_attention
        return "b1ss" if issubclass(core, bert_model.MCoreDotProductAttention) else "b11s"


def build(
    config: Config, model: Model, vocabulary: int, forward: ForwardMultipliers, layout: Layout, part: Part
) -> BertModel:
    """A BertModel; see Architecture.build."""
    transformer_config = core_config(config, model, forward, layout, part.device)
    model, groups = part.kernels(model), part.groups
    arguments: dict[str, Any] = {} if groups is None else {"pg_collection": groups}
    built = BertModel(
        config=transformer_config,
        num_tokentypes=2 if model.bert_binary_head else 0,  # as upstream's pretrain_bert.py
        transformer_layer_spec=_spec(model, len(part.layers["encoder"]), forward.residual),
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        pre_process=part.first,
        post_process=part.last,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        add_binary_head=model.bert_binary_head,
        vp_stage=part.chunk,
        **arguments,
    )
    attach(built, model, forward)
    return built.to(part.device) if part.device.type == "cuda" else built


def _spec(model: Model, layers: int, residual_multiplier: float) -> TransformerBlockSubmodules:
    """The spec of the encoder: megatron-core's "local" one of BERT, with shims; its attention sees both directions."""
    layer = copy.deepcopy(bert_layer_local_spec)  # one object, which every BertModel of the process may be built from
    dense_layer(layer, model, residual_multiplier)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm_of(model))


def attach(built: BertModel, model: Model, forward: ForwardMultipliers) -> None:
    """Records and scales what no layer spec reaches: embedding, language-model head, readout, pooler, binary head.

    The linear layers of the language-model head and of the pooler are hidden. The binary head turns growing features
    into two logits: it is output-like, in the form without a multiplier.

    Args:
        built: the model, or a pipeline stage of it.
        model: the same as the config has it.
        forward: multipliers.
    """
    if built.pre_process:
        set_embedding_specs(built.embedding)
        scale_output(built.embedding, forward.embedding)
    if not built.post_process:
        return
    set_linear_specs(built.lm_head.dense)
    # Upstream chooses the norm's class when it is imported.
    norm = norm_of(model)
    built.lm_head.layer_norm = norm(built.config, model.hidden_size, eps=built.config.layernorm_epsilon)
    set_readout_spec(built.output_layer, tied=built.share_embeddings_and_output_weights)
    scale_input(built.output_layer, forward.readout)
    if built.add_binary_head:
        set_linear_specs(built.pooler.dense)
        set_linear_specs(built.binary_head, fixed_fan_out="output_like")
