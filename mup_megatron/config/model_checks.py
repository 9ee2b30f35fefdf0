"""What must hold between the keys of `model:`: sizes, attention, experts, norms.

Public names: `CHECKS`, `non_default`.
"""

from __future__ import annotations

from mup_megatron.config.schema import Config, Model
from mup_megatron.util.errors import shown

_MOST_EXPERTS = 200_000

_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

_YARN_KEYS = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def non_default(model: Model) -> list[str]:
    """Keys of the model that say something else than their default (a dumped config names them all)."""
    fields = type(model).model_fields
    return [name for name, field in fields.items() if not field.is_required() and getattr(model, name) != field.default]


def _check_attention(config: Config) -> None:
    """What belongs to attention of any kind."""
    model, given = config.model, non_default(config.model)
    if model.rope_scaling and (model.multi_latent_attention or model.position_embedding_type != "rope"):
        raise config.error("model.rope_scaling", "needs position_embedding_type: rope, and no multi-latent attention")
    if "rope_scaling_factor" in given and not model.rope_scaling:
        raise config.error("model.rope_scaling_factor", "belongs to rope_scaling; expected model.rope_scaling: true")
    if "correction_range_round_to_int" in given and model.position_embedding_type != "yarn":
        raise config.error(
            "model.correction_range_round_to_int", "belongs to YaRN; expected model.position_embedding_type: yarn"
        )
    if model.qk_l2_norm and model.qk_layernorm:
        raise config.error("model.qk_l2_norm", "queries and keys have a norm already (model.qk_layernorm)")
    if model.softmax_type != "vanilla" and model.core_attention == "sdpa":
        raise config.error(
            "model.core_attention",
            f"torch's attention has no softmax of type {model.softmax_type}; expected megatron, transformer_engine or "
            "auto",
        )
    if model.attention_output_gate and config.optimizer.name == "muon":
        raise config.error(
            "model.attention_output_gate",
            "megatron-core's Muon splits the fused QKV into three, and with gates it has four parts; expected false, "
            "or optimizer.name: adamw",
        )


def _check_position_bias(config: Config) -> None:
    """What belongs to positions that are a bias on attention logits."""
    model, given = config.model, non_default(config.model)
    if not model.biases_attention and config.hparams.relative_bias_multiplier != 1.0:
        raise config.error(
            "hparams.relative_bias_multiplier",
            "belongs to a bias on attention logits; expected model.position_embedding_type: relative or alibi",
        )
    for name in ("relative_attention_num_buckets", "relative_attention_max_distance"):
        if name in given and model.position_embedding_type != "relative":
            raise config.error(f"model.{name}", "expected with model.position_embedding_type: relative alone")
    if model.relative_attention_max_distance <= model.relative_attention_num_buckets // 2:
        raise config.error(
            "model.relative_attention_max_distance",
            f"{model.relative_attention_max_distance} is no more than the {model.relative_attention_num_buckets // 2} "
            "distances that have a bucket of their own (half of model.relative_attention_num_buckets); expected more",
        )
    if model.biases_attention and model.core_attention == "transformer_engine":
        raise config.error(
            "model.core_attention",
            f"positions {model.position_embedding_type} were not run with Transformer Engine's attention; expected "
            "sdpa, megatron or auto",
        )
    if model.position_embedding_type == "relative" and (config.parallel.virtual_pipeline_model_parallel_size or 1) > 1:
        raise config.error(
            "parallel.virtual_pipeline_model_parallel_size",
            "each chunk of a stage would hold a table of relative positions of its own under one name; expected 1, or "
            "model.position_embedding_type: alibi",
        )


def _check_gated_unit(config: Config) -> None:
    model, given = config.model, non_default(config.model)
    for name in ("glu_linear_offset", "activation_func_clamp_value"):
        if name in given and not model.gated_linear_unit:
            raise config.error(f"model.{name}", "belongs to a gated unit; expected model.gated_linear_unit: true")


def _grown(config: Config) -> list[tuple[str, str]]:
    """(section, key) of every size that is declared to grow."""
    return [(section, name) for section in ("base", "proxy") for name in getattr(config, section).sizes]


