"""Weights and optimizer state in files that know no layout: megatron-core's dist_checkpointing, keyed by global names.

Public names: `Saving`, `begin_state`, `save_state`, `state_bytes`, `load_state`, `load_weights`. saved_weights.py reads
the files without a model.

Both engines hand out, parameter by parameter, the whole of what they hold of this rank's slice (`Engine.gather`), and
take it back (`Engine.scatter`). What is written is the global tensor's slice under a key such as
`exp_avg.decoder.layers.3.mlp.linear_fc1.weight`: an optimizer's groups, flat buffers, partitions and rates leave no
trace, so that any layout, ZeRO stage, engine or peak rate can go on from it. These functions take the parametrization
and not a `Setup` alone, since a control's parametrization is not the one that its `Setup` makes.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch.distributed.checkpoint.api import CheckpointException

from mup_megatron.config import Optimizer
from mup_megatron.engines import WEIGHT, Engine
from mup_megatron.engines.optim import MOMENTS, SQUARES, moment_shape
from mup_megatron.engines.saved_weights import BUFFER, COMMON, damaged, saved_shapes
from mup_megatron.model.global_names import named_buffers, named_parameters
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import Init, TensorSpec
from mup_megatron.rules.table import Parametrization, TensorHyperparameters, is_copied
from mup_megatron.util.errors import UserError

# From 0.17 on megatron-core saves asynchronously by means of another package, where it is not told to use its own.
_OWN = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saving:
    """A state that is copied, and not yet written.

    Args:
        write: writes this rank's files, and returns them. Not collective: a thread can do it while the model trains.
        finish: writes the index of all ranks' files, once every rank's are written. Collective. Raises torch's
            CheckpointException where they could not be written on some rank.
    """

    write: Callable[[], list[Path]]
    finish: Callable[[], None]


def save_state(engine: Engine, parametrization: Parametrization, layout: Layout, rank: int, directory: Path) -> None:
    """Writes what the engine holds into an existing empty folder. Collective."""
    saving = begin_state(engine, parametrization, layout, rank, directory)
    saving.write()
    saving.finish()


def begin_state(engine: Engine, parametrization: Parametrization, layout: Layout, rank: int, directory: Path) -> Saving:
    """Copies what the engine holds, to be written into an existing empty folder. Collective.

    Each slice is written by one rank; data-parallel ranks, which all hold it, take turns.
    """
    shards: dict[str, ShardedTensor] = {}
    for number, (name, parameter) in enumerate(engine.named):
        spec = parametrization.tensors[name].shape.spec
        whole = engine.gather(parameter)
        copied = is_copied(name) and layout.pipeline_rank(rank) > 0
        if layout.writes(rank, spec, number) and not copied:
            for kind, value in whole.items():
                shards.update(_shards(f"{kind}.{name}", _copy(value), _spec_of(kind, spec), layout, rank))
    for number, (name, buffer) in enumerate(named_buffers(engine.chunks)):
        spec = _buffer_spec(buffer)
        if layout.writes(rank, spec, number):
            shards.update(_shards(f"{BUFFER}.{name}", _copy(buffer.float()), spec, layout, rank))
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    request = dist_checkpointing.save(shards, str(directory), strategy, async_sharded_save=True, **_OWN)
    # The rank, what it writes, and the queue that gets the outcome; none of them where it writes nothing.
    arguments = [*request.async_fn_args]
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()

    def write() -> list[Path]:
        if request.async_fn is None:
            return []
        _collecting(request.async_fn)(*arguments)
        return [Path(file) for file, _, _ in arguments[1]]

    def finish() -> None:
        for finalize in request.finalize_fns:
            finalize()
        if rank == 0 and not (directory / COMMON).is_file():
            # megatron-core 0.19 keeps what is common, which is nothing here, as bytes that it unpickles when it loads;
            # where there is a common.pt, as 0.16 writes it, it takes that, and safely.
            torch.save({}, directory / COMMON)

    return Saving(write=write, finish=finish)


def _collecting(write: Callable[..., Any]) -> Callable[..., Any]:
    """megatron-core's function that writes, without what switches the collector of cycles off while it runs: off it
    would be for the training steps beside it too, and what is written lies on the host."""
    if isinstance(write, partial):
        return partial(inspect.unwrap(write.func), *write.args, **write.keywords)
    return inspect.unwrap(write)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """In this process's memory, and its own there: the next step changes the tensor."""
    return value.detach().to("cpu", copy=True)


def state_bytes(parametrization: Parametrization, optimizer: Optimizer) -> int:
    """What `save_state` writes at least, by all ranks together: float32 weights and moments."""
    without = () if optimizer.momentum else ("sgd", "muon")
    return sum(
        4 * math.prod(moment_shape(kind, tensor.shape.spec.shape))
        for tensor in parametrization.tensors.values()
        for kind in (WEIGHT, *(() if tensor.group.update_rule in without else _moments(tensor)))
    )


def _moments(tensor: TensorHyperparameters) -> tuple[str, ...]:
    """What the optimizer keeps of a tensor, of which a frozen one has nothing."""
    return () if tensor.shape.spec.frozen else MOMENTS[tensor.group.update_rule]


