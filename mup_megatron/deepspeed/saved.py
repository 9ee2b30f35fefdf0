"""Base shapes in DeepSpeed's checkpoints. Public name: `keep_base_shapes`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mup_megatron.mup.infshape import InfShape
from mup_megatron.mup.parameters import clean_names
from mup_megatron.util.errors import UserError

_KEY = "mup_megatron_base_shapes"
"""Among the `client_state` of a checkpoint: base shapes by name, with None where a dimension does not grow."""


def keep_base_shapes(engine: Any, model: torch.nn.Module) -> None:
    """Has the engine's checkpoints say the base shapes of its model, and refuses those of another base.

    The sizes of the weights are the same for any base; multipliers, and with them what the weights compute, are not.

    Args:
        engine: of DeepSpeed. Its `load_checkpoint` raises UserError, once DeepSpeed has loaded.
        model: as it was given to DeepSpeed.
    """
    clean = clean_names(name for name, _ in model.named_parameters())
    own = {
        clean[name]: list(infshape.base_shape())
        for name, parameter in model.named_parameters()
        if isinstance(infshape := getattr(parameter, "infshape", None), InfShape)
    }
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def saving(save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        return save(save_dir, tag, {**(client_state or {}), _KEY: own}, *args, **kwargs)

    @functools.wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        path, state = load(*args, **kwargs)
        found = (state or {}).pop(_KEY, {})
        for name in own:
            if own[name] != found.get(name, own[name]):
                raise UserError(
                    f"{path}: {name}: its base shape is {found[name]} in the checkpoint and {own[name]} in the model, "
                    "so the same weights compute something else; expected the base shapes that it was trained with"
                )
        return path, state

    if own:
        engine.save_checkpoint, engine.load_checkpoint = saving, loading
