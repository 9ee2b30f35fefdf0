"""A config of this project from what a Megatron script says: its arguments, and what it hands to GPTModel.

Public names: `config_of`, `check_translation`, `stages_of`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mup_megatron.config import Config, Model, parse_config
from mup_megatron.config.schema import PRESETS
from mup_megatron.megatron_training.built_alone import balances_by_quantiles
from mup_megatron.megatron_training.options import Settings, known
from mup_megatron.model.as_built.base_sizes import query_groups
from mup_megatron.model.as_built.hybrid import PATTERN, check_repeated, hybrid_stages
from mup_megatron.model.transformer_config import ACTIVATIONS, YARN
from mup_megatron.parallel.stages import Stages
from mup_megatron.util.errors import UserError

SOURCE = "Megatron's options"
# The tokenizers of Megatron's options by the names of this project's configs.
_TOKENIZERS = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "TikTokenizer": "tiktoken",
}
_LATENT_YARN = tuple(name for name in YARN if name != "correction_range_round_to_int")


def config_of(
    args: Namespace,
    given: Mapping[str, Any],
    settings: Settings,
    vocab_size: int,
    without_norms: Sequence[str] = (),
) -> Config:
    """The config of a run of megatron.training.

    Args:
        args: Megatron's, checked.
        given: what GPTModel is constructed with, by parameter name.
        settings: what the options of µP name.
        vocab_size: entries of the tokenizer, before padding.
        without_norms: what the script's layer spec leaves out (`layers.given.norms_left_out`).

    Raises:
        UserError: the model has something that no shim knows, or sizes contradict the base's.
    """
    data = {
        "run": {"name": "megatron.training", "dir": args.save or ".", "seed": args.seed},
        "model": {**_model(args, given, settings, vocab_size), "without_norms": list(without_norms)},
        "base": _base(args, given["config"], settings),
        "parametrization": settings.parametrization,
        "hparams": {
            "lr": float(args.lr),
            "init_method_std": float(args.init_method_std),
            "embedding_init_method_std": args.embedding_init_method_std,
            # Megatron multiplies what its schedule of weight decay says with each group's multiplier.
            "weight_decay": float(args.weight_decay if _constant_decay(args) else args.end_weight_decay),
            **settings.hparams,
        },
        "training": _training(args),
        "optimizer": _optimizer(args),
        "parallel": _parallel(args, given["config"]),
        "data": {
            "data_path": list(args.data_path or ["mock"]),
            # Upstream takes the numbers, whatever stands between them: its own examples have quotes around them.
            "split": ",".join(re.findall(r"[.0-9]+", args.split or "")) or args.split or "98,2,0",
            "tokenizer": {
                "library": _TOKENIZERS.get(args.tokenizer_type, "null"),
                "path": args.tokenizer_model,
                "vocab_size": vocab_size,
            },
        },
    }
    if settings.parametrization.get("scaling") == "unit":
        raise UserError(
            "parametrization.scaling: unit is not known of a model that a script or a recipe trains; expected none"
        )
    config = parse_config(data, SOURCE)
    if config.parametrization.has_horizon_rule:
        raise UserError(
            "parametrization: the rules over batch and tokens take the trials' own from tuning:, which a run of "
            "megatron.training has not; expected batch: none, tokens: none and another weight_decay than timescale, "
            "and the rate for this batch and length as --lr"
        )
    if PATTERN not in given and getattr(given["config"], "is_hybrid_model", False):
        raise UserError(
            "--hybrid-layer-pattern: the script builds a GPTModel, which has no pattern; expected a script that builds "
            "a HybridModel, or none"
        )
    if PATTERN in given and (base := config.base.num_layers):
        check_repeated(given[PATTERN], base)
    depth = config.base.num_layers or config.model.num_layers
    if hasattr(given["config"], "per_block_parameters") and depth != config.model.num_layers:
        raise UserError(
            f"--heterogeneous-layers-config-path: its layers are {config.model.num_layers}, and no key says which "
            f"of them a base of {depth} has; expected base.num_layers: {config.model.num_layers}, or none"
        )
    if given["config"].apply_residual_connection_post_layernorm and config.parametrization.depth != "none":
        raise UserError(
            "--apply-residual-connection-post-layernorm: no depth rule is known where the residual stream goes on "
            "behind a norm; expected none, or parametrization.depth: none"
        )
    return config


def _model(args: Namespace, given: Mapping[str, Any], settings: Settings, vocab_size: int) -> dict[str, Any]:
    """`model:` from the TransformerConfig that the script built; what is a default there is left out."""
    config = given["config"]
    activation = [name for name, function in ACTIVATIONS.items() if _same(function, config.activation_func)]
    if not activation:
        raise UserError(
            f"activation {config.activation_func}: not known here; expected one of {', '.join(ACTIVATIONS)}"
        )
    if given["position_embedding_type"] == "relative":
        raise UserError(
            "--position-embedding-type relative: megatron-core's GPTModel makes no bias for it, and would be trained "
            "without any positions; expected learned_absolute, rope, yarn or none here, or a config for mup-megatron "
            "train, whose model has the bias"
        )
    # Latent attention reads its config, and 0.19 hands GPTModel the defaults of these two beside such a config.
    rotary = vars(config) if config.multi_latent_attention else given
    fields = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": _size("ffn_hidden_size", 4 * config.hidden_size, config, settings),
        "num_query_groups": config.num_query_groups
        if args.group_query_attention or config.num_query_groups != config.num_attention_heads
        else None,
        "kv_channels": _size("kv_channels", config.hidden_size // config.num_attention_heads, config, settings),
        "max_position_embeddings": _unless(given["max_sequence_length"], args.seq_length),
        "make_vocab_size_divisible_by": _vocabulary_multiple(args, vocab_size, given["vocab_size"]),
        "share_embeddings_and_output_weights": given["share_embeddings_and_output_weights"],
        "normalization": config.normalization,
        "layernorm_epsilon": float(config.layernorm_epsilon),
        "activation_func": activation[0],
        "gated_linear_unit": config.gated_linear_unit,
        "position_embedding_type": given["position_embedding_type"],
        "rotary_base": int(rotary["rotary_base"]),
        "rotary_percent": float(rotary["rotary_percent"]),
        "add_bias_linear": config.add_bias_linear,
        # Biases everywhere are biases there too, whatever this says.
        "add_qkv_bias": config.add_qkv_bias and not config.add_bias_linear,
        "hidden_dropout": float(config.hidden_dropout),
        "attention_dropout": float(config.attention_dropout),
        "qk_layernorm": config.qk_layernorm,
        "softmax_type": config.softmax_type,
        "transformer_impl": args.transformer_impl,
        "core_attention": "megatron"
        if args.transformer_impl == "local" and args.context_parallel_size == 1
        else "auto",
    }
    optional = [
        "layernorm_zero_centered_gamma",
        "mtp_num_layers",
        *(["mtp_loss_scaling_factor"] if config.mtp_num_layers else []),
    ]
    optional += ["glu_linear_offset", "activation_func_clamp_value"] if config.gated_linear_unit else []
    if config.num_moe_experts is not None:
        optional += ["num_moe_experts", *(name for name in Model.model_fields if name.startswith("moe_"))]
        optional.remove("moe_ffn_hidden_size")
        fields["moe_ffn_hidden_size"] = _size("moe_ffn_hidden_size", config.ffn_hidden_size, config, settings)
    if config.multi_latent_attention:
        optional += ["multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"]
        optional += ["v_head_dim", "rope_type", *(_LATENT_YARN if config.rope_type == "yarn" else ())]
        fields["num_query_groups"] = fields["kv_channels"] = None
    else:
        optional += ["qk_l2_norm", "attention_output_gate"]
        if given.get("rope_scaling"):
            fields |= {"rope_scaling": True, "rope_scaling_factor": float(given["rope_scaling_factor"])}
        if given["position_embedding_type"] == "yarn":
            fields |= _yarn(config)
    for name in optional:
        value = getattr(config, name, None)
        if (name, value) == ("moe_token_dispatcher_type", "flex"):
            value = "alltoall"  # which sends the same tokens, and does not need the kernels of some GPUs
        if name == "moe_grouped_gemm" and args.transformer_impl == "local":
            value = False  # local layers have no such product, and upstream takes experts one by one
        if name == "moe_router_load_balancing_type" and balances_by_quantiles(config):
            value = "none"  # no auxiliary loss; such a model is parametrised as it is built
        if value != Model.model_fields[name].default:
            fields[name] = value
    if fields.get("moe_router_load_balancing_type") == "none":
        fields.pop("moe_aux_loss_coeff", None)  # of a loss that there is not
    architecture = max(PRESETS, key=lambda name: sum(fields[key] == value for key, value in PRESETS[name].items()))
    return {"architecture": architecture, **fields}


def _yarn(config: Any) -> dict[str, Any]:
    """What a config says of YaRN outside multi-latent attention.

    Where one mscale is unsaid, upstream's factor is that of the defaults, 1 and 0 (`_yarn_get_concentration_factor`).
    """
    said = {name: getattr(config, f"yarn_{name}") for name in YARN}
    if None in (said["mscale"], said["mscale_all_dim"]):
        del said["mscale"], said["mscale_all_dim"]
    return said


def _vocabulary_multiple(args: Namespace, vocab_size: int, rows: int) -> int:
    """What the vocabulary is padded to a multiple of, here without a factor of the layout.

    Args:
        args: Megatron's, which pads to `--make-vocab-size-divisible-by` times the tensor-parallel size.
        vocab_size: entries of the tokenizer.
        rows: of the embedding that Megatron builds; `--padded-vocab-size` says any number.

    Raises:
        UserError: there are fewer rows than entries.
    """
    if rows < vocab_size:
        raise UserError(f"--padded-vocab-size {rows}: the tokenizer has {vocab_size} entries; expected no fewer rows")
    multiple = args.make_vocab_size_divisible_by
    for candidate in (multiple, multiple * args.tensor_model_parallel_size):
        if -(-vocab_size // candidate) * candidate == rows:
            return int(candidate)
    return rows


def check_translation(theirs: Any, ours: Any) -> None:
    """Whether the model that the script builds is the one that its options were read as.

    Args:
        theirs: the TransformerConfig that upstream, or the script, made.
        ours: the one that this project makes of the translated config.

    Raises:
        UserError: names a field that differs.
    """
    # Biases everywhere are biases of QKV too, whatever is said; MLA has no such sizes, its plain RoPE no such factors.
    unread = {"add_qkv_bias"}
    if theirs.multi_latent_attention:
        unread |= {"kv_channels", "num_query_groups", *(() if theirs.rope_type == "yarn" else _LATENT_YARN)}
    if getattr(theirs, "moe_token_dispatcher_type", None) == "flex":
        unread.add("moe_token_dispatcher_type")
    if balances_by_quantiles(theirs):
        unread.add("moe_router_load_balancing_type")
    if ours.moe_router_load_balancing_type == "none":
        unread.add("moe_aux_loss_coeff")
    for field in dataclasses.fields(ours):
        name = field.name
        rule = known().rule(name)
        if rule is None or (rule.kind, rule.why) != ("translated", "model") or name in unread:
            continue
        value, read = getattr(theirs, name, None), getattr(ours, name)
        if value != read and not (callable(value) and _same(read, value)):
            raise UserError(
                f"TransformerConfig.{name}: {value} in the model that the script builds, {read} by its options; "
                "expected one of them, or an option that says so"
            )


def stages_of(given: Mapping[str, Any]) -> Stages:
    """Where upstream puts the decoder's layers: per pipeline stage, per chunk of it.

    Args:
        given: what the model is constructed with, by parameter name.
    """
    config = given["config"]
    if PATTERN in given:
        return hybrid_stages(config, given[PATTERN])
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages, virtual = range(config.pipeline_model_parallel_size), config.virtual_pipeline_model_parallel_size
    chunks = [None] if virtual is None else list(range(virtual))
    if config.pipeline_model_parallel_layout is None:
        places = [
            [
                (get_transformer_layer_offset(config, chunk, stage), get_num_layers_to_build(config, chunk, stage))
                for chunk in chunks
            ]
            for stage in stages
        ]
    else:  # counted here, for its own methods know no chunks before process groups are there
        kinds = config.pipeline_model_parallel_layout.layout
        places, first = [[] for _ in stages], 0
        for chunk in range(len(chunks)):
            for stage in stages:
                count = sum(kind is LayerType.decoder for kind in kinds[stage][chunk])
                places[stage].append((first, count))
                first += count
    return tuple(tuple(range(first, first + count) for first, count in stage) for stage in places)


def _unless(value: int, default: int) -> int | None:
    """A value as a config has it that does not name its defaults."""
    return None if value == default else value


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two activations are one; megatron-core writes some of its own.

    A fused activation is called as it was written: compiling it would take seconds, and a C++ compiler on a CPU.
    """
    x = torch.linspace(-3, 3, 13)
    return torch.equal(inspect.unwrap(ours)(x), inspect.unwrap(theirs)(x))


