"""A config of this project from what a Megatron script says: its arguments, and what it hands to GPTModel.

Public names: `config_of`, `stages_of`. model_section.py makes `model:`.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from mup_megatron.config import Config, parse_config
from mup_megatron.megatron_training.model_section import model_section
from mup_megatron.megatron_training.options import Settings
from mup_megatron.model.as_built.base_sizes import query_groups
from mup_megatron.model.as_built.hybrid import PATTERN, check_repeated, hybrid_stages
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
        "model": {**model_section(args, given, settings, vocab_size), "without_norms": list(without_norms)},
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
    _check(config, given)
    return config


def _check(config: Config, given: Mapping[str, Any]) -> None:
    """Whether the rules that are chosen are known of such a run, and of the model that it builds. Raises UserError."""
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
