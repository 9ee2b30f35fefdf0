"""The Megatron engine's settings, from the config.

Public names: `ddp_config`, `optimizer_config`, `muon_missing`, `refuse`.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from mup_megatron.config import Config
from mup_megatron.layout import Layout

_ADAMW_RMS = 0.2
"""Root mean square of a coordinate of AdamW's update over its rate (Liu et al., 2502.16982), which Muon is given."""


def ddp_config(config: Config, layout: Layout) -> DistributedDataParallelConfig:
    """Of megatron-core's DistributedDataParallel."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        grad_reduce_in_fp32=config.training.precision == "bf16",
    )


def optimizer_config(config: Config, layout: Layout) -> OptimizerConfig:
    """Of megatron-core's optimizers; what differs between tensors comes from `optim.megatron_overrides`."""
    optimizer = config.optimizer
    bf16 = config.training.precision == "bf16"
    return OptimizerConfig(
        optimizer=optimizer.name if optimizer.name in ("sgd", "muon") else "adam",
        decoupled_weight_decay=optimizer.name in ("adamw", "muon"),
        **(_muon(config) if optimizer.name == "muon" else {}),
        lr=config.hparams.lr,
        min_lr=config.training.min_lr_ratio * config.hparams.lr,
        weight_decay=config.hparams.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        sgd_momentum=optimizer.momentum,
        # Of no limit, megatron-core would not compute the norm. By the invariant norm the engine clips.
        clip_grad=(config.training.clip_norm == "global" and config.training.clip_grad) or math.inf,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


def _muon(config: Config) -> dict[str, Any]:
    """Whole matrices, whatever the layout, query, key and value each for itself; at the base AdamW's size of update.

    The rates of `Parametrization` are made for scale mode `spectral`.
    """
    return {
        "muon_momentum": config.optimizer.momentum,
        "muon_scale_mode": "spectral",
        "muon_extra_scale_factor": _ADAMW_RMS,
        "muon_tp_mode": "duplicated",
        "muon_split_qkv": True,
        "muon_fp32_matmul_prec": "highest" if config.training.precision == "fp32" else "medium",
        "muon_scalar_optimizer": "adam",
    }


def muon_missing() -> str | None:
    """Why this installation has no Muon; None if it has."""
    if "muon_scalar_optimizer" not in OptimizerConfig.__dataclass_fields__:
        return "this megatron-core has no muon that takes rates per tensor; expected 0.19 or later"
    if importlib.util.find_spec("emerging_optimizers") is None:
        return "muon needs NVIDIA's emerging_optimizers; expected pip install emerging-optimizers"
    return None


def refuse(config: Config, layout: Layout) -> None:
    """Refuses what megatron-core does not have or gets wrong, before anything is built.

    Raises:
        ConfigError: names the key and what works.
    """
    if config.optimizer.name != "adamw" and config.parallel.use_distributed_optimizer:
        raise config.error(
            "parallel.use_distributed_optimizer",
            f"megatron-core's distributed optimizer is AdamW's, not {config.optimizer.name}'s; expected false",
        )
    if missing := muon_missing() if config.optimizer.name == "muon" else None:
        raise config.error("optimizer.name", missing)
    model = config.model
    if model.mtp_num_layers is not None and layout.context > 1:
        raise config.error(
            "parallel.context_parallel_size",
            "megatron-core takes the mean of multi-token prediction over each rank's own tokens, of which the rank "
            "with the sequence's end has fewer; expected 1 with model.mtp_num_layers",
        )
    if model.multi_latent_attention and model.qk_layernorm and layout.tensor > 1 and not layout.sequence_parallel:
        raise config.error(
            "parallel.sequence_parallel",
            "megatron-core sums the gradients of every q_layernorm over tensor-parallel ranks, and multi-latent "
            "attention's are whole there; expected true, or parallel.engine: deepspeed",
        )
