"""What the tests of `mup_megatron.bridge` run on ranks: a recipe, from its container to trained weights."""

from __future__ import annotations

import contextlib
import importlib
import io
from inspect import signature
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from mup_megatron.megatron_training.options import prepare
from mup_megatron.parallel.ranks import Rank
from mup_megatron.patches.cpu import seed_generators
from tests.bridge.recipes import BASE, RECIPES, ROWS
from tests.helpers import megatron_faults

LENGTH, STEPS = 16, 4


def start(rank: Rank, recipe: str, mup: dict[str, Any] | None, **changed: Any) -> Any:
    """The container, behind `apply_mup` where `mup` is given; process groups of its layout."""
    prepare()
    config = RECIPES[recipe](**changed)
    core = getattr(config.model, "transformer", config.model)
    parallel_state.initialize_model_parallel(
        core.tensor_model_parallel_size,
        core.pipeline_model_parallel_size,
        core.virtual_pipeline_model_parallel_size,
    )
    seed_generators(7, tensor=parallel_state.get_tensor_model_parallel_rank(), expert=0, expert_tensor=0)
    torch.manual_seed(7)
    if mup is not None:
        _apply(config, recipe, **mup)
    if recipe == "bridge":
        config.validate()
    return config


def _apply(config: Any, recipe: str, base: Any, **options: Any) -> None:
    if recipe == "bridge":
        from mup_megatron.bridge import apply_mup

        apply_mup(config, base, **options)
        return
    from mup_megatron.bridge.run import put_into

    given: dict[str, Any] = {
        "record": None,
        "tensors": None,
        "allowed": (),
        "audit": "stop",
        "explain": False,
        "written": None,
    }
    given["sections"] = {name: options.pop(name, {}) for name in ("hparams", "parametrization")}
    put_into(config, base, **{**given, **options})


def build(config: Any, recipe: str) -> tuple[list[Any], Any, Any]:
    """Chunks, optimizer and scheduler: by Bridge's own functions, or by those of megatron-core that they call."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if recipe == "bridge":
        from megatron.bridge.training.optim import setup_optimizer

        chunks = config.model.provide_distributed_model(
            ddp_config=config.ddp,
            data_parallel_random_init=False,
            use_cpu_initialization=True,
            pg_collection=groups,
        )
        provider = config.optimizer_config_override_provider
        return chunks, *setup_optimizer(
            config.optimizer, config.scheduler, chunks, True, optimizer_config_override_provider=provider
        )
    from megatron.training.models.gpt import GPTModelBuilder

    chunks = GPTModelBuilder(config.model).build_distributed_models(
        groups, ddp_config=config.ddp, data_parallel_random_init=False
    )
    optimizer = get_megatron_optimizer(config.optimizer, chunks, config_overrides=_overrides(config, chunks))
    return chunks, optimizer, _scheduler(config, optimizer)


def _overrides(config: Any, chunks: list[Any]) -> Any:
    """As Bridge asks the container's provider, or its own where a container has none."""
    from types import SimpleNamespace

    from megatron.core.optimizer import get_standard_config_overrides

    provider = getattr(config, "optimizer_config_override_provider", None)
    if provider is None:
        return get_standard_config_overrides(config=config.optimizer)
    context = SimpleNamespace(scheduler_config=config.scheduler, optimizer_config=config.optimizer, model=chunks)
    return provider.build_config_overrides(context)


def _scheduler(config: Any, optimizer: Any) -> OptimizerParamScheduler:
    """As Bridge's `_get_scheduler` makes it."""
    schedule = config.scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=schedule.lr_warmup_steps,
        lr_decay_steps=schedule.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=schedule.wd_incr_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
    )


