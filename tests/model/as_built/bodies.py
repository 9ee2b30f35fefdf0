"""What the tests of models as built run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.as_built.chunks import BuiltModel
from mup_megatron.model.as_built.tensors import Entry
from mup_megatron.model.build import check_specs, initialise
from mup_megatron.parallel import runtime
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.table import Parametrization
from tests.helpers import bodies
from tests.model.as_built import own_layers
from tests.model.as_built.given import given_of

Change = Callable[[dict[str, Any]], None]


def start(
    rank: Rank, config: Config, change: Change | None = None, entries: Sequence[Entry] = ()
) -> tuple[Config, Layout, Parametrization, list[GPTModel]]:
    """As `bodies.start`, but the model is what a script builds of upstream's own spec, changed by `change`."""
    config = resolve_auto(config)
    layout = resolve_layout(config, rank.world_size)
    runtime.start_distributed(layout, rank, config.run.seed)
    vocabulary = config.model.padded_vocab_size(prepare(config).vocab_size)
    built, chunks = BuiltModel(config, entries), []
    for chunk in range(layout.virtual_pipeline):
        given = given_of(config, vocabulary, layout, rank.rank, chunk)
        if change is not None:
            change(given)
        layers = layout.stages[layout.pipeline_rank(rank.rank)][chunk]
        parametrization = built.parametrize(given, layers, first=not chunk)
        model = GPTModel.__new__(GPTModel)
        built.construct(GPTModel.__init__, model, given, parametrization, layout)
        check_specs(model, parametrization, layout, rank.rank, chunk)
        chunks.append(model)
        initialise(model, parametrization, layout, rank.rank)
    parametrization = built.finish()
    return config, layout, parametrization, chunks


def trained(rank: Rank, *, config: Config, steps: int, **how: Any) -> dict[str, Any]:
    """Trains a model as built: initial values, losses, gradient norms and groups."""
    return _train(rank, steps, *start(rank, config, **how))


def recorded(rank: Rank, *, config: Config, steps: int) -> dict[str, Any]:
    """The same of the model with shims."""
    return _train(rank, steps, *bodies.start(rank, config))


def _train(
    rank: Rank, steps: int, config: Config, layout: Layout, parametrization: Parametrization, chunks: list[Any]
) -> dict[str, Any]:
    initial = bodies.values(chunks)
    engine = bodies.build_engine(config, parametrization, chunks, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    schedule = LearningRateSchedule(config.training, config.hparams.lr)
    results = [engine.step(batches[step], schedule(step)) for step in range(steps)]
    groups = {
        str(group["rule"]): [group["lr"], group.get("eps"), group["weight_decay"]]
        for group in engine.optimizer.param_groups
    }
    final = bodies.values(chunks)
    engine.close()
    return {
        "initial": initial,
        "final": final,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "groups": groups,
        "table": {name: (row.lr, row.eps, row.init_std) for name, row in parametrization.tensors.items()},
        "layers": {kind.__module__ for chunk in chunks for part in chunk.modules() for kind in type(part).mro()},
    }


def moved(rank: Rank, *, config: Config, entries: Sequence[Entry], steps: int) -> float:
    """Trains on one batch with `own_layers.extra_mlp`; RMS by which the extra layer's output of layer 1 moved."""
    config, layout, parametrization, chunks = start(rank, config, change=_extra, entries=entries)
    engine = bodies.build_engine(config, parametrization, chunks, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    seen: list[torch.Tensor] = []
    extra = chunks[0].decoder.layers[1].mlp.beside
    extra.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0].detach().clone()))
    for _ in range(steps + 1):
        engine.step(batches[0], config.hparams.lr)
    engine.close()
    return float((seen[-1] - seen[len(seen) // (steps + 1) - 1]).square().mean().sqrt())


def _extra(given: dict[str, Any]) -> None:
    given["transformer_layer_spec"] = own_layers.extra_mlp(given["config"])
