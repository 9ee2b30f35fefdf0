"""The models that a script builds: which are known, and how their tensors are called in checkpoints.

Public names: `chunks_of`, `name_in_checkpoints`, `needs_groups`, `one_model`, `KEY_PREFIX`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel

from mup_megatron.model.as_built.hybrid import hybrid_model
from mup_megatron.parallel.ranks import say_error
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


def needs_groups(model: LanguageModule, has_groups: Callable[[], bool]) -> None:
    """Ends the process with status 2 at the first backward pass of a model whose optimizer is none in µP.

    Its multipliers and initial values are µP's; under an optimizer of the script's own all tensors have one rate.

    Args:
        model: as it was built.
        has_groups: whether the groups of an optimizer were made by rule.
    """

    def refuse(_gradient: torch.Tensor) -> None:
        said = (
            "the script trains the model with an optimizer of its own, in which all tensors have one learning rate; "
            "expected megatron-core's get_megatron_optimizer, whose groups are made here"
        )
        say_error(said, same=True)
        sys.exit(2)

    def look(_model: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if has_groups():
            handle.remove()
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(refuse)

    handle = model.register_forward_hook(look)


def one_model(chunk: int) -> None:
    """Refuses a further model that begins anew with its first chunk.

    Args:
        chunk: number of the virtual pipeline stage that it says.

    Raises:
        UserError: it is the first.
    """
    if not chunk:
        raise UserError(
            "the script builds a second model, such as a teacher or a reference, or a further chunk without vp_stage; "
            "expected one model, which the table of rules is of, and the other in a process without mup-megatron run"
        )


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