def _size(name: str, derived: int, config: Any, settings: Settings) -> int | None:
    """A size as a config has it: None where it was not typed and is what upstream derives, which grows with others."""
    found = getattr(config, name)
    return None if name not in settings.sizes and found == derived else int(found)


def _base(args: Namespace, config: Any, settings: Settings) -> dict[str, Any]:
    """The base's sizes: those that were named, and those that Megatron derives there too.

    They are the FFN size of a gated model, and key/value heads that a file of layers says as a share of the heads.

    Raises:
        UserError: the base is too small for Megatron to derive one.
    """
    base = dict(settings.base)
    untyped = "ffn_hidden_size" not in settings.sizes and config.ffn_hidden_size == args.ffn_hidden_size
    named = "ffn_hidden_size" in base or "file" in base
    if untyped and config.gated_linear_unit and "hidden_size" in base and not named:
        derived = int((4 * base["hidden_size"] * 2 / 3) / 64) * 64  # as validate_args does
        if not derived:
            raise UserError(
                f"--ffn-hidden-size: not given, so Megatron makes it {config.ffn_hidden_size} of --hidden-size, and 0 "
                f"of the base's {base['hidden_size']}; expected it given, or ffn_hidden_size among the base sizes"
            )
        base["ffn_hidden_size"] = derived
    if "num_attention_heads" in base and "num_query_groups" not in base:
        groups = query_groups(config, settings.base_sizes, base["num_attention_heads"])
        base |= {} if groups is None else {"num_query_groups": groups}
    return base


