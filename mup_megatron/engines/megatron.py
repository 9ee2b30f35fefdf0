"""megatron-core's own training stack: DistributedDataParallel, optimizer, pipeline schedules, finalize_model_grads.

Public names: `MegatronEngine`, `main_weight`. TP, SP, PP, virtual stages, CP, EP, ETP, with the plain or the
distributed optimizer; TP, SP and CP with torch's FSDP2 (fully_sharded.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from mup_megatron.engines import WEIGHT, StepResult, fully_sharded
from mup_megatron.engines.experts import forget_logged_losses
from mup_megatron.engines.gradient_norm import GradientPart, clip, holders
from mup_megatron.engines.megatron_config import ddp_config, optimizer_config
from mup_megatron.engines.optim import MOMENTS, allocate, megatron_overrides, moment_shape, set_learning_rates
from mup_megatron.engines.setup import Setup
from mup_megatron.model.global_names import named_parameters
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
        settings = ddp_config(config, layout)
        self._wrapped = [self._wrap(number, chunk, settings) for number, chunk in enumerate(chunks)]
        self.named = list(named_parameters(chunks))  # FSDP2 has put others in the place of those before
        self.optimizer = get_megatron_optimizer(
            optimizer_config(config, layout),
            self._wrapped,
            config_overrides=megatron_overrides(self.named, parametrization),
            use_gloo_process_groups=False,
        )
        self._rules = {parameter: parametrization.tensors[name].group.update_rule for name, parameter in self.named}
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
        weighted = self._clip() if self._config.weighs_gradients else None
        _, norm, _ = self.optimizer.step()
        return StepResult(loss=loss, grad_norm=float(norm) if weighted is None else weighted)

    def _clip(self) -> float:
        """Clips by a weighted norm, which megatron-core does not know, before its step; the norm before."""
        parts = []
        for name, parameter in self.named:
            gradient: Any = parameter.grad if self._layout.fully_sharded else getattr(parameter, "main_grad", None)
            if gradient is None:
                continue
            if self._layout.fully_sharded:
                parts.append(fully_sharded.gradient_part(name, gradient))
            elif self._layout.distributed_optimizer:
                if (part := _range(_holder(self.optimizer, parameter), parameter)) is not None:
                    # Of the others' elements the buffer holds sums that no rank has put together.
                    parts.append(GradientPart(name, gradient.view(-1)[part], part.start))
            else:
                spec = self._parametrization.tensors[name].shape.spec
                parts.append(GradientPart(name, gradient, holders=holders(spec, self._layout)))
        device = next(self.chunks[0].parameters()).device
        return clip(parts, self._parametrization, self._layout, self._config.training.clip_grad, device)

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
        return loss

    @torch.no_grad()
    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """What data-parallel ranks share of a parameter is put together; see engines.Engine."""
        if not parameter.requires_grad:  # no optimizer has it
            return {WEIGHT: fully_sharded.whole(parameter.detach().float())}
        if self._layout.layer_wise:
            return self._gather_whole(parameter)
        if not self._layout.distributed_optimizer:
            main = getattr(parameter, "main_param", parameter)
            held = {WEIGHT: main.float(), **self._moments_of(main)}
            return {kind: fully_sharded.whole(value) for kind, value in held.items()}
        part, values = _part(self.optimizer, parameter)
        kinds = (WEIGHT, "exp_avg", "exp_avg_sq")  # megatron-core's distributed optimizer is AdamW's
        return {kind: _whole(parameter, part, values.get(kind)) for kind in kinds}

    def _gather_whole(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """From the data-parallel rank that steps the parameter to those that do not."""
        held, whole = self._own(parameter), {}
        for kind in (WEIGHT, *MOMENTS[self._rules[parameter]]):
            whole[kind] = parameter.new_zeros(moment_shape(kind, parameter.shape), dtype=torch.float32)
            if kind in held:
                whole[kind].copy_(held[kind])
            torch.distributed.all_reduce(whole[kind], group=_data_parallel_group(parameter))
        return whole

    def _own(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """What this rank's layer-wise optimizer holds of a parameter: all of it, or nothing."""
        main = getattr(parameter, "main_param", None)
        return {} if main is None else {WEIGHT: main, **self._moments_of(main)}

    def groups(self, parameter: torch.nn.Parameter) -> list[dict[str, Any]] | None:
        """By the parameters that megatron-core's optimizers step; see engines.Engine."""
        if not parameter.requires_grad:  # no optimizer has it
            return []
        if self._layout.distributed_optimizer:
            maps = [(holder, holder.model_param_group_index_map) for holder in self._holders]
            return [holder.optimizer.param_groups[at[parameter][0]] for holder, at in maps if parameter in at] or None
        main = getattr(parameter, "main_param", parameter)
        groups = [group for holder in self._holders for group in holder.param_groups]
        found = [group for group in groups if any(each is main for each in group["params"])]
        return found or (None if self._layout.layer_wise else [])

    @torch.no_grad()
    def prepare_state(self, kinds: Sequence[str], step: int) -> None:
        """Allocates moments of zero; see engines.Engine."""
        for holder in self._holders:
            allocate(holder.optimizer, [p for group in holder.param_groups for p in group["params"]], kinds, step)

    @torch.no_grad()
    def scatter(self, parameter: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Fills this rank's part; see engines.Engine."""
        if self._layout.distributed_optimizer:
            part, held = _part(self.optimizer, parameter)
            for kind, value in values.items() if part is not None else ():
                held[kind].copy_(value.view(-1)[part])
        elif self._layout.layer_wise:
            for kind, own in self._own(parameter).items():
                own.copy_(values[kind])
        else:
            main = getattr(parameter, "main_param", parameter)
            held = {WEIGHT: main, **self._moments_of(main)}
            for kind, value in values.items():
                fully_sharded.fill(held[kind], value)
        fully_sharded.fill(parameter, values[WEIGHT])

    @property
    def _holders(self) -> list[Any]:
        """megatron-core's optimizers, one for the dense parameters and one for the experts."""
        return _holders(self.optimizer)

    def _moments_of(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        states = (holder.optimizer.state for holder in self._holders)
        return _moments(next((state[main] for state in states if main in state), {}))

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

    def _run(self, micro_batches: Sequence[Batch], *, forward_only: bool) -> float:
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
        return float(total / (layout.data * layout.context))


def _moments(state: Any) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of a parameter, element by element."""
    return {kind: value for kind, value in state.items() if torch.is_tensor(value) and kind != "step"}


_SPLIT = "model_param_gbuf_map"


def _holders(optimizer: Any) -> list[Any]:
    """The optimizers that one of megatron-core's is a chain of, or itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _holder(optimizer: Any, parameter: torch.nn.Parameter) -> Any:
    """The distributed optimizer that holds elements of a parameter on this rank; None where none does."""
    return next((each for each in _holders(optimizer) if parameter in getattr(each, _SPLIT, ())), None)


def _range(holder: Any, parameter: torch.nn.Parameter) -> slice | None:
    """Which elements of a parameter it holds."""
    if holder is None:
        return None
    where = holder._get_model_param_range_map(parameter)["param"]
    return slice(where.start, where.end)


def _part(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[slice | None, dict[str, torch.Tensor]]:
    """Which elements of a parameter this rank's distributed optimizer holds, and what it holds of them."""
    if (holder := _holder(optimizer, parameter)) is None:
        return None, {}
    held = holder._get_main_param_and_optimizer_states(parameter)
    return _range(holder, parameter), {WEIGHT: held.pop("param"), **_moments(held)}


def _whole(parameter: torch.nn.Parameter, part: slice | None, value: torch.Tensor | None) -> torch.Tensor:
    """What data-parallel ranks hold parts of, put together, float32, in the parameter's shape."""
    flat = torch.zeros(parameter.numel(), device=parameter.device)
    if part is not None and value is not None:
        flat[part] = value.float().view(-1)
    torch.distributed.all_reduce(flat, group=_data_parallel_group(parameter))
    return flat.view(parameter.shape)


@torch.no_grad()
def main_weight(optimizer: Any, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's whole slice of a parameter as the optimizer keeps it, float32, of any of megatron-core's optimizers.

    Collective over data-parallel ranks where the distributed optimizer splits it.

    Args:
        optimizer: of `get_megatron_optimizer`, whoever built it.
        parameter: of the model.
    """
    if not any(hasattr(each, _SPLIT) for each in _holders(optimizer)):
        return getattr(parameter, "main_param", parameter).detach().float()
    part, held = _part(optimizer, parameter)
    return _whole(parameter, part, held.get(WEIGHT))


def _data_parallel_group(parameter: torch.nn.Parameter) -> torch.distributed.ProcessGroup:
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _forward(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    return batch.forward(model), partial(_loss, batch)


def _loss(batch: Batch, output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = batch.loss(output)
    # The schedule multiplies the first by the context-parallel size, as for a sum that is averaged once more, and
    # divides it by the micro-batches, in place.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}
