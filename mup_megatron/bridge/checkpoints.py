"""Bridge's checkpoint manager with the record of a run in µP beside the weights, and the guard before they are read.

Public name: `GuardedCheckpoints`. Bridge imports this itself, by the name in `checkpoint.custom_manager_class`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.bridge.training import checkpointing
from megatron.bridge.training.utils.checkpoint_utils import (
    checkpoint_exists,
    get_checkpoint_name,
)

from mup_megatron.bridge.hooks import ends_with_status_2, run_of
from mup_megatron.util.errors import UserError


class GuardedCheckpoints(checkpointing.DefaultCheckpointManager):
    """Bridge's own manager; `save` writes mup.json too, `load` compares it first."""

    @ends_with_status_2
    def save(self, ctx: Any, *args: Any, **kwargs: Any) -> None:
        """Saves as Bridge does, and writes the record into the checkpoint's folder."""
        super().save(ctx, *args, **kwargs)
        state = ctx.state
        folder = Path(get_checkpoint_name(state.cfg.checkpoint.save, state.train_state.step))
        run_of(state.cfg.model).record_in(folder, int(state.train_state.step))

    @ends_with_status_2
    def load(self, ctx: Any) -> tuple[int, int]:
        """Loads as Bridge does, once the checkpoint's record is this run's."""
        run, folder = run_of(ctx.state.cfg.model), selected(ctx.state.cfg.checkpoint)
        if folder is not None:
            run.check_record(folder)
        found: tuple[int, int] = super().load(ctx)
        return found


def selected(config: Any) -> Path | None:
    """The folder of the checkpoint that Bridge is about to load; None where there is none.

    Args:
        config: CheckpointConfig.

    Raises:
        UserError: what is named holds no checkpoint of Megatron's.
    """
    directory = config.load if checkpoint_exists(config.load) else config.pretrained_checkpoint
    if directory is None:
        return None
    step = config.ckpt_step if directory == config.load else None
    iteration, release = checkpointing._resolve_checkpoint_iteration(directory, step)
    if iteration == checkpointing._DIRECT_ITERATION_DIR_SENTINEL:
        return Path(directory)
    if iteration < 0 and not release:
        raise UserError(
            f"{directory}: holds no checkpoint of Megatron's, so it was not written in µP; expected one that this "
            "recipe wrote, or none"
        )
    return Path(get_checkpoint_name(directory, iteration, release))
