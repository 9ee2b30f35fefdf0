"""megatron-core's own training stack: DistributedDataParallel, optimizer, pipeline schedules, finalize_model_grads.

Public name: `MegatronEngine`. TP, SP, PP, virtual stages, CP, EP, ETP, with the plain or the
distributed optimizer; TP, SP and CP with torch's FSDP2 (fully_sharded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from mup_megatron.data.batch import Batch
from mup_megatron.engines import fully_sharded
from mup_megatron.engines.experts import forget_logged_losses
from mup_megatron.engines.gradient_norm import clip
from mup_megatron.engines.megatron_config import ddp_config, optimizer_config
from mup_megatron.engines.optim import megatron_overrides, set_learning_rates
from mup_megatron.engines.optimizer_state import OptimizerState
from mup_megatron.engines.setup import Setup
from mup_megatron.engines.step_result import StepResult
from mup_megatron.model.global_names import named_parameters
from mup_megatron.model.parts import Part
from mup_megatron.rules.table import Parametrization


class MegatronEngine:
    """The engine of pipelines.

    Args:
        setup: the run.
        parametrization: of the same config, or what a control makes of it.
        chunks: this rank's part, from `model.build_model`.
    """

    def __init__(self, setup: Setup, parametrization: Parametrization, chunks: list[LanguageModule]) -> None:
        config, layout = setup.config, setup.layout
        self._config, self._layout, self._parametrization = config, layout, parametrization
        self.chunks = chunks
        self.before_update: Callable[[], None] | None = None
        settings = ddp_config(config, layout)
        self._wrapped = [self._wrap(number, chunk, settings) for number, chunk in enumerate(chunks)]
        self.named = list(named_parameters(chunks))  # FSDP2 has put others in the place of those before
        self.optimizer = get_megatron_optimizer(
            optimizer_config(config, layout),
            self._wrapped,
            config_overrides=megatron_overrides(self.named, parametrization),
            use_gloo_process_groups=False,
        )
        self._held = OptimizerState(self.optimizer, self.named, parametrization, layout)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = config.hparams.weight_decay * group["wd_mult"]
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finalize_model_grads
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            if settings.overlap_grad_reduce:
                no_sync = [wrapped.no_sync for wrapped in self._wrapped]
                chunk.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _wrap(self, number: int, chunk: LanguageModule, settings: DistributedDataParallelConfig) -> Any:
        module = Float16Module(chunk.config, chunk) if self._config.training.precision == "bf16" else chunk
        if self._layout.fully_sharded:
            return fully_sharded.wrap(chunk, settings, module)
        # As megatron.training does: in later chunks a bucket would only be ready when all of it is.
        return DistributedDataParallel(chunk.config, settings, module, disable_bucketing=number > 0)

    def step(self, micro_batches: Sequence[Batch], base_lr: float) -> StepResult:
        """One optimizer step; see engines.Engine."""
        for wrapped in self._wrapped:
            wrapped.train()
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        set_learning_rates(self.optimizer, base_lr)
        forget_logged_losses()
        loss = self._run(micro_batches, forward_only=False)
        if self.before_update is not None:
            self.before_update()
        weighted = self._clip() if self._config.weighs_gradients else None
        _, norm, _ = self.optimizer.step()
        return StepResult(loss=loss, grad_norm=norm if weighted is None else weighted)

    def _clip(self) -> torch.Tensor:
        """Clips by a weighted norm, which megatron-core does not know, before its step; the norm before."""
        device = next(self.chunks[0].parameters()).device
        limit = self._config.training.clip_grad
        return clip(self.gradient_parts(), self._parametrization, self._layout, limit, device)

    def gradient_parts(self) -> list[Part]:
        """As megatron-core's buffers have them; see engines.Engine."""
        return self._held.gradient_parts()

    def weight_parts(self) -> list[Part]:
        """As megatron-core's optimizers have them; see engines.Engine."""
        return self._held.weight_parts()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """Loss without a step; see engines.Engine."""
        gathers = self._config.parallel.overlap_param_gather
        for wrapped in self._wrapped:
            wrapped.eval()
            if gathers:
                wrapped.disable_forward_pre_hook()  # gathers what the last step left for the next forward pass
        loss = self._run(micro_batches, forward_only=True)
        for wrapped in self._wrapped:
            wrapped.train()
            if gathers:
                wrapped.enable_forward_pre_hook()
        return float(loss)

    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """What data-parallel ranks share of a parameter is put together; see engines.Engine."""
        return self._held.gather(parameter)

    def groups(self, parameter: torch.nn.Parameter) -> list[dict[str, Any]] | None:
        """By the parameters that megatron-core's optimizers step; see engines.Engine."""
        return self._held.groups(parameter)

    def prepare_state(self, kinds: Sequence[str], step: int) -> None:
        """Allocates moments of zero; see engines.Engine."""
        self._held.prepare_state(kinds, step)

    def scatter(self, parameter: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Fills this rank's part; see engines.Engine."""
        self._held.scatter(parameter, values)

    def close(self) -> None:
        """Removes megatron-core's hooks; see engines.Engine."""
        forget_logged_losses()
        if self._config.parallel.overlap_param_gather:
            for wrapped in self._wrapped:
                wrapped.disable_forward_pre_hook()
        for chunk in self.chunks:
            # A cycle through autograd's nodes, which no garbage collector sees: config, optimizer, its views of the
            # parameters, their nodes, DistributedDataParallel's hooks there, model, config.
            chunk.config.grad_scale_func = chunk.config.no_sync_func = None

    def _run(self, micro_batches: Sequence[Batch], *, forward_only: bool) -> torch.Tensor:
        """Megatron's schedule over the micro-batches; the mean loss over the global batch, on every rank."""
        layout, training = self._layout, self._config.training
        iterators = [iter(micro_batches) for _ in self._wrapped]
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._wrapped if len(iterators) > 1 else self._wrapped[0],
            num_microbatches=len(micro_batches),
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
        )
        total = torch.zeros((), device=micro_batches[0].device)
        for loss in losses:  # none but on the last pipeline stage
            total += loss["loss"] / len(micro_batches)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total / (layout.data * layout.context)


def _forward(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    return batch.forward(model), partial(_loss, batch)


def _loss(batch: Batch, output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = batch.loss(output)
    # The schedule multiplies the first by the context-parallel size, as for a sum that is averaged once more, and
    # divides it by the micro-batches, in place.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}