def load_state(
    engine: Engine, parametrization: Parametrization, layout: Layout, rank: int, directory: Path, step: int
) -> None:
    """Reads weights and optimizer state into the engine, whatever layout wrote them. Collective.

    Args:
        engine: freshly built, on weights from `load_weights`.
        parametrization: of its model.
        layout: of this run.
        rank: of this process.
        directory: what `save_state` wrote.
        step: updates done, which Adam's bias correction counts.

    Raises:
        UserError: the files are damaged, hold anything but tensors, or lack some.
    """
    saved = saved_shapes(directory)
    kinds = sorted({key.partition(".")[0] for key in saved} - {BUFFER})
    engine.prepare_state(kinds, step)
    kept = {
        name: [kind for kind in kinds if kind in (WEIGHT, *_moments(tensor))]
        for name, tensor in parametrization.tensors.items()
    }
    for own in dict.fromkeys(map(tuple, kept.values())):
        names = [name for name, _ in engine.named if kept[name] == [*own]]
        specs = {name: parametrization.tensors[name].shape.spec for name in names}
        loaded = _load(directory, saved, specs, own, layout, rank)
        for name, parameter in engine.named:  # of which two may be one tensor
            if name in specs:
                engine.scatter(parameter, {kind: loaded[f"{kind}.{name}"] for kind in own})


@torch.no_grad()
def load_weights(
    chunks: list[LanguageModule],
    parametrization: Parametrization,
    layout: Layout,
    rank: int,
    directory: Path,
    left_out: Collection[str] = (),
) -> None:
    """Reads weights alone into a model, with what it keeps beside them, whatever layout wrote them. Collective.

    Args:
        chunks: this rank's part.
        parametrization: of the model.
        layout: of this run.
        rank: of this process.
        directory: what `save_state` wrote.
        left_out: global names of tensors that stay as they are.

    Raises:
        UserError: as for `load_state`.
    """
    saved = saved_shapes(directory)
    named = [(name, parameter) for name, parameter in named_parameters(chunks) if name not in left_out]
    specs = {name: parametrization.tensors[name].shape.spec for name, _ in named}
    loaded = _load(directory, saved, specs, [WEIGHT], layout, rank)
    for name, parameter in named:
        parameter.copy_(loaded[f"{WEIGHT}.{name}"])
    buffers = dict(named_buffers(chunks))
    specs = {name: _buffer_spec(buffer) for name, buffer in buffers.items()}
    loaded = _load(directory, saved, specs, [BUFFER], layout, rank)
    for name, buffer in buffers.items():
        buffer.copy_(loaded[f"{BUFFER}.{name}"])


def _spec_of(kind: str, spec: TensorSpec) -> TensorSpec:
    """What is known of what is kept of a tensor; SOAP's squares are whole on every rank that holds the tensor."""
    if kind not in SQUARES:
        return spec
    shape = moment_shape(kind, spec.shape)
    return dataclasses.replace(spec, shape=shape, partition_dim=None, partition_stride=1, fused=None)


def _buffer_spec(buffer: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(buffer.shape), fan_in=None, fan_out=0, init=Init.ZEROS)


def _load(
    directory: Path,
    saved: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, TensorSpec],
    kinds: Sequence[str],
    layout: Layout,
    rank: int,
) -> dict[str, torch.Tensor]:
    """This rank's slices by `kind.name`, float32 on the CPU; `saved` are the shapes that the folder says."""
    if not specs:
        return {}
    shards: dict[str, ShardedTensor] = {}
    for name, whole in specs.items():
        for kind in kinds:
            key, spec = f"{kind}.{name}", _spec_of(kind, whole)
            if saved.get(key) != spec.shape:
                found = f"of shape {list(saved[key])}" if key in saved else "missing"
                raise UserError(f"{directory}: {key} is {found}; expected {list(spec.shape)}")
            empty = torch.empty(spec.local_shape(layout.slice_of(spec, rank)[1]))
            shards.update(_shards(key, empty, spec, layout, rank))
    try:
        loaded = dist_checkpointing.load(shards, str(directory), validate_access_integrity=False)
    except (Exception, CheckpointException) as error:  # the files decide what: upstream checks next to nothing
        raise damaged(directory, error) from None
    result = {}
    for name, whole in specs.items():
        for kind in kinds:
            spec = _spec_of(kind, whole)
            pieces = [loaded[f"{kind}.{name}#{piece}"] for piece in range(spec.partition_stride)]
            result[f"{kind}.{name}"] = torch.cat(pieces, dim=spec.partition_dim or 0) if len(pieces) > 1 else pieces[0]
    return result


def _shards(
    key: str, value: torch.Tensor, spec: TensorSpec, layout: Layout, rank: int
) -> Iterator[tuple[str, ShardedTensor]]:
    """A slice as the contiguous pieces of the global tensor that it consists of (several where it is strided)."""
    offsets: list[tuple[int, int, int]] = []
    own, slices = layout.slice_of(spec, rank)
    pieces = [value]
    if spec.partition_dim is not None:
        pieces = list(value.chunk(spec.partition_stride, dim=spec.partition_dim))
    for number, piece in enumerate(pieces):
        if spec.partition_dim is not None:
            offsets = [(spec.partition_dim, own + number * slices, spec.partition_stride * slices)]
        yield f"{key}#{number}", ShardedTensor.from_rank_offsets(key, piece.contiguous(), *offsets)
