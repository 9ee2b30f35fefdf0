"""What is not supported with megatron-core's BertModel, refused by name. Public name: `CHECKS`."""

from __future__ import annotations

from mup_megatron.config.model_checks import non_default
from mup_megatron.config.schema import Config, Model
from mup_megatron.util.errors import shown

_TESTED = {
    *("architecture", "ffn_hidden_size", "num_query_groups", "kv_channels", "max_position_embeddings", "vocab_size"),
    *("make_vocab_size_divisible_by", "layernorm_epsilon", "rotary_percent", "hidden_dropout", "attention_dropout"),
    *("bert_binary_head", *Model.PLAIN_KERNELS),
}
"""Keys with a default that may be given; the others keep their default."""

_SHORTEST_PAIR = 5
"""Tokens of two segments of one token, and three separators."""


def _check_other_models(config: Config) -> None:
    if config.model.family != "bert" and config.model.bert_binary_head:
        raise config.error("model.bert_binary_head", "belongs to BERT; expected model.architecture: bert, or false")


def _check_model(config: Config) -> None:
    model = config.model
    if model.family != "bert":
        return
    for name in non_default(model):
        if name not in _TESTED:
            default = type(model).model_fields[name].default
            raise config.error(f"model.{name}", f"is not supported with architecture: bert; expected {shown(default)}")
    if model.position_embedding_type not in ("learned_absolute", "rope"):
        raise config.error(
            "model.position_embedding_type",
            f"megatron-core's BertModel has no {model.position_embedding_type}; expected learned_absolute or rope",
        )
    for name in ("transformer_impl", "core_attention", "norm_implementation"):
        if getattr(model, name) == "transformer_engine":
            default = type(model).model_fields[name].default
            raise config.error(
                f"model.{name}", f"transformer_engine is not supported with architecture: bert; expected {default}"
            )


def _check_run(config: Config) -> None:
    parallel = config.parallel
    if config.model.family != "bert":
        return
    if parallel.context_parallel_size != 1:
        raise config.error(
            "parallel.context_parallel_size",
            "the sequence is split so that causal attention is shared evenly, and attention of architecture: bert sees "
            "both directions; expected 1",
        )
    for name in ("use_torch_fsdp2", "pipeline_model_parallel_layout"):
        if getattr(parallel, name):
            raise config.error(f"parallel.{name}", "is not supported with architecture: bert; remove the key")
    if config.optimizer.name in ("muon", "lion", "soap"):
        raise config.error(
            "optimizer.name",
            f"{config.optimizer.name} is not supported with architecture: bert; expected adamw, adam or sgd",
        )
    if config.model.bert_binary_head and config.training.seq_length < _SHORTEST_PAIR:
        raise config.error(
            "training.seq_length",
            f"{config.training.seq_length} has no room for two segments and three separators; expected "
            f"{_SHORTEST_PAIR} or more",
        )


CHECKS = (_check_other_models, _check_model, _check_run)
"""In this order; each takes a config and raises ConfigError."""