def _training(args: Namespace) -> dict[str, Any]:
    batch = args.global_batch_size
    schedule = getattr(args, "step_batch_size_schedule", None)  # such as 0:384 200B:768
    if schedule:  # then upstream's global_batch_size is only the least that the processes can share
        batch = max(int(step.rpartition(":")[2]) for step in schedule.replace(",", " ").split())
    steps = args.train_iters or math.ceil((args.train_samples or batch) / batch)
    decay = args.lr_decay_iters or _updates(args.lr_decay_samples, batch)
    return {
        "global_batch_size": batch,
        "micro_batch_size": args.micro_batch_size,
        "seq_length": args.seq_length,
        "train_steps": steps,
        "lr_schedule": args.lr_decay_style,
        "lr_warmup_init": float(args.lr_warmup_init),
        "lr_warmup_steps": min(_warmup_steps(args, batch, steps), (decay or steps) - 1),
        "lr_decay_steps": decay,
        "lr_wsd_decay_steps": args.lr_wsd_decay_iters or _updates(args.lr_wsd_decay_samples, batch),
        "lr_wsd_decay_style": args.lr_wsd_decay_style,
        "min_lr_ratio": float(args.min_lr / args.lr),
        "clip_grad": float(args.clip_grad),
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }


def _constant_decay(args: Namespace) -> bool:
    return bool(args.weight_decay_incr_style == "constant")


