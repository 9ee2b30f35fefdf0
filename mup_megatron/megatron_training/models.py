"""The models that a script builds: which are known, and how their tensors are called in checkpoints.

Public names: `chunks_of`, `name_in_checkpoints`, `KEY_PREFIX`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel

from mup_megatron.model.as_built.hybrid import hybrid_model
from mup_megatron.util.errors import UserError

KEY_PREFIX = "mup_megatron."
"""What the names of tensors in a checkpoint begin with."""


def name_in_checkpoints(model: LanguageModule) -> None:
    """Gives the model's tensors, and with them the optimizer's state, names of their own in checkpoints.

    A checkpoint does not hold the forward multipliers, so a model without them would compute another function from
    these weights. megatron-core's load stops when it does not find a tensor by the name that it asks for.
    """
    original = model.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        add_prefix_for_sharding(result, KEY_PREFIX)
        return result

    model.sharded_state_dict = sharded_state_dict


def chunks_of(model_chunks: Any) -> list[LanguageModule]:
    """megatron-core's models in whatever they are wrapped.

    Raises:
        UserError: one is another model.
    """
    known = tuple(kind for kind in (GPTModel, hybrid_model()) if kind is not None)
    chunks = []
    for chunk in model_chunks:
        while not isinstance(chunk, known) and hasattr(chunk, "module"):
            chunk = chunk.module
        if not isinstance(chunk, known):
            raise UserError(
                f"the script trains a {type(chunk).__name__}; mup-megatron run knows megatron-core's GPTModel and "
                "HybridModel"
            )
        chunks.append(chunk)
    return chunks