def trained(
    rank: Rank,
    *,
    recipe: str = "megatron",
    mup: dict[str, Any] | None = None,
    initial: dict[str, np.ndarray] | None = None,
    one_rate: bool = False,
    **changed: Any,
) -> dict[str, Any]:
    """Trains a recipe.

    Args:
        rank: where.
        recipe: which.
        mup: what `apply_mup` is given; None for the plain run.
        initial: values by parameter to start from, instead of those that are drawn.
        one_rate: whether the scheduler sets one rate on every group.
        changed: fields of the TransformerConfig.

    Returns:
        Exit status, what was said, losses to the last bit, values at the start and at the end, groups by parameter
        before the first step and their rates at every step.
    """
    out, err, status = io.StringIO(), io.StringIO(), 0
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            config = start(rank, recipe, mup, **changed)
            chunks, optimizer, scheduler = build(config, recipe)
            if one_rate:
                scheduler.step = megatron_faults.one_rate(scheduler.step, optimizer)
            found = _train(config, chunks, optimizer, scheduler, initial)
        except SystemExit as leaving:
            status = int(leaving.code or 0)
            if not torch.distributed.is_initialized():  # explained: the process would have ended here
                torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {**found, "status": status, "said": err.getvalue(), "printed": out.getvalue()}


def _train(
    config: Any, chunks: list[Any], optimizer: Any, scheduler: Any, initial: dict[str, np.ndarray] | None
) -> dict[str, Any]:
    core = getattr(config.model, "transformer", config.model)
    core.finalize_model_grads_func, core.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    named = [pair for chunk in chunks for pair in chunk.module.named_parameters()]
    if initial is not None:
        assert {name for name, _ in named} == set(initial)
        for name, parameter in named:
            parameter.data.copy_(torch.from_numpy(initial[name]))
        optimizer.reload_model_params()
    names = {id(parameter): name for name, parameter in named}
    found: dict[str, Any] = {"initial": values(chunks), "groups": groups(optimizer, names), "losses": [], "rates": []}
    for step in range(STEPS):
        found["rates"].append({name: group["lr"] for name, group in groups(optimizer, names).items()})
        found["losses"] += one_step(chunks, optimizer, scheduler, step)
    return {**found, "final": values(chunks)}


def one_step(chunks: list[Any], optimizer: Any, scheduler: Any, number: int) -> list[float]:
    """One update from the step's own tokens; the losses of this rank's micro-batches."""
    ranks, mine = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batch = torch.randint(ROWS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(100 + number))
    pieces = [iter(batch.split(2)[mine::ranks]) for _ in chunks]  # each chunk of interleaved stages takes its own
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=pieces if len(chunks) > 1 else pieces[0],
        model=chunks,
        num_microbatches=2 // ranks,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()
    scheduler.step(increment=4)
    return [float(loss["loss"]) for loss in losses]


def _forward(pieces: Any, model: Any) -> Any:
    tokens = next(pieces)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    losses = model(
        tokens[:, :-1].contiguous(), torch.arange(LENGTH)[None].expand(2, LENGTH), mask, labels=tokens[:, 1:]
    )
    return losses, _mean


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.item()}