def _check_latent_attention(config: Config) -> None:
    model, given = config.model, non_default(config.model)
    if not model.multi_latent_attention:
        yarn = () if model.position_embedding_type == "yarn" else _YARN_KEYS
        named = [f"model.{name}" for name in (*_LATENT_SIZES, "rope_type", *yarn) if name in given]
        named += [f"{section}.{name}" for section, name in _grown(config) if name in _LATENT_SIZES]
        if named:
            raise config.error(
                named[0], "belongs to multi-latent attention; expected model.multi_latent_attention: true"
            )
        return
    for name in _LATENT_SIZES[1:]:
        if getattr(model, name) is None:
            raise config.error(f"model.{name}", "missing; multi-latent attention needs it")
    for name in ("num_query_groups", "kv_channels"):
        if getattr(model, name) is not None:
            raise config.error(f"model.{name}", "multi-latent attention has no such size; remove the key")
    for section, name in _grown(config):
        if name in ("num_query_groups", "kv_channels"):
            raise config.error(f"{section}.{name}", "multi-latent attention has no such size; remove the key")
        if name == "q_lora_rank" and model.q_lora_rank is None:
            raise config.error(f"{section}.{name}", "the model compresses no queries; expected model.q_lora_rank set")
    if model.position_embedding_type not in ("rope", "learned_absolute"):
        raise config.error(
            "model.position_embedding_type",
            f"{model.position_embedding_type} under multi-latent attention, which carries rotary positions of its own; "
            "expected rope, or learned_absolute for positions in the embedding too",
        )
    for name, what in (("add_qkv_bias", "bias"), ("qk_l2_norm", "norm"), ("attention_output_gate", "gate")):
        if getattr(model, name):
            raise config.error(f"model.{name}", f"multi-latent attention has no such {what}; expected false")
    if model.rope_type != "yarn" and (named := [name for name in _YARN_KEYS if name in given]):
        raise config.error(f"model.{named[0]}", "belongs to YaRN; expected model.rope_type: yarn")
    for section, sizes in (("model", model), ("base", config.base), ("proxy", config.proxy)):
        if (sizes.qk_pos_emb_head_dim or 0) % 2:
            raise config.error(
                f"{section}.qk_pos_emb_head_dim", f"{sizes.qk_pos_emb_head_dim} is odd; RoPE needs an even size"
            )


def _check_heads(config: Config) -> None:
    models = {"model": config.model, "base": config.model.resized(config.base.width)}
    models["proxy"] = config.proxy_model
    for section, model in models.items():
        if model.multi_latent_attention:
            continue
        if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
            raise config.error(
                f"{section}.hidden_size",
                f"{model.hidden_size} is not divisible by num_attention_heads {model.num_attention_heads}; "
                "expected a multiple of it, or model.kv_channels set",
            )
        if model.num_attention_heads % model.query_groups:
            raise config.error(
                f"{section}.num_query_groups",
                f"{model.query_groups} does not divide num_attention_heads {model.num_attention_heads}",
            )
        if model.position_embedding_type in ("rope", "yarn") and model.head_size % 2:
            raise config.error(f"{section}.kv_channels", f"head size {model.head_size} is odd; RoPE needs an even one")


def _check_experts(config: Config) -> None:
    model, given = config.model, non_default(config.model)
    experts, topk = model.num_moe_experts, model.moe_router_topk
    if experts is None:
        named = [f"model.{name}" for name in given if name.startswith("moe_") and name not in model.PLAIN_KERNELS]
        named += ["model.moe_grouped_gemm"] if model.moe_grouped_gemm is True else []
        named += [f"{section}.{name}" for section, name in _grown(config) if name.startswith("moe_")]
        if named:
            raise config.error(named[0], "belongs to a mixture of experts; expected model.num_moe_experts set")
        return
    if config.model.num_layers * experts > _MOST_EXPERTS:
        raise config.error(
            "model.num_moe_experts",
            f"{experts} experts in {model.num_layers} layers are more than {_MOST_EXPERTS:,}, which nobody has listed "
            "tensor by tensor; expected fewer",
        )
    if model.moe_grouped_gemm is True and model.transformer_impl != "transformer_engine":
        raise config.error(
            "model.moe_grouped_gemm",
            "the grouped matrix product is Transformer Engine's; expected auto, or transformer_impl: "
            "transformer_engine",
        )
    if topk > experts:
        raise config.error(
            "model.moe_router_topk", f"{topk} experts per token of {experts}; expected at most {experts}"
        )
    plain = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if topk == 1 and plain and model.moe_router_load_balancing_type != "sinkhorn":  # whose single score is a sigmoid
        raise config.error(
            "model.moe_router_pre_softmax",
            "softmax over a single chosen expert is 1 and gives the router no gradient; expected true, or "
            "moe_router_score_function: sigmoid",
        )
    _check_expert_groups(config, experts, topk)
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        raise config.error(
            "model.moe_router_enable_expert_bias", "needs moe_router_score_function: sigmoid (megatron-core)"
        )
    if "moe_router_bias_update_rate" in given and not model.moe_router_enable_expert_bias:
        raise config.error("model.moe_router_bias_update_rate", "needs moe_router_enable_expert_bias: true")
    _check_balancing(config)
    _check_shared_experts(config)
    _check_expert_layers(config)


