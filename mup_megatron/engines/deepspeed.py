"""megatron-core's model inside a DeepSpeed engine, megatron-core's parallel_state as its mpu: TP, SP, ZeRO 0 to 3.

Public name: `DeepSpeedEngine`. What DeepSpeed does silently wrong with this pair is mended here or
refused (docs/upstream.md): it broadcasts rank 0's weights over tensor-parallel ranks when it has no mpu, and it never
sums the gradients of sequence-parallel parameters over them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule

from mup_megatron.data.batch import Batch
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.deepspeed_experts import announce_experts, mark_expert_groups
from mup_megatron.engines.deepspeed_mpu import Mpu, sum_sequence_parallel_gradients
from mup_megatron.engines.deepspeed_parts import gradient_parts, weight_parts
from mup_megatron.engines.deepspeed_whole import groups_of, inner, link_moments, whole
from mup_megatron.engines.experts import forget_logged_losses, scale_hidden_losses, update_expert_bias
from mup_megatron.engines.gradient_norm import clip
from mup_megatron.engines.optim import MOMENTS, allocate, build_optimizer, parameter_groups, set_learning_rates
from mup_megatron.engines.setup import Setup
from mup_megatron.engines.setup.deepspeed import check_settings
from mup_megatron.engines.step_result import StepResult
from mup_megatron.model.global_names import named_parameters
from mup_megatron.model.parts import Part
from mup_megatron.rules.table import Parametrization


class DeepSpeedEngine:
    """The default engine.

    Args:
        setup: the run.
        parametrization: of the same config, or what a control makes of it.
        chunks: this rank's part, from `model.build_model`: one chunk.
    """

    def __init__(self, setup: Setup, parametrization: Parametrization, chunks: list[LanguageModule]) -> None:
        (model,) = chunks
        config, layout = setup.config, setup.layout
        self._config, self._layout = config, layout
        self._parametrization = parametrization
        self.before_update: Callable[[], None] | None = None
        self.named = list(named_parameters(model))
        sum_sequence_parallel_gradients(model)
        groups = parameter_groups(self.named, parametrization)
        if layout.expert > 1:
            announce_experts(model, layout)
            groups = mark_expert_groups(groups, layout)
        settings = copy.deepcopy(dict(setup.deepspeed or {}))
        check_settings(config, settings, Mpu())
        self._clips_itself = config.weighs_gradients or layout.zero_stage == 0 or layout.expert > 1
        if self._clips_itself:
            # At stage 0 DeepSpeed clips without keeping the norm, it sums norms in float32, and it knows the plain one
            # alone. Here it is done before its step.
            settings["gradient_clipping"] = 0.0
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(config, groups), mpu=Mpu(), config=settings
        )

    @property
    def module(self) -> LanguageModule:
        """megatron-core's model."""
        return self.engine.module

    @property
    def chunks(self) -> list[LanguageModule]:
        """The same as the one chunk that it is; see engines.Engine."""
        return [self.module]

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
            if number == len(micro_batches):
                if self.before_update is not None:
                    self.before_update()
                if self._clips_itself:
                    norm = self._clip()
            self.engine.step()
        update_expert_bias(self.module)
        if norm is None:
            norm = self.engine.get_global_grad_norm()
        return StepResult(loss=self._data_parallel_mean(total), grad_norm=norm)

    def _clip(self) -> torch.Tensor:
        limit = self._config.training.clip_grad
        return clip(self.gradient_parts(), self._parametrization, self._layout, limit, self.engine.device)

    def gradient_parts(self) -> list[Part]:
        """As DeepSpeed partitions them; see engines.Engine."""
        return gradient_parts(self.optimizer, self.named, self._parametrization, self._layout)

    def weight_parts(self) -> list[Part]:
        """As DeepSpeed partitions them; see engines.Engine."""
        return weight_parts(self.optimizer, self.named, self._parametrization, self._layout)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Loss without a step; see engines.Engine."""
        self.engine.eval()
        losses = torch.stack([self._loss(batch) for batch in micro_batches])
        self.engine.train()
        return float(self._data_parallel_mean(losses.mean()))

    @torch.no_grad()
    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """DeepSpeed's partitions of a parameter are put together; see engines.Engine."""
        return whole(self.optimizer, parameter, self._layout.zero_stage, MOMENTS[self._parametrization.update_rule])

    def groups(self, parameter: torch.nn.Parameter) -> list[dict[str, Any]] | None:
        """By the lists that DeepSpeed's partitions are made of; see engines.Engine."""
        return groups_of(self.optimizer, parameter, self._layout.zero_stage)

    @torch.no_grad()
    def prepare_state(self, kinds: Sequence[str], step: int) -> None:
        """Allocates moments of zero for the flat partitions that DeepSpeed steps; see engines.Engine."""
        if self._layout.zero_stage == 3:
            flats = self.optimizer.fp32_partitioned_groups_flat
        else:
            flats = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        allocate(self._inner, flats, kinds, step)
        link_moments(self.optimizer)

    @torch.no_grad()
    def scatter(self, parameter: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Fills this rank's partitions of the master weight and the moments; see engines.Engine.

        The weights themselves were loaded before the engine was built, which alone serves ZeRO 3.
        """
        values = {kind: value.to(self.engine.device) for kind, value in values.items()}
        weight = values.pop(WEIGHT)
        if self._layout.zero_stage == 0:
            parameter.copy_(weight)
            for kind, value in values.items():
                self.optimizer.state[parameter][kind].copy_(value)
            return
        if not parameter.requires_grad:
            return
        safe_set_full_fp32_param(parameter, weight)
        for kind, value in values.items():
            safe_set_full_optimizer_state(parameter, value, kind)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The optimizer that DeepSpeed has wrapped."""
        return inner(self.optimizer, self._layout.zero_stage)

    def close(self) -> None:
        """Removes DeepSpeed's hooks; see engines.Engine."""
        forget_logged_losses()  # they keep process groups alive
        self.engine.destroy()

    def _loss(self, batch: Batch) -> torch.Tensor:
        return batch.loss(batch.forward(self.engine))

    def _data_parallel_mean(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().clone().float()
        torch.distributed.all_reduce(value, group=parallel_state.get_data_parallel_group())
        return value / self._layout.data
