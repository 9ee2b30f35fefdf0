"""Megatron-Bridge under µP (`mup_megatron.bridge`): the two symbols that its own hooks do not reach."""

from __future__ import annotations

from types import ModuleType

from .patch import Patch


def bridge_patches(hooks: ModuleType) -> tuple[Patch, ...]:
    """What `apply_mup` applies and nothing else does.

    Args:
        hooks: mup_megatron.bridge.hooks, handed in, for this package imports nothing of the rooms above it.
    """
    return (
        Patch(
            name="bridge-model",
            distribution="megatron-core",
            versions=">=0.19,<0.20",
            symbol="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            parameters=None,
            why="records and softmax scale must be there before the layers are, multipliers and initial values after",
            lower_rung="pre-wrap hooks see the model once attention has its softmax scale; a provider's layer spec "
            "does not reach embedding and readout",
            until="Bridge calls a hook with what a model is about to be built from",
            when="always",
            wrap=hooks.builds_model,
        ),
        Patch(
            name="bridge-scheduler",
            distribution="megatron-core",
            versions=">=0.19,<0.20",
            symbol="megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.__init__",
            parameters=None,
            why="the audit of the first step needs the optimizer, which Bridge hands to its scheduler alone",
            lower_rung="a provider of overrides is asked before there is an optimizer, and callbacks get none",
            until="Bridge calls a hook with the optimizer",
            when="always",
            wrap=hooks.builds_scheduler,
        ),
    )