def _check_shared_experts(config: Config) -> None:
    model = config.model
    if model.moe_shared_expert_intermediate_size is None:
        named = [f"{section}.{name}" for section, name in _grown(config) if name.startswith("moe_shared")]
        named += ["model.moe_shared_expert_gate"] if model.moe_shared_expert_gate else []
        if named:
            raise config.error(named[0], "no shared experts; expected model.moe_shared_expert_intermediate_size set")
    elif model.add_bias_linear:
        raise config.error("model.add_bias_linear", "megatron-core's shared experts have no biases; expected false")


def _check_expert_layers(config: Config) -> None:
    model = config.model
    if not isinstance(model.moe_layer_freq, list):
        return
    if len(model.moe_layer_freq) != model.num_layers:
        raise config.error(
            "model.moe_layer_freq",
            f"{len(model.moe_layer_freq)} entries for {model.num_layers} layers; expected a 0 (dense) or 1 "
            "(experts) for each",
        )
    if not any(model.moe_layer_freq):
        raise config.error("model.moe_layer_freq", "no layer has experts; expected a 1, or no num_moe_experts")
    if config.parametrization.depth != "none" and config.num_layers_base != model.num_layers:
        raise config.error(
            "model.moe_layer_freq", "a list names the layers of one depth; expected a number where depth grows"
        )


def _check_balancing(config: Config) -> None:
    kinds, weights = config.model.moe_router_load_balancing_type, config.model.moe_aux_loss_coeff
    if isinstance(kinds, str) != isinstance(weights, float) or (
        isinstance(weights, list) and len(weights) != len(kinds)
    ):
        raise config.error(
            "model.moe_aux_loss_coeff",
            f"{shown(weights)} for moe_router_load_balancing_type {shown(kinds)}; expected one number for each loss",
        )
    for kind in ("none", "sinkhorn"):
        if kind in ([kinds] if isinstance(kinds, str) else kinds) and weights:
            raise config.error("model.moe_aux_loss_coeff", f"moe_router_load_balancing_type is {kind}; expected 0")


def _check_expert_groups(config: Config, experts: int, topk: int) -> None:
    model = config.model
    groups, per_token = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and per_token is None:
        return
    if groups is None or per_token is None:
        missing = "moe_router_num_groups" if groups is None else "moe_router_group_topk"
        raise config.error(f"model.{missing}", "missing; routing by groups needs their number and how many per token")
    if experts % groups:
        raise config.error("model.moe_router_num_groups", f"{groups} does not divide num_moe_experts {experts}")
    if per_token > groups:
        raise config.error("model.moe_router_group_topk", f"{per_token} groups per token of {groups}")
    if topk % per_token or topk // per_token > experts // groups:
        raise config.error(
            "model.moe_router_topk",
            f"{topk} experts per token cannot be taken in equal parts from {per_token} groups of {experts // groups}",
        )


def _check_multi_token_prediction(config: Config) -> None:
    model = config.model
    if model.mtp_num_layers is None:
        if "mtp_loss_scaling_factor" in non_default(model):
            raise config.error("model.mtp_loss_scaling_factor", "needs mtp_num_layers")
        return
    if model.mtp_num_layers >= config.training.seq_length:
        raise config.error(
            "model.mtp_num_layers",
            f"{model.mtp_num_layers} further tokens cannot be predicted within training.seq_length "
            f"{config.training.seq_length}",
        )


def _check_norms(config: Config) -> None:
    model = config.model
    if model.norm_gains == "none" and model.norm_implementation in ("apex", "transformer_engine"):
        raise config.error(
            "model.norm_implementation",
            f"{model.norm_implementation}'s norms have gains; expected torch, or norm_gains: trained",
        )


CHECKS = (
    _check_latent_attention,
    _check_heads,
    _check_attention,
    _check_position_bias,
    _check_gated_unit,
    _check_experts,
    _check_multi_token_prediction,
    _check_norms,
)
"""In this order; each takes a config and raises ConfigError."""
