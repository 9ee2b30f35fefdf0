"""What a step owes to a mixture of experts and to multi-token prediction beside the loss, for every engine.

Both hide losses in the backward pass, at a scale that whoever runs the micro-batches has to set; and an expert bias is
moved after each step by how many tokens each expert got. megatron-core's schedules and finalize_model_grads do all of
it; an engine without them calls `scale_hidden_losses` before a step's micro-batches and `update_expert_bias` after.
"""

from __future__ import annotations

import importlib.util

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper


def scale_hidden_losses(micro_batches: int, device: torch.device) -> None:
    """Scales the gradients of auxiliary and multi-token losses to a mean over micro-batches, as the main loss is.

    Forgets what megatron-core noted of earlier ones for its logs, whose length is that of the first model it saw.

    Args:
        micro_batches: of this step on this rank.
        device: of the model.
    """
    # Of one element: the Megatron engine's schedules, in the same process, copy theirs into it.
    scale = torch.full((1,), 1.0 / micro_batches, device=device)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(scale)
    MTPLossAutoScaler.set_loss_scale(scale)
    forget_logged_losses()


def forget_logged_losses() -> None:
    """Empties megatron-core's process-wide trackers of auxiliary and multi-token losses."""
    MTPLossLoggingHelper.tracker.clear()
    if importlib.util.find_spec("megatron.core.transformer.moe.moe_logging") is None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()  # megatron-core 0.16
    else:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


@torch.no_grad()
def update_expert_bias(model: torch.nn.Module) -> None:
    """Moves each router's expert bias towards experts that got fewer tokens in this step, and starts counts afresh.

    A collective over the tensor-, context- and data-parallel ranks. arXiv 2408.15664; what megatron-core's
    finalize_model_grads does.

    Args:
        model: this rank's part, in training mode.
    """
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        router.reset_global_aux_loss_tracker()
    routers = [router for router in routers if router.expert_bias is not None]
    if not routers:
        return
    updated = moe_utils.get_updated_expert_bias(
        torch.stack([router.local_tokens_per_expert for router in routers]),
        torch.stack([router.expert_bias for router in routers]),
        routers[0].config.moe_router_bias_update_rate,
    )
    for router, bias in zip(routers, updated, strict=True):
        router.expert_bias.copy_(bias)
        router.local_tokens_per_expert.zero_()
