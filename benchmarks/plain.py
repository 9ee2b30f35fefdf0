"""Plain megatron-core in the standard parametrization: what ours is compared with, by benchmarks and by tests.

Upstream's GPTModel, BertModel or T5Model and local layer specs, nothing of this project in it but a config's sizes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.transformer_config import TransformerConfig

from mup_megatron.config import Config
from mup_megatron.model.transformer_config import ACTIVATIONS, expert_settings, has_fused_softmax
from mup_megatron.parallel.layout import Layout


def plain_model(config: Config, vocab_size: int, layout: Layout, device: torch.device, **more: Any) -> GPTModel:
    """The config's sizes as upstream builds them; `vocab_size` is before padding, `more` goes to TransformerConfig."""
    sizes = config.model
    model = GPTModel(
        config=plain_config(config, layout, device, **more),
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=sizes.num_moe_experts, normalization=sizes.normalization
        ),
        **_of_language_model(config, vocab_size),
    )
    return model.to(device)


def plain_bert(config: Config, vocab_size: int, layout: Layout, device: torch.device) -> BertModel:
    """The same of upstream's BertModel and its own layer spec; `vocab_size` is before the mask and padding."""
    sizes = config.model
    model = BertModel(
        config=plain_config(config, layout, device),
        num_tokentypes=2 if sizes.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        add_binary_head=sizes.bert_binary_head,
        **_of_language_model(config, vocab_size),
    )
    return model.to(device)


def plain_t5(config: Config, vocab_size: int, layout: Layout, device: torch.device, **more: Any) -> T5Model:
    """The same of an encoder-decoder, with a norm after each stack.

    Upstream's local specs leave that norm out where Transformer Engine is not installed: they name its class alone.
    """
    decoder = plain_config(config, layout, device, **more)
    encoder = copy.deepcopy(decoder)  # as pretrain_t5.py does
    encoder.num_layers = config.model.encoder_num_layers or config.model.num_layers
    specs = {
        "transformer_encoder_layer_spec": t5_spec.get_t5_encoder_with_local_block_spec(encoder.num_layers),
        "transformer_decoder_layer_spec": t5_spec.get_t5_decoder_with_local_block_spec(decoder.num_layers),
    }
    for spec in specs.values():
        spec.layer_norm = t5_spec.LNImpl
    model = T5Model(config=decoder, encoder_config=encoder, **specs, **_of_language_model(config, vocab_size))
    return model.to(device)


def plain_config(config: Config, layout: Layout, device: torch.device, **more: Any) -> TransformerConfig:
    """Upstream's own config of the sizes; `more` goes to it as it is."""
    sizes = config.model
    on_gpu = device.type == "cuda"
    bf16 = config.training.precision == "bf16"
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.query_groups,
        kv_channels=sizes.head_size,
        normalization=sizes.normalization,
        activation_func=ACTIVATIONS[sizes.activation_func],
        gated_linear_unit=sizes.gated_linear_unit,
        add_bias_linear=sizes.add_bias_linear,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not on_gpu,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        masked_softmax_fusion=on_gpu and has_fused_softmax(),
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        tensor_model_parallel_size=layout.tensor,
        **expert_settings(sizes),
        **more,
    )


def _of_language_model(config: Config, vocab_size: int) -> dict[str, Any]:
    sizes = config.model
    return {
        "vocab_size": sizes.padded_vocab_size(vocab_size),
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": sizes.share_embeddings_and_output_weights,
        "position_embedding_type": sizes.position_embedding_type,
    }


def plain_groups(model: torch.nn.Module, config: Config) -> list[dict[str, Any]]:
    """As Megatron groups: biases and one-dimensional tensors are not decayed."""
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith(".bias")]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or name.endswith(".bias")]
    return [{"params": decayed, "weight_decay": config.hparams.weight_decay}, {"params": others, "weight_decay": 0.0}]
