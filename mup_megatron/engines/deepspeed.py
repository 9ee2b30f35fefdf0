"""megatron-core's model inside a DeepSpeed engine, megatron-core's parallel_state as its mpu: TP, SP, ZeRO 0 to 3.

Public names: `DeepSpeedEngine`, `Mpu`. What DeepSpeed does silently wrong with this pair is mended here or
refused (docs/upstream.md): it broadcasts rank 0's weights over tensor-parallel ranks when it has no mpu, and it never
sums the gradients of sequence-parallel parameters over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from mup_megatron.config import Config
from mup_megatron.data.batches import Batch
from mup_megatron.engines import StepResult
from mup_megatron.engines.deepspeed_checkpoint import SafeCheckpointEngine
from mup_megatron.engines.deepspeed_config import deepspeed_config, refuse
from mup_megatron.engines.experts import forget_logged_losses, scale_hidden_losses, update_expert_bias
from mup_megatron.engines.gradient_norm import clip_gradients
from mup_megatron.layout import Layout
from mup_megatron.model import named_parameters
from mup_megatron.optim import build_optimizer, parameter_groups, set_learning_rates
from mup_megatron.parametrization import Parametrization

_TAG = "deepspeed"


class Mpu:
    """parallel_state with the three names that DeepSpeed asks an mpu for and megatron-core calls otherwise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_rank(self) -> int:
        """Tensor-parallel rank."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """Tensor-parallel size."""
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_group()


class DeepSpeedEngine:
    """The default engine.

    Args:
        config: the run, every `auto` resolved.
        parametrization: of the same config.
        model: this rank's part, from `model.build_model`.
        layout: how ranks split the model.

    Raises:
        ConfigError: a combination that DeepSpeed gets wrong.
    """

    def __init__(self, config: Config, parametrization: Parametrization, model: GPTModel, layout: Layout) -> None:
        refuse(config, layout)
        self._config, self._layout = config, layout
        self._parametrization = parametrization
        if layout.tensor > 1:
            _sum_sequence_parallel_gradients(model)
        groups = parameter_groups(named_parameters(model), parametrization)
        settings = deepspeed_config(config, layout)
        self._clips_itself = layout.zero_stage == 0
        if self._clips_itself:
            # At stage 0 DeepSpeed clips without keeping the norm; here it is done before its step (gradient_norm.py).
            settings["gradient_clipping"] = 0.0
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(config, groups), mpu=Mpu(), config=settings
        )
        self.engine.checkpoint_engine = SafeCheckpointEngine(self.engine.checkpoint_engine)

    @property
    def module(self) -> GPTModel:
        """megatron-core's model."""
        return self.engine.module

    def step(self, micro_batches: Sequence[Batch], base_lr: float) -> StepResult:
        """One optimizer step; see engines.Engine."""
        self.engine.train()
        set_learning_rates(self.optimizer, base_lr)
        scale_hidden_losses(len(micro_batches), self.engine.device)
        total = torch.zeros((), device=self.engine.device)
        norm = None
        for number, batch in enumerate(micro_batches, start=1):
            loss = self._loss(batch)
            self.engine.backward(loss)
            total += loss.detach() / len(micro_batches)
            if self._clips_itself and number == len(micro_batches):
                norm = clip_gradients(
                    named_parameters(self.module), self._parametrization, self._layout, self._config.training.clip_grad
                )
            self.engine.step()
        update_expert_bias(self.module)
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
        return StepResult(loss=self._data_parallel_mean(total), grad_norm=norm)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Loss without a step; see engines.Engine."""
        self.engine.eval()
        losses = torch.stack([self._loss(batch) for batch in micro_batches])
        self.engine.train()
        return self._data_parallel_mean(losses.mean())

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """DeepSpeed's own checkpoint, `state` as its client state; see engines.Engine."""
        self.engine.save_checkpoint(str(directory), tag=_TAG, client_state={"state": state})

    def load(self, directory: Path) -> dict[str, Any]:
        """Reads what `save` wrote; see engines.Engine."""
        _, client_state = self.engine.load_checkpoint(str(directory), tag=_TAG)
        return client_state["state"]

    def close(self) -> None:
        """Removes DeepSpeed's hooks; see engines.Engine."""
        forget_logged_losses()  # they keep process groups alive
        self.engine.destroy()

    def _loss(self, batch: Batch) -> torch.Tensor:
        losses = self.engine(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
        return (losses.float() * batch.loss_mask).sum() / batch.loss_mask.sum()

    def _data_parallel_mean(self, value: torch.Tensor) -> float:
        value = value.detach().clone().float()
        torch.distributed.all_reduce(value, group=parallel_state.get_data_parallel_group())
        return float(value / self._layout.data)


def _sum_sequence_parallel_gradients(model: torch.nn.Module) -> None:
    """Sums gradients of parameters that see a part of the sequence, or of the heads, over tensor-parallel ranks.

    megatron-core's finalize_model_grads does it for its own engine; DeepSpeed knows nothing of it.
    """
    group = parallel_state.get_tensor_model_parallel_group()

    def hook() -> Callable[[torch.Tensor], torch.Tensor]:
        def all_reduce(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=group)
            return gradient

        return all_reduce

    for parameter in model.parameters():
        if parameter.requires_grad and getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(hook())
