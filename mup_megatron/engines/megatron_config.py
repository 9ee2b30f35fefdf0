"""The Megatron engine's settings, from the config.

Public names: `ddp_config`, `optimizer_config`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.horizon import betas

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
        optimizer={"adam": "adam", "adamw": "adam", "sgd": "sgd", "muon": "muon", "lion": "lion", "soap": "soap"}[
            optimizer.name
        ],
        decoupled_weight_decay=optimizer.name in ("adamw", "muon", "lion", "soap"),
        **(_muon(config) if optimizer.name == "muon" else _soap(config) if optimizer.name == "soap" else {}),
        lr=config.hparams.lr,
        min_lr=config.training.min_lr_ratio * config.hparams.lr,
        weight_decay=config.hparams.weight_decay,
        adam_beta1=betas(config)[0],
        adam_beta2=betas(config)[1],
        adam_eps=optimizer.eps,
        sgd_momentum=optimizer.momentum,
        # Of no limit, megatron-core would not compute the norm. By a weighted norm the engine clips.
        clip_grad=(not config.weighs_gradients and config.training.clip_grad) or math.inf,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=layout.distributed_optimizer,
        **({"use_layer_wise_distributed_optimizer": True} if layout.layer_wise else {}),
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


def _soap(config: Config) -> dict[str, Any]:
    """Plain SOAP: its two matrices are averages of G Gᵀ and Gᵀ G, as in the runs that its rule was verified on.

    megatron-core's own default, KL-Shampoo, clamps the eigenvalues of these matrices at Adam's epsilon, and no rule is
    known for that (docs/not-built.md).
    """
    return {"soap_use_kl_shampoo": False, "soap_shampoo_beta": betas(config)[1]}
