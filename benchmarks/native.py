"""megatron-core's native MuP (0.17 and later): the other µP that ours is compared with.

`native_model` is plain.py's model with `use_mup`; `native_groups` are plain.py's groups with the rates and epsilons
that upstream's own get_mup_config_overrides says; `logits_multiplier` looks whether a model multiplies its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from benchmarks.plain import plain_groups, plain_model
from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout


def native_model(config: Config, vocab_size: int, layout: Layout, device: torch.device) -> GPTModel:
    """The config's sizes with `use_mup`, its base being the config's; everything must grow as hidden_size does."""
    base = config.model.resized(config.base.width)
    return plain_model(
        config,
        vocab_size,
        layout,
        device,
        use_mup=True,
        mup_base_hidden_size=base.hidden_size,
        mup_base_head_dim=float(base.head_size),
        init_method_std=config.hparams.init_method_std,
    )


def native_groups(model: GPTModel, config: Config) -> list[dict[str, Any]]:
    """As Megatron groups under use_mup: hidden matrices with rate and epsilon over the width ratio."""
    from megatron.core.optimizer import OptimizerConfig, get_mup_config_overrides

    lr, eps = config.hparams.lr, config.optimizer.eps
    overrides = get_mup_config_overrides(
        OptimizerConfig(optimizer="adam", lr=lr, min_lr=0.0, adam_eps=eps), model.config.mup_width_mult
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups: dict[Any, dict[str, Any]] = {}
    for plain in plain_groups(model, config):
        for parameter in plain["params"]:
            said: dict[str, Any] = {}
            for key, override in overrides.items():
                if key.matches(parameter, names[parameter]):
                    said.update(override)
            values = {
                "lr": said.get("max_lr", lr),
                "eps": said.get("eps", eps),
                "weight_decay": plain["weight_decay"],
            }
            groups.setdefault(tuple(values.values()), {"params": [], **values})["params"].append(parameter)
    return list(groups.values())


def logits_multiplier(model: GPTModel, step: Callable[[], object]) -> float:
    """What the logits are multiplied by between the readout's GEMM and the loss, seen at both ends during `step`.

    Raises:
        ValueError: the loss gets something else than a multiple of what the readout returned.
    """
    logits: list[torch.Tensor] = []
    found: list[float] = []
    loss = model.compute_language_model_loss

    def consume(labels: torch.Tensor, consumed: torch.Tensor) -> torch.Tensor:
        # Compared at once: the cross entropy subtracts the largest logit in place.
        produced, used = logits[-1].detach().double(), consumed.detach().double()
        found.append(float((produced * used).sum() / produced.square().sum()))
        if not torch.allclose(used, produced * found[-1], rtol=1e-2, atol=1e-6):
            raise ValueError("the loss is given something else than multiplied logits")
        return loss(labels, consumed)

    hook = model.output_layer.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    model.compute_language_model_loss = consume
    try:
        step()
    finally:
        hook.remove()
        del model.compute_language_model_loss
    return found[-1]
