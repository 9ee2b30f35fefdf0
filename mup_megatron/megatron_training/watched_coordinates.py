"""What `coord-check --megatron` sees of a run: every module at every step on one batch, by the check's own probe.

Public names: `WatchedCoordinates`; `sees_training` (a decorator, which patches/megatron_training.py puts on).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mup_megatron import megatron_training
from mup_megatron.engines import WEIGHT
from mup_megatron.engines.optimizer_state import main_weight
from mup_megatron.megatron_training import watched
from mup_megatron.megatron_training.models import chunks_of
from mup_megatron.parallel.layout import Layout
from mup_megatron.proof.coordinates import Probe
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import write_whole


class WatchedCoordinates:
    """The probe of one run, from its first training step on.

    Args:
        steps: optimizer steps that are looked at.
        model: what `train_step` was given.
        parametrization: of the run.
        layout: of the run.
        ranges: whether ranges of values are measured too.
    """

    def __init__(
        self,
        steps: int,
        model: Sequence[Any],
        parametrization: Parametrization,
        layout: Layout,
        *,
        ranges: bool = False,
    ) -> None:
        chunks = chunks_of(model)
        device = next(chunks[0].parameters()).device
        self._steps, self._step = steps, 0
        at, rank = (0, steps) if ranges else (), torch.distributed.get_rank()
        self._probe = Probe(parametrization, layout, rank, device, chunks, ranges=at)
        self._probe.watch(chunks)
        self._batches: list[list[Any]] = []

    def begin(self, data_iterator: Any, micro_batches: int) -> None:
        """Before a step: the micro-batches of the first one come again."""
        iterators = [each for each in _listed(data_iterator) if each is not None]
        for number, iterator in enumerate(iterators):
            if self._step == 0:
                self._batches.append([next(iterator.iterable) for _ in range(micro_batches)])
            iterator.iterable = iter(self._batches[number])
        self._probe.begin(self._step)

    def end(self, loss: float | None, optimizer: Any) -> bool:
        """After a step.

        Args:
            loss: nats per token; None where this rank has none.
            optimizer: megatron-core's.

        Returns:
            Whether it was the last one that is looked at.
        """
        held = [loss]
        torch.distributed.broadcast_object_list(held, src=torch.distributed.get_world_size() - 1)
        self._probe.losses.append(float(held[0] if held[0] is not None else "nan"))
        if self._step == self._steps:
            self._probe.close()
            return True
        self._probe.updated(self._step, lambda parameter: {WEIGHT: main_weight(optimizer, parameter)})
        self._step += 1
        return False

    def write(self, path: Path) -> None:
        """Writes the measurements, from the first rank. Collective."""
        found = self._probe.coordinates(self._steps)
        if torch.distributed.get_rank() == 0:
            write_whole(path, json.dumps(dataclasses.asdict(found)))
        torch.distributed.barrier()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_looks: WatchedCoordinates | None = None


def sees_training(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """On `megatron.training.training.train_step`: a coordinate check looks at the model before, in and after it."""
    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def see(*args: Any, **kwargs: Any) -> Any:
        global _looks
        asked = watched.task()
        if asked is None or asked.kind != "coordinates":
            return train_step(*args, **kwargs)
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        given, run = signature.bind(*args, **kwargs).arguments, megatron_training.current()
        if _looks is None:
            if run is None:
                raise UserError("the script trains before Megatron's arguments were read; nothing can be checked")
            _looks = WatchedCoordinates(
                asked.steps, given["model"], run.parametrization, run.layout, ranges=asked.ranges
            )
        _looks.begin(given["data_iterator"], get_num_microbatches())
        result = train_step(*args, **kwargs)
        if _looks.end(watched.loss_of(result[0]) if result[0] else None, given["optimizer"]):
            _looks.write(Path(asked.path))
            watched.measured()
        return result

    return see
