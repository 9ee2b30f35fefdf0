"""Engines: who steps the model. One protocol, two implementations: deepspeed.py and megatron.py.

Public names: `Engine`, `StepResult`, `build_engine`, `refuse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mup_megatron.config import Config
from mup_megatron.layout import Layout
from mup_megatron.parametrization import Parametrization

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel

    from mup_megatron.data.batches import Batch


WEIGHT = "weight"
"""What `Engine.gather` calls the parameter itself."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step.

    Args:
        loss: nats per token, averaged over the global batch; the same on every rank.
        grad_norm: global gradient norm before clipping; the same on every rank.
    """

    loss: float
    grad_norm: float


class Engine(Protocol):
    """What the training loop needs of an engine. Every method is collective."""

    @property
    def chunks(self) -> list[GPTModel]:
        """megatron-core's model: this rank's part of it."""
        ...

    @property
    def optimizer(self) -> Any:
        """The optimizer; its `param_groups` carry `lr`, `lr_multiplier` and `rule`."""
        ...

    def step(self, micro_batches: Sequence[Batch], base_lr: float) -> StepResult:
        """One optimizer step on this rank's micro-batches of a global batch, at the base learning rate given."""
        ...

    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Loss in nats per token on a global batch; the same on every rank."""
        ...

    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """This rank's whole slice of a parameter and of its optimizer state, float32, each of the slice's shape.

        The weight (`WEIGHT`, the master copy where there is one), and the optimizer's moments by torch's names.
        """
        ...

    def prepare_state(self, kinds: Sequence[str], step: int) -> None:
        """Allocates the optimizer state that `scatter` will fill; an Adam counts `step` updates done."""
        ...

    def scatter(self, parameter: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Takes back what `gather` gave, wherever it was gathered."""
        ...

    def close(self) -> None:
        """Lets go of hooks and buffers, so that another engine can be built in this process."""
        ...


def build_engine(config: Config, parametrization: Parametrization, chunks: list[GPTModel], layout: Layout) -> Engine:
    """The engine that the config names.

    Args:
        config: the run, every `auto` resolved.
        parametrization: of the same config.
        chunks: this rank's part, from `model.build_model`.
        layout: how ranks split the model.

    Raises:
        ConfigError: a combination that the engine gets wrong or does not have.
    """
    refuse(config, layout)
    if config.parallel.engine == "megatron":
        from mup_megatron.engines.megatron import MegatronEngine

        return MegatronEngine(config, parametrization, chunks, layout)
    from mup_megatron.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, parametrization, chunks, layout)


def refuse(config: Config, layout: Layout) -> None:
    """Refuses what the config's engine gets wrong or does not have, before anything is built.

    Raises:
        ConfigError: names the key and what works.
    """
    if config.parallel.engine == "megatron":
        from mup_megatron.engines import megatron_config

        megatron_config.refuse(config, layout)
    else:
        from mup_megatron.engines import deepspeed_config

        deepspeed_config.refuse(config, layout)
        deepspeed_config.deepspeed_config(config, layout)
