"""The folded model for megatron-core itself: its own tensor names, its own options, its own checkpoints.

Public names: `plain_model`, `parts`, `megatron_options`, `save_release`. A plain model has gains of 1, no multi-token
prediction, and no multiplier anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mup_megatron.config import Config, Model, derive
from mup_megatron.convert.export.fold import EXPERT_BIAS, FoldedWeights
from mup_megatron.convert.export.folder import Part
from mup_megatron.model.build import dry_run, parametrize
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank

RELEASE = "release"
"""Megatron's name for a checkpoint that is weights alone: it begins at iteration 0 and asks for no optimizer."""

_PLAIN = {
    "layernorm_zero_centered_gamma": False,
    "norm_gains": "trained",
    "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1,
}


def plain_model(config: Config, vocabulary: int) -> dict[str, Any]:
    """The settings of the model that is written, in TransformerConfig's names.

    Args:
        config: of the checkpoint.
        vocabulary: rows of embedding and head.
    """
    found = config.model.model_dump(exclude={"architecture", "make_vocab_size_divisible_by", *Model.PLAIN_KERNELS})
    positions = {"vocab_size": vocabulary, "max_position_embeddings": config.max_position_embeddings}
    return {**found, **_PLAIN, **positions, "kv_channels": _head_size(config.model)}


def _head_size(model: Model) -> int | None:
    return None if model.multi_latent_attention else model.head_size


def parts(weights: FoldedWeights) -> list[Part]:
    """Every tensor under its global name."""

    def part(name: str) -> Part:
        dtype = torch.float32 if name.endswith(EXPERT_BIAS) else None  # as megatron-core keeps it
        return Part(name=name, shape=weights.shape(name), make=lambda: weights.read(name), dtype=dtype)

    return [part(name) for name in weights.specs]


def megatron_options(config: Config, *, fused: bool) -> list[str]:
    """What a plain run of megatron.training is told so that it builds this model, a line an option.

    Args:
        config: of the checkpoint.
        fused: whether it was trained with bias and activation in one kernel.

    Raises:
        ConfigError: Megatron has no option for a key of the model.
    """
    model = config.model
    _refuse_without_option(config)
    sizes = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_size,
        "num-attention-heads": model.num_attention_heads,
        "kv-channels": model.head_size,
        "max-position-embeddings": config.max_position_embeddings,
        "make-vocab-size-divisible-by": model.make_vocab_size_divisible_by,
        "normalization": model.normalization,
        "norm-epsilon": model.layernorm_epsilon,
        "position-embedding-type": model.position_embedding_type,
        "hidden-dropout": model.hidden_dropout,
        "attention-dropout": model.attention_dropout,
    }
    if model.position_embedding_type == "rope":
        sizes |= {"rotary-base": model.rotary_base, "rotary-percent": model.rotary_percent}
    if model.rope_scaling:
        sizes["rope-scaling-factor"] = model.rope_scaling_factor
    if model.query_groups != model.num_attention_heads:
        sizes["num-query-groups"] = model.query_groups
    flags = {
        "group-query-attention": model.query_groups != model.num_attention_heads,
        "use-rope-scaling": model.rope_scaling,
        "untie-embeddings-and-output-weights": not model.share_embeddings_and_output_weights,
        "disable-bias-linear": not model.add_bias_linear,
        "add-qkv-bias": model.add_qkv_bias,
        "qk-layernorm": model.qk_layernorm,
        "swiglu": model.gated_linear_unit,
        "squared-relu": model.activation_func == "squared_relu",
        "no-bias-gelu-fusion": model.activation_func == "gelu" and not fused,
    }
    return [f"--{name} {value}" for name, value in sizes.items()] + [f"--{name}" for name, on in flags.items() if on]


def _refuse_without_option(config: Config) -> None:
    model = config.model
    strange = {
        "num_moe_experts": model.num_moe_experts is not None,
        "multi_latent_attention": model.multi_latent_attention,
        "position_embedding_type": model.position_embedding_type in ("yarn", "relative", "alibi"),
        "softmax_type": model.softmax_type != "vanilla",
        "attention_output_gate": model.attention_output_gate,
        "qk_l2_norm": model.qk_l2_norm,
        "without_norms": bool(model.without_norms),
        "glu_linear_offset": model.glu_linear_offset != 0.0,
        "activation_func_clamp_value": model.activation_func_clamp_value is not None,
        "activation_func": (model.gated_linear_unit, model.activation_func)
        not in {(True, "silu"), (False, "gelu"), (False, "squared_relu")},
    }
    for key, found in strange.items():
        if found:
            raise config.error(
                f"model.{key}", "no options are written for it, and so no checkpoint; expected --to safetensors"
            )


def save_release(config: Config, vocab_size: int, weights: FoldedWeights, directory: Path) -> None:
    """Writes weights as megatron-core's dist_checkpointing into an empty folder, in one process.

    The plain model, built without memory, says under which key and offset each tensor is stored; all tensors are then
    in memory at once.

    Args:
        config: of the checkpoint.
        vocab_size: entries of the tokenizer, before padding.
        weights: with every row of the padded vocabulary.
        directory: of the release.

    Raises:
        UserError: a file of the checkpoint is damaged.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    plain = derive(config, {f"model.{name}": value for name, value in _PLAIN.items()})
    layout = resolve_layout(plain, 1)
    runtime.start_distributed(layout, Rank(), config.run.seed)
    try:
        (model,) = dry_run(parametrize(plain, vocab_size), layout, 0)
        # Beside the weights it names what Transformer Engine's layers would keep, and a run asks for that too.
        state = model.sharded_state_dict()
        for name in weights.specs:
            state[name].data = weights.read(name)
        dist_checkpointing.save(state, str(directory), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    finally:
        runtime.stop_distributed()
    # As 0.16 writes it, and every later version reads it, without unpickling more than numbers.
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, directory / "common.pt")
