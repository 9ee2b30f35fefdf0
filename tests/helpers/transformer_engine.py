"""Transformer Engine's modules on a machine without a GPU: there they can be built, and compute nothing.

They ask for CUDA where they are made, so it counts as there while a model is built. `./dev te` makes an environment
that has them; elsewhere the tests that need them are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from mup_megatron.config import Config, Model, derive
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.as_built.build import builds_of, join_builds, parametrize_builds
from mup_megatron.model.as_built.chunks import BuiltModel
from mup_megatron.model.build import build_model, check_specs, initialise, parametrize
from mup_megatron.model.global_names import named_parameters
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.rules.table import Parametrization
from tests.helpers import bodies
from tests.helpers.breakages import replaced
from tests.model.as_built.given import given_of

TE = "transformer_engine"
found = importlib.machinery.PathFinder.find_spec(TE)  # which looks past sys.modules, where it may be hidden
installed = pytest.mark.skipif(found is None, reason="Transformer Engine is not installed (./dev te)")
MARKS = {"tensor_model_parallel": False, "partition_dim": -1, "sequence_parallel": False, "allreduce": True}


def prepare_with_it() -> None:
    """As for any rank, but for what would hide it: imported already it stays, and with it its norm of gradients."""
    import megatron.core.optimizer.clip_grads  # noqa: F401

    upstream.prepare_process()


def chosen(config: Config, *, grouped: bool = False) -> Config:
    """The config with Transformer Engine's kernels, which no machine without CUDA resolves to; experts `grouped`."""
    keys = {f"model.{key}": TE for key in Model.PLAIN_KERNELS}
    return derive(config, {**keys, "model.moe_grouped_gemm": grouped})


@contextlib.contextmanager
def buildable(*, meta: bool = False) -> Iterator[None]:
    """CUDA counts as there; on the meta device its device has a number too, where nothing is put."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, "is_available", lambda: True))
        if meta:
            stack.enter_context(replaced(torch.cuda, "current_device", lambda: 0))
        yield


def recorded(rank: Rank, *, config: Config, kernels: str = "local", grouped: bool = False) -> dict[str, Any]:
    """Builds the model with shims, of Transformer Engine's modules or not; experts in one module or not."""
    config, layout, parametrization, model = bodies.start(rank, config)
    if kernels != "local":
        config = chosen(config, grouped=grouped)
        parametrization = parametrize(config, prepare(config).vocab_size)
        with buildable():
            model = build_model(parametrization, layout, rank.rank, torch.device("cpu"))
    return _seen(model, parametrization)


def benchmarked(rank: Rank, *, kernels: str) -> dict[str, Any]:
    """Builds the model whose losses benchmarks/gpu.py compares."""
    from benchmarks import gpu

    layout = resolve_layout(resolve_auto(gpu._config(parallel={"zero_stage": 1})), 1)
    runtime.start_distributed(layout, rank, 1)
    with buildable():
        config = gpu._config(parallel={"zero_stage": 1}, training={"precision": "fp32"}, model=gpu.KERNELS[kernels])
        parametrization = parametrize(config, 512)
        return _seen(build_model(parametrization, layout, 0, torch.device("cpu")), parametrization)


def as_built(rank: Rank, *, config: Config, grouped: bool = False, change: Any = None) -> dict[str, Any]:
    """Builds the model of upstream's own specs of Transformer Engine's modules, its arguments changed by `change`."""
    config = resolve_auto(config)
    layout = resolve_layout(config, rank.world_size)
    runtime.start_distributed(layout, rank, config.run.seed)
    config = chosen(config, grouped=grouped)
    given = given_of(config, config.model.padded_vocab_size(prepare(config).vocab_size), layout, rank.rank)
    if change is not None:
        change(given)
    return _seen(*_construct(rank, config, layout, given))


def hybrid(rank: Rank, *, config: Config, pattern: str, kernels: str) -> dict[str, Any]:
    """Builds a HybridModel: upstream's own stack of Transformer Engine's modules, or one of local layers."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from tests.model.as_built.hybrid_stack import local_stack

    config = resolve_auto(config)
    layout = resolve_layout(config, rank.world_size)
    runtime.start_distributed(layout, rank, config.run.seed)
    given = given_of(config, config.model.padded_vocab_size(prepare(config).vocab_size), layout, rank.rank)
    core = given["config"]
    core.is_hybrid_model, core.moe_grouped_gemm = True, kernels == TE
    for name in ("transformer_layer_spec", "mtp_block_spec"):
        del given[name]
    stack = hybrid_stack_spec if kernels == TE else local_stack
    given |= {"hybrid_stack_spec": stack, "hybrid_layer_pattern": pattern, "vp_stage": None}
    return _seen(*_construct(rank, config, layout, given, kind=HybridModel))


def _construct(
    rank: Rank,
    config: Config,
    layout: Layout,
    given: dict[str, Any],
    kind: Any = GPTModel,
) -> tuple[list[Any], Parametrization]:
    built, model = BuiltModel(config), kind.__new__(kind)
    with buildable(meta=True):
        parametrization = built.parametrize(given, layout.stages[layout.pipeline_rank(rank.rank)][0], first=True)
    with buildable():
        built.construct(kind.__init__, model, given, parametrization, layout)
    check_specs(model, parametrization, layout, rank.rank, 0)
    initialise(model, parametrization, layout, rank.rank)
    return [model], built.finish()


def _seen(model: list[Any], parametrization: Parametrization) -> dict[str, Any]:
    """Values, what upstream reads of the parameters, what the rules give each of them, and whose modules they are."""
    return {
        "values": bodies.values(model),
        "marks": {
            name: [getattr(parameter, mark, default) for mark, default in MARKS.items()]
            for name, parameter in named_parameters(model)
        },
        "rows": _rows(parametrization, [name for name, _ in named_parameters(model)]),
        "modules": {base.__module__ for part in model[0].modules() for base in type(part).__mro__},
        "classes": {type(part).__name__ for part in model[0].modules()},
    }


def _rows(parametrization: Parametrization, names: Iterable[str] | None = None) -> dict[str, Any]:
    """What a table says of each tensor, or of those that are named."""
    table = parametrization.tensors
    rows = {name: table[name] for name in (table if names is None else names)}
    return {name: (row.group, row.init_std, row.shape.infshape, row.shape.spec) for name, row in rows.items()}


def table(rank: Rank, *, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of the model with shims, and of upstream's own specs of Transformer Engine's modules, on the meta device."""
    config = resolve_auto(config)
    vocabulary = config.model.padded_vocab_size(prepare(config).vocab_size)
    plain, config = parametrize(config, vocabulary), chosen(config)
    given = given_of(config, vocabulary)
    with buildable(meta=True):
        built = parametrize_builds(config, join_builds([builds_of(config, given, range(config.model.num_layers))]))
    return _rows(plain), _rows(built)