def _updates(samples: int | None, batch: int) -> int | None:
    return None if samples is None else max(1, samples // batch)


def _warmup_steps(args: Namespace, batch: int, steps: int) -> int:
    if args.lr_warmup_fraction is not None:
        return int(args.lr_warmup_fraction * (args.lr_decay_iters or steps))
    return int(args.lr_warmup_iters or (args.lr_warmup_samples or 0) // batch)


def _optimizer(args: Namespace) -> dict[str, Any]:
    decoupled = {name: getattr(args, name) for name in ("decoupled_lr", "decoupled_min_lr")}
    # --no-weight-decay-cond-type has become this one by now, or is refused by upstream.
    decoupled["apply_wd_to_qk_layernorm"] = bool(args.apply_wd_to_qk_layernorm)
    if args.optimizer == "lion":
        decoupled |= {"name": "lion"}  # upstream gives it Adam's betas and does not read --lion-beta1 here
    if args.optimizer == "muon":
        decoupled |= {"name": "muon", "momentum": float(args.muon_momentum)}
    if args.optimizer == "sgd":
        return {"name": "sgd", "momentum": float(args.sgd_momentum), **decoupled}
    return {
        "name": "adamw" if getattr(args, "decoupled_weight_decay", True) else "adam",
        **decoupled,
        "betas": [float(args.adam_beta1), float(args.adam_beta2)],
        "eps": float(args.adam_eps),
    }


def _parallel(args: Namespace, config: Any) -> dict[str, Any]:
    stages = args.pipeline_model_parallel_size > 1
    return {
        "engine": "megatron",
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size if stages else None,
        "microbatch_group_size_per_virtual_pipeline_stage": config.microbatch_group_size_per_vp_stage
        if stages and config.virtual_pipeline_model_parallel_size
        else None,
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage if stages else None,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage if stages else None,
        "use_tp_pp_dp_mapping": bool(args.use_tp_pp_dp_mapping),
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size if args.num_experts else None,
        "context_parallel_size": args.context_parallel_size,
        "sequence_parallel": bool(args.sequence_parallel),
        "use_distributed_optimizer": bool(args.use_distributed_optimizer),
        "use_torch_fsdp2": bool(args.use_torch_fsdp2),
    }
