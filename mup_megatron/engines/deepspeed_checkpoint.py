"""DeepSpeed's checkpoint files read without unpickling whatever they hold.

DeepSpeed saves with torch.save and loads with `weights_only=False`, which runs any code that a file brings along. This
wrapper loads with `weights_only=True` and names the few DeepSpeed classes that its own files contain.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from mup_megatron.errors import UserError


def _known_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


class SafeCheckpointEngine:
    """A DeepSpeed checkpoint engine whose `load` is safe; everything else is the wrapped engine's."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads tensors and plain values. Raises UserError for a file that is damaged or holds anything else."""
        try:
            with torch.serialization.safe_globals(_known_classes()):
                return torch.load(path, map_location=map_location, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{path}: not a checkpoint that can be loaded safely ({reason})") from None
