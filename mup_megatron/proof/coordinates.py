"""Sizes of activations, gradients, weights and updates of one model that takes a few steps on one batch, on all ranks.

Public names: `Coordinates`, `Probe`, `measure`. The size of a tensor is the mean absolute value of its
elements. Each rank adds up the absolute values of the elements that it holds, and counts them; then sums and counts are
added over all ranks. Ranks may hold parts of a tensor (tensor, sequence, context, pipeline and data parallelism) or
copies of it. Both give the mean over the whole tensor, because every element has the same number of copies. Copies that
tensor-parallel ranks hold of a parameter are compared, since a mean over them hides that they differ.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule

from mup_megatron.data.batch import Batch
from mup_megatron.engines import WEIGHT, Engine, build_engine
from mup_megatron.engines.state import load_state, load_weights, save_state
from mup_megatron.model.build import build_model
from mup_megatron.model.global_names import named_modules, named_parameters
from mup_megatron.model.init import local_rows
from mup_megatron.parallel.layout import Layout
from mup_megatron.proof.check import Check
from mup_megatron.proof.family import Member
from mup_megatron.proof.names import part_name
from mup_megatron.proof.regimes import REGIMES
from mup_megatron.proof.sums import Ranges, Sums, of_all_ranks
from mup_megatron.rules.shapes import TensorSpec
from mup_megatron.rules.table import Parametrization
from mup_megatron.telemetry.hooks import attention_hook, measured_modules, router_hook

QUANTITIES = ("output", "change", "gradient")
"""What is measured of a module: its output, the change of the output since step 0, and the gradient of the loss with
respect to the output."""

RANGES = ("weight", "output", "gradient", "weight_gradient")
"""Of what ranges are measured: a parameter, a module's output, and the gradients of the loss by each, as the backward
pass of one rank and micro-batch has them."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Sizes in one model, one entry per step from 0; NaN where there was nothing to measure.

    Args:
        modules: by quantity (`QUANTITIES`), then by the module's global name: sizes before each step.
        initial: by part of a parameter (names.py): the size of its initial values.
        updates: by part of a parameter: the size of what each step added to it.
        copies: by part of a parameter that tensor-parallel ranks hold copies of: how far the copies are from the first
            rank's after each step.
        losses: nats per token, before each step.
        silent: modules that have parameters and whose forward ran on no rank, so that nothing was measured of them.
        ranges: where they were asked for, by quantity (`RANGES`), then by global name: `sums.COLUMNS` before the first
            step and after the last.
    """

    modules: dict[str, dict[str, list[float]]]
    initial: dict[str, float]
    updates: dict[str, list[float]]
    copies: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    ranges: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)


def measure(
    member: Member,
    parametrization: Parametrization,
    rank: int,
    device: torch.device,
    batch: Sequence[Batch],
    asked: Check,
) -> Coordinates:
    """Builds a model of the family, trains it on one batch, and measures every module at every step. Collective.

    Needs megatron-core's parallel_state (runtime.start_distributed).

    Args:
        member: config and layout; every `auto` of the config resolved.
        parametrization: of the same model; a negative control's has one rule broken.
        rank: global rank of this process.
        device: where the model lives.
        batch: this rank's micro-batches of the global batch that every step takes.
        asked: sizes are measured before each step and after the last, and ranges of values before the first and after
            the last. Where the regime resumes, half way the state is saved, and another model and optimizer go on from
            the saved files.

    Raises:
        UserError: the config's engine does not have the layout.
    """
    config, layout, steps = member.config, member.layout, asked.steps
    resumes = REGIMES[asked.in_regime].resumes
    chunks = build_model(parametrization, layout, rank, device)
    # Copies weights before the engine partitions them.
    probe = Probe(parametrization, layout, rank, device, chunks, ranges=(0, steps) if asked.ranges else ())
    engine = build_engine(member.setup, parametrization, chunks)
    try:
        probe.watch(engine.chunks)
        for step in range(steps + 1):
            if resumes and step == max(1, steps // 2):
                engine = _resumed(engine, member, parametrization, rank, device, step)
                probe.watch(engine.chunks)
            probe.begin(step)
            probe.losses.append(engine.step(batch, config.hparams.lr).loss)
            if step == steps:
                break
            probe.updated(step, engine.gather)
    finally:
        probe.close()
        engine.close()
    return probe.coordinates(steps)


class Probe:
    """Looks at one model while somebody trains it: `begin` before each step, `updated` after it. Collective.

    Args:
        parametrization: of the model.
        layout: how ranks split it.
        rank: global rank of this process.
        device: where the model lives.
        chunks: this rank's part, with its initial values.
        ranges: steps before which ranges of values are measured too.
    """

    def __init__(
        self,
        parametrization: Parametrization,
        layout: Layout,
        rank: int,
        device: torch.device,
        chunks: Sequence[LanguageModule],
        ranges: Sequence[int] = (),
    ) -> None:
        self._layout, tensors = layout, parametrization.tensors
        self._trained = {name: held for name, held in named_parameters(chunks) if not tensors[name].shape.spec.frozen}
        self._weights = {name: held.detach().float().clone() for name, held in self._trained.items()}
        self._specs = {name: tensors[name].shape.spec for name in self._trained}
        self._thetas = {name: float(tensors[name].theta) for name in self._trained}
        self._cut = {name: _rows(spec, layout, rank, device) for name, spec in self._specs.items()}
        self._initial, self._updates, self._copies = Sums(), Sums(), Sums()
        for name, weight in self._weights.items():
            for part, values in self._parts(name, weight):
                self._initial.add(part, values)
        self._recorder = _Recorder(gradient_scale=1.0 / (layout.data * layout.context), ranges=ranges)
        self.losses: list[float] = []
        """Nats per token, before each step."""

    def watch(self, chunks: Sequence[LanguageModule]) -> None:
        """Hooks every module of this rank's part; of a model that goes on from another one's state too."""
        named = dict(named_parameters(chunks))
        self._trained = {name: named[name] for name in self._trained}
        self._recorder.watch(named_modules(chunks), attention_logits=self._layout.context == 1)
        for name, parameter in self._trained.items():
            self._recorder.watch_gradient(name, parameter)

    def begin(self, step: int) -> None:
        """What is measured from now on is of this step."""
        self._recorder.begin(step)
        for name, weight in self._weights.items():
            self._recorder.see_range("weight", name, weight)

    def updated(self, step: int, gather: Callable[[torch.nn.Parameter], Mapping[str, Any]]) -> None:
        """Measures what a step added to every parameter.

        Args:
            step: that was taken.
            gather: this rank's whole slice of a parameter, by `WEIGHT`, as `Engine.gather` says it.
        """
        for name, parameter in self._trained.items():
            held = gather(parameter)[WEIGHT]  # None where no optimizer group of this rank has it (ZeRO 1, 2)
            weight = self._weights[name] if held is None else held.detach().float().clone()
            for part, values in self._parts(name, weight - self._weights[name]):
                self._updates.add((part, step), values)
            self._weights[name] = weight
            for part, values in self._from_the_first(name, weight):
                self._copies.add((part, step), values)

    def _parts(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of a parameter, or of what was added to it, by block, as its layer multiplies with it."""
        values = weight * self._thetas[name]
        for block, rows in self._cut[name].items():
            yield part_name(name, block), values[rows]

    def _from_the_first(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """How far this rank's copy is from the first tensor-parallel rank's, by part; none where it is a slice."""
        spec = self._specs[name]
        if spec.partition_dim is not None or self._layout.slice_of(spec, 0)[1] == 1:
            return
        state = parallel_state
        group = state.get_expert_tensor_parallel_group() if spec.expert else state.get_tensor_model_parallel_group()
        first = weight.clone()
        torch.distributed.broadcast(first, torch.distributed.get_global_rank(group, 0), group=group)
        yield from self._parts(name, weight - first)

    def close(self) -> None:
        """Takes the hooks out."""
        self._recorder.close()

    def coordinates(self, steps: int) -> Coordinates:
        """What was measured, over all ranks.

        Args:
            steps: that were taken, and looked at.
        """
        recorder = self._recorder
        modules: dict[str, dict[str, list[float]]] = {quantity: {} for quantity in QUANTITIES}
        for (quantity, name, step), size in recorder.sums.means().items():
            modules[quantity].setdefault(name, [math.nan] * (steps + 1))[step] = size
        ranges: dict[str, dict[str, list[list[float]]]] = {}
        for (quantity, name, _), told in sorted(recorder.ranges.told().items(), key=lambda held: held[0][2]):
            ranges.setdefault(quantity, {}).setdefault(name, []).append(told)
        return Coordinates(
            modules=modules,
            initial=self._initial.means(),
            updates=_by_step(self._updates.means(), steps),
            copies=_by_step(self._copies.means(), steps),
            losses=self.losses,
            silent=_silent_everywhere(recorder.silent, recorder.fired),
            ranges=ranges,
        )


def _by_step(sizes: Mapping[tuple[str, int], float], steps: int) -> dict[str, list[float]]:
    """By name, an entry per step."""
    found: dict[str, list[float]] = {}
    for (name, step), size in sizes.items():
        found.setdefault(name, [math.nan] * steps)[step] = size
    return found


def _resumed(
    engine: Engine, member: Member, parametrization: Parametrization, rank: int, device: torch.device, step: int
) -> Engine:
    """Another engine that goes on from what this one saves. Collective."""
    layout = member.layout
    where: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        where[0] = tempfile.mkdtemp(prefix="mup-megatron-coord-check-")
    torch.distributed.broadcast_object_list(where)
    directory = Path(where[0])
    save_state(engine, parametrization, layout, rank, directory)
    torch.distributed.barrier()
    engine.close()
    chunks = build_model(parametrization, layout, rank, device)
    load_weights(chunks, parametrization, layout, rank, directory)
    resumed = build_engine(member.setup, parametrization, chunks)
    load_state(resumed, parametrization, layout, rank, directory, step)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(directory)
    return resumed


def _rows(spec: TensorSpec, layout: Layout, rank: int, device: torch.device) -> dict[str | None, Any]:
    """The rows of each block in this rank's slice; all of them of a tensor that is one block."""
    if spec.fused is None:
        return {None: slice(None)}
    numbers: dict[str | None, float] = {block: number for number, block in enumerate(spec.fused.fan_outs)}
    slice_rank, slices = layout.slice_of(spec, rank)
    held = local_rows(spec, numbers, slice_rank, slices, device)
    return {block: (held == number).nonzero().flatten() for block, number in numbers.items()}


class _Recorder:
    """Adds up the outputs of modules (forward hooks) and the gradients of these outputs (tensor hooks).

    Args:
        gradient_scale: a rank's gradient times this is the gradient of the loss over the global batch.
        ranges: steps of which ranges are measured too.
    """

    def __init__(self, gradient_scale: float, ranges: Sequence[int]) -> None:
        self.sums, self.ranges = Sums(), Ranges()
        self._with_ranges = ranges
        self.fired: set[str] = set()
        self.silent: set[str] = set()
        self._scale = gradient_scale
        self._handles: list[Any] = []
        self._first: dict[tuple[str, int], torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._step = 0

    def watch(self, modules: Any, *, attention_logits: bool) -> None:
        """Hooks every module whose output tells something, and the inputs of core attention and routers."""
        for name, module in measured_modules(modules):
            if name.endswith("core_attention"):
                hook = attention_hook(name, self._see, attention_logits)
                self._handles.append(module.register_forward_pre_hook(hook))
            if name.endswith(".router"):
                self._handles.append(module.register_forward_pre_hook(router_hook(name, self._see)))
            if any(True for _ in module.parameters(recurse=False)):
                self.silent.add(name)
            self._handles.append(module.register_forward_hook(self._hook(name)))

    def watch_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Hooks the gradient of a parameter, where ranges are measured."""
        if self._with_ranges:
            hook = functools.partial(self.see_range, "weight_gradient", name)
            self._handles.append(parameter.register_hook(hook))

    def see_range(self, quantity: str, name: str, tensor: torch.Tensor, count: int | None = None) -> None:
        """Adds a tensor to a range, at the steps of which ranges are measured."""
        if self._step in self._with_ranges:
            self.ranges.add((quantity, name, self._step), tensor, count)

    def begin(self, step: int) -> None:
        """What is measured from now on is of this step."""
        self._step = step
        self._calls = defaultdict(int)

    def close(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._first.clear()

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            self.fired.add(name)
            tensor = output[0] if isinstance(output, tuple) and output else output
            if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.requires_grad:
                self._see(name, tensor)

        return hook

    def _see(self, name: str, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Adds up a tensor. `mask`, broadcast to its shape, is 0 at elements that do not count."""
        call = self._calls[name]
        self._calls[name] += 1
        step = self._step
        values = tensor.detach()
        count = values.numel() if mask is None else int(mask.expand_as(values).sum())
        seen = values if mask is None else values * mask
        self.sums.add(("output", name, step), seen, count)
        self.see_range("output", name, seen, count)
        if ".experts." not in name:  # an expert gets other tokens at every step, so its outputs cannot be compared
            if step == 0:
                self._first[name, call] = values.clone()
            elif (name, call) in self._first and self._first[name, call].shape == values.shape:
                change = values - self._first[name, call]
                self.sums.add(("change", name, step), change if mask is None else change * mask, count)
        if tensor.requires_grad:

            def add_gradient(gradient: torch.Tensor) -> None:
                self.sums.add(("gradient", name, step), gradient.float() * self._scale)
                self.see_range("gradient", name, gradient)

            tensor.register_hook(add_gradient)


def _silent_everywhere(watched: set[str], fired: set[str]) -> tuple[str, ...]:
    """Modules that have parameters and ran on no rank. Collective."""
    ranks = of_all_ranks((watched, fired))
    return tuple(sorted(set().union(*(held for held, _ in ranks)) - set().union(*(ran for _, ran in ranks))))