def groups(optimizer: Any, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Of every parameter, what its group says."""
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in names
    }


def values(chunks: list[Any]) -> dict[str, np.ndarray]:
    """Of every parameter of this rank."""
    pairs = [pair for chunk in chunks for pair in chunk.module.named_parameters()]
    return {name: parameter.detach().float().numpy().copy() for name, parameter in pairs}


def resumed(rank: Rank, *, folder: str, ways: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Bridge's own checkpoint manager: the first way saves after two steps, the others load.

    Args:
        rank: where.
        folder: of the checkpoints.
        ways: arguments of `start`, of one run after the other; `skipped` saves nothing.

    Returns:
        Exit status and what was said, by way; status 0 means that the checkpoint was loaded.
    """
    return [_resume(rank, folder, number, **way) for number, way in enumerate(ways)]


def _resume(
    rank: Rank, folder: str, number: int, mup: dict[str, Any] | None, skipped: bool = False, **changed: Any
) -> tuple[int, str]:
    if skipped:  # what was saved before is loaded
        return 0, ""
    prepare()  # before Bridge takes functions by name that only compute on CUDA
    from megatron.bridge.training.checkpointing import (
        CheckpointLoadContext,
        CheckpointSaveContext,
        DefaultCheckpointManager,
        create_checkpoint_manager,
    )
    from megatron.bridge.training.state import GlobalState
    from megatron.core.num_microbatches_calculator import (
        destroy_num_microbatches_calculator,
        init_num_microbatches_calculator,
    )

    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            config = start(rank, "bridge", mup, save=folder, **changed)
            state = GlobalState()
            state.cfg = config
            init_num_microbatches_calculator(rank.rank, None, 4, 2, 1)
            manager = create_checkpoint_manager(config.checkpoint)
            chunks, optimizer, scheduler = build(config, "bridge")
            context = {"state": state, "model": chunks, "optimizer": optimizer, "opt_param_scheduler": scheduler}
            if number:
                config.checkpoint.load_optim = mup is not None  # a plain optimizer has other groups
                manager.load(CheckpointLoadContext(**context))
            else:
                for step in range(2):
                    one_step(chunks, optimizer, scheduler, step)
                state.train_state.step = 2
                callbacks = [None] if "callback_manager" in signature(DefaultCheckpointManager.save).parameters else []
                manager.save(CheckpointSaveContext(**context, num_floating_point_operations_so_far=0), *callbacks)
        except SystemExit as leaving:
            return int(leaving.code or 0), err.getvalue()
        finally:
            destroy_num_microbatches_calculator()
            parallel_state.destroy_model_parallel()
    return 0, err.getvalue()


def explained(
    rank: Rank, *, folder: str, module: str, name: str, hub: str, family: str, sizes: dict[str, Any]
) -> dict[str, Any]:
    """A recipe of Bridge's from half its hidden size, up to the model on the meta device.

    Args:
        rank: where.
        folder: takes the place of the model hub.
        module: of `megatron.bridge.recipes`.
        name: of the recipe, without what all of them end with.
        hub: name of the model whose config the recipe reads.
        family: of transformers, whose config is written under that name.
        sizes: in it.

    Returns:
        Exit status, what was said and what was printed.
    """
    import transformers
    from megatron.bridge.training.config import runtime_config_update

    from mup_megatron.bridge import apply_mup
    from tests.helpers.transformer_engine import buildable

    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        kind = getattr(transformers, f"{family}Config")
        kind(architectures=[f"{family}ForCausalLM"], **sizes).save_pretrained(hub)
        config = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), f"{name}_pretrain_config")()
        model = config.model
        # One process, and neither Apex nor CUDA's streams and dispatchers.
        config.comm_overlap, model.gradient_accumulation_fusion = None, False
        model.tensor_model_parallel_size = model.pipeline_model_parallel_size = model.context_parallel_size = 1
        model.expert_model_parallel_size = model.expert_tensor_parallel_size = 1
        model.virtual_pipeline_model_parallel_size = model.pipeline_model_parallel_layout = None
        model.sequence_parallel = model.moe_shared_expert_overlap = False
        if model.num_moe_experts:
            model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None
        parallel_state.initialize_model_parallel()
        seed_generators(7, tensor=0, expert=0, expert_tensor=0)
        try:
            apply_mup(config, {"hidden_size": model.hidden_size // 2}, explain=True)
            with buildable(meta=True):
                runtime_config_update(config)
                model.provide_distributed_model(
                    ddp_config=config.ddp,
                    data_parallel_random_init=False,
                    use_cpu_initialization=True,
                    pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
                )
        except SystemExit as leaving:
            status = int(leaving.code or 0)
            if not torch.distributed.is_initialized():  # explained: the process would have ended here
                torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {"status": status, "said": err.getvalue(), "printed": out.getvalue()}


def audited(
    rank: Rank, *, faults: tuple[str, ...], base: dict[str, Any] | None = None, **changed: Any
) -> dict[str, Any]:
    """A recipe of megatron-core's own container, trained with faults in it; what its audit finds."""
    recomputed: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    mup = {
        "base": {**BASE, **(base or {})},
        "audit": "warn",
        "hparams": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    }
    spoils = megatron_faults.ONE_RATE in faults
    with megatron_faults.planted(rank, faults) as audits:
        found = trained(rank, mup=mup, one_rate=spoils, **recomputed, **changed)
    (audit,) = audits
    wrong = [str(finding) for finding in audit.wrong]
    return {"wrong": wrong, "unseen": audit.unseen, **{name: found[name] for name in ("status", "said", "printed")}}
