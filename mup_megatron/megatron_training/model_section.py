"""`model:` of a config from the TransformerConfig that a Megatron script built.

Public names: `model_section`, `check_translation`.
"""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from mup_megatron.config import Model
from mup_megatron.config.schema import PRESETS
from mup_megatron.megatron_training.built_alone import balances_by_quantiles
from mup_megatron.megatron_training.options import Settings, known
from mup_megatron.model.transformer_config import ACTIVATIONS, YARN
from mup_megatron.util.errors import UserError

_LATENT_YARN = tuple(name for name in YARN if name != "correction_range_round_to_int")


def model_section(args: Namespace, given: Mapping[str, Any], settings: Settings, vocab_size: int) -> dict[str, Any]:
    """`model:`; what is a default there is left out.

    Args:
        args: Megatron's, checked.
        given: what GPTModel is constructed with, by parameter name.
        settings: what the options of µP name.
        vocab_size: entries of the tokenizer, before padding.

    Raises:
        UserError: the model has something that no config here says.
    """
    if given["position_embedding_type"] == "relative":
        raise UserError(
            "--position-embedding-type relative: megatron-core's GPTModel makes no bias for it, and would be trained "
            "without any positions; expected learned_absolute, rope, yarn or none here, or a config for mup-megatron "
            "train, whose model has the bias"
        )
    fields = {**_of_every_model(args, given, settings, vocab_size), **_of_some(args, given, settings)}
    if fields.get("moe_router_load_balancing_type") == "none":
        fields.pop("moe_aux_loss_coeff", None)  # of a loss that there is not
    architecture = max(PRESETS, key=lambda name: sum(fields[key] == value for key, value in PRESETS[name].items()))
    return {"architecture": architecture, **fields}


def _of_every_model(args: Namespace, given: Mapping[str, Any], settings: Settings, vocab_size: int) -> dict[str, Any]:
    config = given["config"]
    activation = [name for name, function in ACTIVATIONS.items() if _same(function, config.activation_func)]
    if not activation:
        raise UserError(
            f"activation {config.activation_func}: not known here; expected one of {', '.join(ACTIVATIONS)}"
        )
    # Latent attention reads its config, and 0.19 hands GPTModel the defaults of these two beside such a config.
    rotary = vars(config) if config.multi_latent_attention else given
    return {
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


def _of_some(args: Namespace, given: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """What only some models have, where it is no default."""
    config = given["config"]
    fields: dict[str, Any] = {}
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
    return fields


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
