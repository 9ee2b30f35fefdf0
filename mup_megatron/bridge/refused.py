"""What a recipe may ask of Bridge that has no rule here, beside what the tables of `mup-megatron run` refuse.

Public name: `refuse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mup_megatron.util.errors import UserError

_OPTIMIZERS = ("adam", "sgd")
_SECTIONS = ("model", "train", "optimizer", "scheduler", "ddp", "dist", "rng", "logger", "tokenizer", "checkpoint")


def refuse(config: Any, *, first: bool) -> None:
    """Refuses a recipe by what its container says.

    Args:
        config: the container.
        first: whether `apply_mup` is at work: afterwards the container holds what it put there, and Bridge its hooks.

    Raises:
        UserError: names the field, and what is expected.
    """
    for name in _SECTIONS:
        if not hasattr(config, name):
            raise UserError(
                f"config: {type(config).__name__} has no {name}; expected a ConfigContainer of megatron-bridge"
            )
    for problem in (*_of_container(config), *(_of_hooks(config) if first else ())):
        raise UserError(problem)


def _of_container(config: Any) -> Iterator[str]:
    """What is wrong, a sentence each."""
    model, optimizer, checkpoint = config.model, config.optimizer, config.checkpoint
    if getattr(model, "use_mup", False):
        yield (
            "model.use_mup: with it Bridge adds the overrides of megatron-core's native MuP, which cannot be combined "
            "with this project's; expected False"
        )
    if not _builds_gpt(model):
        yield (
            f"model: {type(model).__name__} does not build its model as GPTModelProvider.provide or GPTModelBuilder "
            "do, and what it changes afterwards is not seen here; expected a GPTModelProvider or a GPTModelConfig"
        )
    if getattr(config, "peft", None) is not None:
        yield "peft: adapters are added once the rules are applied, and none is known for them; expected None"
    for name in ("restore_modelopt_state", "init_model_with_meta_device"):
        if getattr(model, name, False):
            yield f"model.{name}: values come from elsewhere once the rules have drawn them; expected False"
    if optimizer.optimizer not in _OPTIMIZERS or hasattr(optimizer, "provide"):
        yield (
            f"optimizer: {type(optimizer).__name__} with {optimizer.optimizer}: Bridge hands it to another function "
            f"than get_megatron_optimizer, or no rule is tested for it here; expected one of {', '.join(_OPTIMIZERS)}"
        )
    if getattr(config.scheduler, "no_weight_decay_cond_type", None) is not None:
        yield (
            "scheduler.no_weight_decay_cond_type: its groups are replaced by the rules'; expected None, and "
            "optimizer.apply_wd_to_qk_layernorm for what it did"
        )
    if getattr(config.dist, "use_decentralized_pg", False):
        yield "dist.use_decentralized_pg: process groups are looked up in megatron-core's own; expected False"
    if getattr(checkpoint, "also_save_hf_checkpoint", False):
        yield (
            "checkpoint.also_save_hf_checkpoint: those files hold no forward multipliers, so another model would "
            "compute with them; expected False, and mup-megatron export"
        )
    if checkpoint.non_persistent_ckpt_type is not None or checkpoint.non_persistent_save_interval is not None:
        yield "checkpoint.non_persistent_ckpt_type: no record can be kept beside such checkpoints; expected None"
    for name in ("save", "load", "pretrained_checkpoint"):
        if "://" in str(getattr(checkpoint, name)):
            yield f"checkpoint.{name} {getattr(checkpoint, name)}: expected a folder of a file system"


def _of_hooks(config: Any) -> Iterator[str]:
    """What the recipe put into the places that `apply_mup` takes."""
    model = config.model
    if getattr(model, "_pre_wrap_hooks", None) or getattr(model, "pre_wrap_hooks", None):
        yield (
            "model: has pre-wrap hooks, which load weights or change the model once the rules are applied; expected "
            "none, such as a provider of AutoBridge's with load_weights=False"
        )
    provider = getattr(config, "optimizer_config_override_provider", None)
    if provider is not None and type(provider).__name__ != "OptimizerConfigOverrideProvider":
        yield (
            f"optimizer_config_override_provider: is {type(provider).__name__}, and its groups would be replaced by "
            "the rules'; expected Bridge's own OptimizerConfigOverrideProvider, and apply_mup once"
        )
    manager = getattr(config.checkpoint, "custom_manager_class", None)
    if manager is not None:
        yield f"checkpoint.custom_manager_class {manager}: the record is written by one of this project; expected None"


def _builds_gpt(model: Any) -> bool:
    """Whether the constructor of GPTModel is the last thing that happens to the model."""
    if hasattr(type(model), "provide"):
        owner = next(kind for kind in type(model).__mro__ if "provide" in vars(kind))
        return owner.__name__ == "GPTModelProvider"
    return str(getattr(type(model), "builder", "")).endswith(".GPTModelBuilder") and hasattr(model, "transformer")
