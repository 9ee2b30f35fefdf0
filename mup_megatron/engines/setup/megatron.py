"""What megatron-core's own training stack gets wrong or lacks.

Public names: `refuse`, `emerging_missing`, `COPIED_POSITIONS`, `LEARNED`.
"""

from __future__ import annotations

import importlib.util

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout


def emerging_missing(name: str) -> str | None:
    """Why this installation cannot step matrices with an optimizer of NVIDIA's emerging_optimizers; None if it can.

    Args:
        name: muon, lion or soap.
    """
    from megatron.core.optimizer import OptimizerConfig

    if "muon_scalar_optimizer" not in OptimizerConfig.__dataclass_fields__:
        return f"this megatron-core has no {name} that takes rates per tensor; expected 0.19 or later"
    if importlib.util.find_spec("emerging_optimizers") is None:
        return f"{name} needs NVIDIA's emerging_optimizers; expected pip install emerging-optimizers"
    return None


LEARNED = "learned_absolute"
COPIED_POSITIONS = (
    f"{LEARNED} positions and pipeline stages: megatron-core gives the last stage a table of positions of its own, and "
    "does not add up the gradients of the two tables"
)


def refuse(config: Config, layout: Layout) -> None:
    """Refuses what megatron-core does not have or gets wrong, before anything is built.

    Raises:
        ConfigError: names the key and what works.
    """
    if config.parallel.use_distributed_optimizer and (problem := _distributed_problem(config)):
        raise config.error("parallel.use_distributed_optimizer", problem)
    if config.steps_matrices and (missing := emerging_missing(config.optimizer.name)):
        raise config.error("optimizer.name", missing)
    model = config.model
    if model.mtp_num_layers is not None and layout.context > 1:
        raise config.error(
            "parallel.context_parallel_size",
            "megatron-core takes the mean of multi-token prediction over each rank's own tokens, of which the rank "
            "with the sequence's end has fewer; expected 1 with model.mtp_num_layers",
        )
    if model.mtp_num_layers is not None and model.position_embedding_type == LEARNED and layout.pipeline > 1:
        raise config.error("model.mtp_num_layers", f"{COPIED_POSITIONS}; expected rope, or one stage")
    if model.multi_latent_attention and model.qk_layernorm and layout.tensor > 1 and not layout.sequence_parallel:
        raise config.error(
            "parallel.sequence_parallel",
            "megatron-core sums the gradients of every q_layernorm over tensor-parallel ranks, and multi-latent "
            "attention's are whole there; expected true, or parallel.engine: deepspeed",
        )


def _distributed_problem(config: Config) -> str | None:
    """What is wrong with sharing an optimizer's steps over data-parallel ranks; None if nothing is."""
    name = config.optimizer.name
    if name not in ("adamw", "muon", "soap"):
        return f"megatron-core's distributed optimizer is AdamW's, not {name}'s; expected false"
    whose = {"muon": "Muon", "soap": "SOAP"}.get(name)
    if whose and config.training.precision != "bf16":
        return (
            f"{whose}'s layer-wise optimizer steps in bf16 alone (megatron-core wraps its parts for nothing else); "
            "expected training.precision: bf16, or false"
        )
    if whose and config.parallel.overlap_param_gather:
        return f"{whose}'s layer-wise optimizer is not tested with parallel.overlap_param_gather; expected that false"
    return None
