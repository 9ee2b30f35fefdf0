"""Hugging Face's classes of models with an encoder: MegatronBert for BERT, Blenderbot for T5.

Public names: `encoder_of`. Both are pre-LN with a norm behind each stack, learned positions and biases everywhere,
which megatron-core's models are and the classes BertForMaskedLM (post-LN) and T5ForConditionalGeneration (RMSNorm,
relative positions, no biases) are not. transformers' `models/megatron_bert` and `models/blenderbot` (5.23) are what
config.json and names are written for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mup_megatron.config import Config, Model
from mup_megatron.convert.export.architecture import Architecture, Parts, common, refuse
from mup_megatron.convert.export.fold import FoldedWeights
from mup_megatron.convert.export.folder import Part
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization

_POSITIONS = "embedding.position_embeddings.weight"
_KINDS = ("weight", "bias")
_QKV = ("query", "key", "value")
_EPSILON = 1e-5
"""Of every norm of Blenderbot: the class takes torch's."""


def encoder_of(model: Model) -> Architecture:
    """The class for a model of family `bert` or `t5`."""
    if model.family == "t5":
        return BLENDERBOT
    return MEGATRON_BERT_PAIRS if model.bert_binary_head else MEGATRON_BERT


def _refuse(name: str, config: Config) -> None:
    """Raises ConfigError with the first key that a class does not compute."""
    model = config.model
    positions, heads = model.position_embedding_type, model.num_attention_heads
    epsilon = model.layernorm_epsilon
    strange = {
        "normalization": (model.normalization != "LayerNorm", model.normalization),
        "gated_linear_unit": (model.gated_linear_unit, "a gated MLP"),
        "position_embedding_type": (positions != "learned_absolute", f"positions {positions}"),
        "num_query_groups": (model.query_groups != heads, "key/value heads that several query heads share"),
        "kv_channels": (
            model.head_size * heads != model.hidden_size,
            "heads that together are not as wide as the hidden size",
        ),
        "layernorm_epsilon": (name == BLENDERBOT.name and epsilon != _EPSILON, f"norms with the epsilon {epsilon:g}"),
    }
    refuse(config, name, strange)


def _add_linear(parts: Parts, theirs: str, ours: str, size: int, *blocks: str) -> None:
    """A linear layer, or blocks of a fused one; the classes always have a bias."""
    parts.add(f"{theirs}.weight", f"{ours}.weight", *blocks)
    parts.add_or_zeros(f"{theirs}.bias", f"{ours}.bias", (size,), *blocks)


def _add_norm(parts: Parts, theirs: str, ours: str) -> None:
    for kind in _KINDS:
        parts.add(f"{theirs}.{kind}", f"{ours}.{kind}")


# --- BERT ---


