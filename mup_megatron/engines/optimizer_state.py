"""What megatron-core's optimizers hold of a model: master weights, moments and groups, in any of their layouts.

Public names: `OptimizerState`, `main_weight`, `range_of`, `torch_optimizers`, `updates_done`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor

from mup_megatron.engines import WEIGHT, fully_sharded
from mup_megatron.engines.fully_sharded import own_part
from mup_megatron.engines.optim import MOMENTS, allocate, moment_shape
from mup_megatron.model.global_names import Named
from mup_megatron.model.parts import Part, holders
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization


class OptimizerState:
    """One optimizer of `get_megatron_optimizer`, whoever built it, parameter by parameter.

    Args:
        optimizer: megatron-core's.
        named: this rank's parameters by global name.
        table: of the run.
        layout: how ranks split the model.
    """

    def __init__(self, optimizer: Any, named: Named, table: Parametrization, layout: Layout) -> None:
        self._optimizer, self.named, self._layout = optimizer, named, layout
        self._rows = {parameter: table.tensors[name] for name, parameter in named}
        self._layer_wise = any(kind.__name__ == "LayerWiseDistributedOptimizer" for kind in type(optimizer).__mro__)
        self._distributed = any(hasattr(each, _SPLIT) for each in self._holders)

    @torch.no_grad()
    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """What data-parallel ranks share of a parameter is put together; see engines.Engine."""
        if not parameter.requires_grad:  # no optimizer has it
            return {WEIGHT: fully_sharded.whole(parameter.detach().float())}
        if self._layer_wise:
            return self._gather_whole(parameter)
        if not self._distributed:
            main = getattr(parameter, "main_param", parameter)
            held = {WEIGHT: main.float(), **self._moments_of(main)}
            return {kind: fully_sharded.whole(value) for kind, value in held.items()}
        part, values = _part(self._optimizer, parameter)
        kinds = (WEIGHT, "exp_avg", "exp_avg_sq")  # megatron-core's distributed optimizer is AdamW's
        return {kind: _whole(parameter, part, values.get(kind)) for kind in kinds}

    def _gather_whole(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """From the data-parallel rank that steps the parameter to those that do not."""
        held, whole = self._own(parameter), {}
        for kind in (WEIGHT, *MOMENTS[self._rows[parameter].group.update_rule]):
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
        if self._distributed:
            maps = [(holder, holder.model_param_group_index_map) for holder in self._holders]
            return [holder.optimizer.param_groups[at[parameter][0]] for holder, at in maps if parameter in at] or None
        main = getattr(parameter, "main_param", parameter)
        groups = [group for holder in self._holders for group in holder.param_groups]
        found = [group for group in groups if any(each is main for each in group["params"])]
        return found or (None if self._layer_wise else [])

    @torch.no_grad()
    def prepare_state(self, kinds: Sequence[str], step: int) -> None:
        """Allocates moments of zero; see engines.Engine."""
        for holder in self._holders:
            allocate(holder.optimizer, [p for group in holder.param_groups for p in group["params"]], kinds, step)

    @torch.no_grad()
    def scatter(self, parameter: torch.nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Fills this rank's part; see engines.Engine."""
        if self._distributed:
            part, held = _part(self._optimizer, parameter)
            for kind, value in values.items() if part is not None else ():
                held[kind].copy_(value.view(-1)[part])
        elif self._layer_wise:
            for kind, own in self._own(parameter).items():
                own.copy_(values[kind])
        else:
            main = getattr(parameter, "main_param", parameter)
            held = {WEIGHT: main, **self._moments_of(main)}
            for kind, value in values.items():
                fully_sharded.fill(held[kind], value)
        fully_sharded.fill(parameter, values[WEIGHT])

    def weight_parts(self) -> list[Part]:
        """The elements of each parameter that this rank steps, as the optimizer keeps them; see engines.Engine."""
        return self._parts(self._weight_part)

    def gradient_parts(self) -> list[Part]:
        """Of each parameter's gradient what this rank has; see engines.Engine.

        Of the elements that other ranks of the distributed optimizer step, its buffer holds sums that no rank has put
        together; those are left out. Under fp16 the loss scale is divided out.
        """
        parts = self._parts(self._gradient_part)
        if all(getattr(holder, "grad_scaler", None) is None for holder in self._holders):
            return parts
        scale = self._optimizer.get_loss_scale()
        return [part._replace(values=part.values / scale) for part in parts]

    def _parts(self, part_of: Callable[[str, torch.nn.Parameter, int], Part | None]) -> list[Part]:
        held = ((name, parameter, self._rows[parameter].shape.spec) for name, parameter in self.named)
        found = [part_of(name, parameter, holders(spec, self._layout)) for name, parameter, spec in held]
        return [part for part in found if part is not None]

    def _weight_part(self, name: str, parameter: torch.nn.Parameter, holders: int) -> Part | None:
        if not parameter.requires_grad:
            return None
        if self._layer_wise:
            own = self._own(parameter)
            return Part(name, own[WEIGHT].detach()) if own else None
        if self._distributed:
            part, held = _part(self._optimizer, parameter)
            return None if part is None else Part(name, held[WEIGHT].detach().view(-1), part.start)
        main = getattr(parameter, "main_param", parameter).detach()
        return own_part(name, main) if isinstance(main, DTensor) else Part(name, main, holders=holders)

    def _gradient_part(self, name: str, parameter: torch.nn.Parameter, holders: int) -> Part | None:
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = parameter.grad
        if gradient is None:
            return None
        if isinstance(gradient, DTensor):
            return own_part(name, gradient)
        if not self._distributed:
            return Part(name, gradient, holders=holders)
        part = range_of(self._optimizer, parameter)
        return None if part is None else Part(name, gradient.view(-1)[part], part.start)

    @property
    def _holders(self) -> list[Any]:
        """megatron-core's optimizers, one for the dense parameters and one for the experts."""
        return _holders_of(self._optimizer)

    def _moments_of(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        states = (holder.optimizer.state for holder in self._holders)
        return _moments(next((state[main] for state in states if main in state), {}))


def _moments(state: Any) -> dict[str, torch.Tensor]:
    """What an optimizer keeps of a parameter, element by element."""
    return {kind: value for kind, value in state.items() if torch.is_tensor(value) and kind != "step"}


_SPLIT = "model_param_gbuf_map"


def _holders_of(optimizer: Any) -> list[Any]:
    """The optimizers that one of megatron-core's is a chain of, or itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _holder_of(optimizer: Any, parameter: torch.nn.Parameter) -> Any:
    """The distributed optimizer that holds elements of a parameter on this rank; None where none does."""
    return next((each for each in _holders_of(optimizer) if parameter in getattr(each, _SPLIT, ())), None)


def range_of(optimizer: Any, parameter: torch.nn.Parameter) -> slice | None:
    """Which elements of a parameter this rank's distributed optimizer holds; None where it holds none."""
    if (holder := _holder_of(optimizer, parameter)) is None:
        return None
    where = holder._get_model_param_range_map(parameter)["param"]
    return slice(where.start, where.end)


def _part(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[slice | None, dict[str, torch.Tensor]]:
    """Which elements of a parameter this rank's distributed optimizer holds, and what it holds of them."""
    if (holder := _holder_of(optimizer, parameter)) is None:
        return None, {}
    held = holder._get_main_param_and_optimizer_states(parameter)
    return range_of(optimizer, parameter), {WEIGHT: held.pop("param"), **_moments(held)}


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
    if not any(hasattr(each, _SPLIT) for each in _holders_of(optimizer)):
        return getattr(parameter, "main_param", parameter).detach().float()
    part, held = _part(optimizer, parameter)
    return _whole(parameter, part, held.get(WEIGHT))


def torch_optimizers(optimizer: Any) -> list[Any]:
    """Those of torch's kind that one of megatron-core's or DeepSpeed's steps with."""
    return [getattr(holder, "optimizer", holder) for holder in _holders_of(optimizer)]


def updates_done(optimizer: Any) -> int:
    """How many updates an Adam of megatron-core's, torch's, Apex's or Transformer Engine's counts; 0 at first."""
    steps = [0]
    for inner in torch_optimizers(optimizer):
        steps += [int(group.get("step", 0)) for group in inner.param_groups]
        steps += [int(state.get("step", 0)) for state in inner.state.values()]
    return max(steps)


def _data_parallel_group(parameter: torch.nn.Parameter) -> torch.distributed.ProcessGroup:
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()
