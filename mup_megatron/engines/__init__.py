"""Engines: who steps the model. One protocol, two implementations: deepspeed.py and megatron.py.

Public names: `Engine`, `build_engine`, `WEIGHT`. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mup_megatron.engines.setup import Setup
from mup_megatron.rules.table import Parametrization

if TYPE_CHECKING:
    import torch
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from mup_megatron.data.batch import Batch
    from mup_megatron.engines.step_result import StepResult
    from mup_megatron.model.global_names import Named
    from mup_megatron.model.parts import Part


WEIGHT = "weight"
"""What `Engine.gather` calls the parameter itself."""


class Engine(Protocol):
    """What the training loop needs of an engine. Every method is collective, but for those that say so."""

    @property
    def chunks(self) -> list[LanguageModule]:
        """megatron-core's model: this rank's part of it."""
        ...

    @property
    def named(self) -> Named:
        """This rank's parameters by global name."""
        ...

    before_update: Callable[[], None] | None
    """Called between the last backward pass of a step and the update, where it is set."""

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

    def gradient_parts(self) -> list[Part]:
        """What this rank has of the gradients, as each engine leaves them for `before_update`. Not collective.

        Raises:
            UserError: an optimizer of DeepSpeed's that keeps them where they are not found.
        """
        ...

    def weight_parts(self) -> list[Part]:
        """What this rank's optimizer steps of the weights: views of the master copies. Not collective."""
        ...

    def groups(self, parameter: torch.nn.Parameter) -> list[dict[str, Any]] | None:
        """The groups of the real optimizer that hold a parameter; None where another rank steps it. Not collective."""
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


def build_engine(setup: Setup, parametrization: Parametrization, chunks: list[LanguageModule]) -> Engine:
    """The engine that the config names.

    Args:
        setup: the run.
        parametrization: of the same config, or what a control makes of it.
        chunks: this rank's part, from `model.build_model`.
    """
    if setup.config.parallel.engine == "megatron":
        from mup_megatron.engines.megatron import MegatronEngine

        return MegatronEngine(setup, parametrization, chunks)
    from mup_megatron.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(setup, parametrization, chunks)