def _bert_config(name: str, parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    return {
        **common(parametrization),
        "architectures": [name],
        "model_type": "megatron-bert",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": activation,
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": 2,
        "layer_norm_eps": model.layernorm_epsilon,
    }


def _bert_parts(weights: FoldedWeights, config: Config) -> list[Part]:
    model = config.model
    hidden = model.hidden_size
    parts = Parts(weights)
    parts.add("bert.embeddings.word_embeddings.weight", WORD_EMBEDDINGS)
    parts.add("bert.embeddings.position_embeddings.weight", _POSITIONS)
    types = "bert.embeddings.token_type_embeddings.weight"
    parts.add_or_zeros(types, "embedding.tokentype_embeddings.weight", (2, hidden))
    for layer in range(model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"bert.encoder.layer.{layer}"
        _add_norm(parts, f"{theirs}.attention.ln", f"{ours}.input_layernorm")
        for block in _QKV:
            qkv = f"{ours}.self_attention.linear_qkv"
            _add_linear(parts, f"{theirs}.attention.self.{block}", qkv, hidden, block)
        _add_linear(parts, f"{theirs}.attention.output.dense", f"{ours}.self_attention.linear_proj", hidden)
        _add_norm(parts, f"{theirs}.ln", f"{ours}.pre_mlp_layernorm")
        _add_linear(parts, f"{theirs}.intermediate.dense", f"{ours}.mlp.linear_fc1", model.ffn_size)
        _add_linear(parts, f"{theirs}.output.dense", f"{ours}.mlp.linear_fc2", hidden)
    _add_norm(parts, "bert.encoder.ln", "encoder.final_layernorm")
    head = "cls.predictions"
    _add_linear(parts, f"{head}.transform.dense", "lm_head.dense", hidden)
    _add_norm(parts, f"{head}.transform.LayerNorm", "lm_head.layer_norm")
    parts.add(f"{head}.bias", "output_layer.bias")
    if not model.share_embeddings_and_output_weights:
        _add_linear(parts, f"{head}.decoder", "output_layer", 0)
    if model.bert_binary_head:
        _add_linear(parts, "bert.pooler.dense", "pooler.dense", hidden)
        _add_linear(parts, "cls.seq_relationship", "binary_head", 2)
    return parts.made


# --- T5 ---


def _blenderbot_config(parametrization: Parametrization, activation: str) -> dict[str, Any]:
    config = parametrization.config
    model = config.model
    sizes = {"ffn_dim": model.ffn_size, "attention_heads": model.num_attention_heads}
    stacks = {
        f"{stack}_{name}": size
        for stack, layers in model.stacks.items()
        for name, size in ({"layers": layers} | sizes).items()
    }
    return {
        **common(parametrization),
        "architectures": [BLENDERBOT.name],
        "model_type": "blenderbot",
        "d_model": model.hidden_size,
        **stacks,
        "activation_function": activation,
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "activation_dropout": 0.0,
        "max_position_embeddings": config.max_position_embeddings,
        "scale_embedding": False,
        "encoder_no_repeat_ngram_size": 0,  # the class's own defaults are of a chat robot
        "forced_eos_token_id": None,
    }


def _blenderbot_parts(weights: FoldedWeights, config: Config) -> list[Part]:
    model = config.model
    hidden = model.hidden_size
    parts = Parts(weights)
    parts.add("model.shared.weight", WORD_EMBEDDINGS)
    for stack, layers in model.stacks.items():
        parts.add(f"model.{stack}.embed_positions.weight", _POSITIONS)  # one table here, two there
        for layer in range(layers):
            ours, theirs = f"{stack}.layers.{layer}", f"model.{stack}.layers.{layer}"
            _add_norm(parts, f"{theirs}.self_attn_layer_norm", f"{ours}.input_layernorm")
            _add_attention(parts, f"{theirs}.self_attn", f"{ours}.self_attention", hidden)
            if stack == "decoder":
                _add_norm(parts, f"{theirs}.encoder_attn_layer_norm", f"{ours}.pre_cross_attn_layernorm")
                _add_attention(parts, f"{theirs}.encoder_attn", f"{ours}.cross_attention", hidden)
            _add_norm(parts, f"{theirs}.final_layer_norm", f"{ours}.pre_mlp_layernorm")
            _add_linear(parts, f"{theirs}.fc1", f"{ours}.mlp.linear_fc1", model.ffn_size)
            _add_linear(parts, f"{theirs}.fc2", f"{ours}.mlp.linear_fc2", hidden)
        _add_norm(parts, f"model.{stack}.layer_norm", f"{stack}.final_layernorm")
    if model.share_embeddings_and_output_weights:
        parts.add_stacked("final_logits_bias", ["lm_head.output_layer.bias"])
    else:
        parts.add("lm_head.weight", "lm_head.output_layer.weight")
        for stack in model.stacks:  # where the head is not tied, transformers ties nothing
            parts.add(f"model.{stack}.embed_tokens.weight", WORD_EMBEDDINGS)
    return parts.made


def _add_attention(parts: Parts, theirs: str, ours: str, hidden: int) -> None:
    """Self-attention with one fused projection, or cross-attention with the query's apart."""
    fused = ours.endswith("self_attention")
    for block in _QKV:
        name = f"{theirs}.{block[0]}_proj"
        if fused:
            _add_linear(parts, name, f"{ours}.linear_qkv", hidden, block)
        elif block == "query":
            _add_linear(parts, name, f"{ours}.linear_q", hidden)
        else:
            _add_linear(parts, name, f"{ours}.linear_kv", hidden, block)
    _add_linear(parts, f"{theirs}.out_proj", f"{ours}.linear_proj", hidden)


def _remark_of_bert(activation: str) -> str | None:
    """The class has one activation; megatron-core's head has the exact GELU, whatever its kernels fuse in a layer."""
    if activation != "gelu_new":
        return None
    return (
        "warning: the layers were trained with GELU's tanh approximation, and the language-model head with the exact "
        "GELU; transformers takes the approximation for both, so logits differ in the fourth digit"
    )


def _of_bert(name: str) -> Architecture:
    return Architecture(
        name=name,
        config=partial(_bert_config, name),
        parts=_bert_parts,
        refuse=partial(_refuse, name),
        remark=_remark_of_bert,
    )


MEGATRON_BERT = _of_bert("MegatronBertForMaskedLM")
MEGATRON_BERT_PAIRS = _of_bert("MegatronBertForPreTraining")
BLENDERBOT = Architecture(
    name="BlenderbotForConditionalGeneration",
    config=_blenderbot_config,
    parts=_blenderbot_parts,
    refuse=partial(_refuse, "BlenderbotForConditionalGeneration"),
)
