"""megatron.training under µP (`mup-megatron run`, or a tree that patches/ has patched), and on a machine without CUDA.

`entry_patches` puts the calls of mup_megatron/megatron_training in their places at run time; the source diffs beside
this file put the same calls into a tree. They are handed in, for this package imports nothing of the rooms above it.
`TRAINING_PATCHES` are what megatron.training needs to run at all as the wheel ships it, and on a CPU.
`watch_patches` are what `tune --megatron` and `coord-check --megatron` see of the runs that it starts.
`ELSEWHERE_PATCHES` hold only while options are read that another machine will run (`--mup-explain`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .cpu import for_cpu, seed_generators
from .patch import Patch

_VERSIONS = ">=0.16.1,<0.21"


def entry_patches(entry: ModuleType) -> tuple[Patch, ...]:
    """The calls of the entry library, as wrapped symbols: what `mup-megatron run` applies and nothing else does.

    Args:
        entry: mup_megatron.megatron_training.
    """

    def patch(name: str, symbol: str, wrap: Callable[[Any], Any], why: str, lower_rung: str, **record: Any) -> Patch:
        return Patch(
            name=name,
            distribution="megatron-core",
            versions=_VERSIONS,
            symbol=symbol,
            parameters=record.pop("parameters", None),
            why=why,
            lower_rung=lower_rung,
            until="a script's own lines call mup_megatron.megatron_training, or megatron-core takes base shapes",
            when="always",
            wrap=wrap,
            **record,
        )

    reads = "the options are read, and values of a transfer record become Megatron's own, before they are checked"
    validates = {"parameters": ("args", "defaults"), "wrap": entry.reads_arguments, "why": reads}
    validates["lower_rung"] = "`args_defaults` is the script's argument, and sees no command line"
    return (
        patch(
            "mup-arguments",
            "megatron.training.arguments:add_megatron_arguments",
            entry.adds_arguments,
            "adds --mup-base, --mup-hparams, --mup-config and --mup-explain to Megatron's own parser",
            "`extra_args_provider` is the script's argument, and the script is not touched",
            parameters=("parser",),
        ),
        patch("mup-validate", "megatron.training.arguments:validate_args", needed=">=0.18", **validates),
        patch("mup-validate-0.17", "megatron.training.initialize:validate_args", needed="<0.18", **validates),
        patch(
            "mup-model",
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            entry.builds_model,
            "records, multipliers and layout-invariant initial values go into the model that the script builds",
            "`--spec` reaches the layers alone; embedding, readout and softmax scale are the constructor's, and every "
            "script's own model provider calls it",
        ),
        patch(
            "mup-hybrid-model",
            "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
            entry.builds_model,
            "what `mup-model` does to GPTModel, for the model of --hybrid-layer-pattern",
            "`--spec` reaches the stack alone; embedding, readout and softmax scale are the constructor's",
            needed=">=0.19",
        ),
        patch(
            "mup-optimizer",
            "megatron.training.training:get_megatron_optimizer",
            entry.builds_optimizer,
            "each tensor's rate, epsilon and decay, as `config_overrides`",
            "`get_megatron_optimizer_config`, which makes the overrides, sees no model",
        ),
        patch(
            "mup-optimizer-core",
            "megatron.core.optimizer:get_megatron_optimizer",
            entry.builds_optimizer,
            "what `mup-optimizer` does, for a script whose own loop takes megatron-core's function",
            "`config_overrides` is the script's argument, and the script is not touched",
        ),
        patch(
            "mup-save",
            "megatron.training.training:save_checkpoint",
            entry.saves_checkpoint,
            "writes base shapes, multipliers and hyperparameters beside a checkpoint's weights",
            "a checkpoint's common state holds arguments, and no hook adds to it",
        ),
        patch(
            "mup-load",
            "megatron.training.training:load_checkpoint",
            entry.loads_checkpoint,
            "a checkpoint of another parametrization does not go on as if it were this one's",
            "Megatron compares some sizes of the model alone",
        ),
    )


def watch_patches(watched: ModuleType, coordinates: ModuleType) -> tuple[Patch, ...]:
    """What whoever started a run sees of it: `tune --megatron` and its kin, and nobody else, apply these.

    Args:
        watched: mup_megatron.megatron_training.watched.
        coordinates: watched_coordinates beside it.
    """

    def patch(name: str, symbol: str, wrap: Callable[[Any], Any], why: str, lower_rung: str) -> Patch:
        return Patch(
            name=f"watch-{name}",
            distribution="megatron-core",
            versions=_VERSIONS,
            symbol=f"megatron.training.training:{symbol}",
            parameters=None,
            why=why,
            lower_rung=lower_rung,
            until="megatron.training has callbacks for steps and evaluations",
            when="always",
            wrap=wrap,
        )

    return (
        patch(
            "training",
            "train_step",
            coordinates.sees_training,
            "a coordinate check hooks the model that is trained, and has every step take one batch",
            "the script hands model, optimizer and data to nobody else",
        ),
        patch(
            "steps",
            "training_log",
            watched.sees_steps,
            "the loss of a step is only printed, rounded",
            "TensorBoard has it where the user turned it on, and late",
        ),
        patch(
            "evaluation",
            "evaluate",
            watched.sees_evaluation,
            "the loss of an evaluation is only printed, rounded",
            "`process_non_loss_data_func` is the script's argument, and sees no loss",
        ),
        patch(
            "results",
            "evaluate_and_print_results",
            watched.sees_results,
            "the evaluation behind the last step is a trial's result",
            "`evaluate` does not know whether its set is for validation or for the test",
        ),
        patch(
            "exit",
            "checkpoint_and_decide_exit",
            watched.decides_exit,
            "a trial that is stopped early leaves the loop on all ranks at one step",
            "--exit-interval is set before the first step, and knows no other trial",
        ),
    )


def _compiled_already(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(compile_helpers)
    def compile_unless_there() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_unless_there


def _nothing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    return nothing


def _stays(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cuda(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
    ) -> torch.Tensor:
        return self

    return cuda


def _cpu_state(_original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    return get_rng_state


def _set_cpu_state(_original: Callable[..., None]) -> Callable[..., None]:
    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.set_rng_state(new_state)

    return set_rng_state


def _no_architecture(original: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(original)
    def get_device_arch_version() -> int:
        return 10

    return get_device_arch_version


def _also_the_tracker(set_random_seed: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_random_seed)
    def seed(seed_: int, *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        set_random_seed(seed_, *args, **kwargs)
        seed_generators(
            seed_ + 100 * parallel_state.get_pipeline_model_parallel_rank(),
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            expert=parallel_state.get_expert_model_parallel_rank(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        )

    return seed


def _warms_up_by_group(get_lr: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(get_lr)
    def of_group(self: Any, param_group: dict[str, Any]) -> float:
        begins_with = self.init_lr
        self.init_lr = begins_with * param_group.get("lr_multiplier", 1.0)
        try:
            return get_lr(self, param_group)
        finally:
            self.init_lr = begins_with

    return of_group


def _itself(_original: Callable[..., Any]) -> Callable[..., Any]:
    def to_local_if_dtensor(tensor: Any) -> Any:
        return getattr(tensor, "_local_tensor", tensor)

    return to_local_if_dtensor


def _on_cpu(name: str, symbol: str, why: str, wrap: Callable[[Any], Any] = for_cpu) -> Patch:
    rung = "no argument, field or spec reaches it"
    return Patch(
        name=f"cpu-training-{name}",
        distribution="megatron-core",
        versions=_VERSIONS,
        symbol=symbol,
        parameters=None,
        why=why,
        lower_rung=f"the device is a literal in the function's body: {rung}" if wrap is for_cpu else rung,
        until="megatron.training runs on devices other than CUDA",
        when="cpu",
        wrap=wrap,
        needed=">=0.19",
    )


def _hopper(_original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return 9, 0

    return get_device_capability


def _newest(_original: Callable[..., bool]) -> Callable[..., bool]:
    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return True

    return is_te_min_version


_LITERALS = "names device='cuda', or asks CUDA for streams and synchronisation"

TRAINING_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="training-helpers-compiled",
        distribution="megatron-core",
        versions=_VERSIONS,
        symbol="megatron.core.datasets.utils:compile_helpers",
        parameters=(),
        why="megatron.training runs `make` in megatron-core; the wheel has no Makefile, but the helpers compiled",
        lower_rung="initialize_megatron calls it unconditionally",
        until="megatron.training does not compile what is there",
        when="always",
        wrap=_compiled_already,
    ),
    Patch(
        name="training-warmup-by-group",
        distribution="megatron-core",
        versions=_VERSIONS,
        symbol="megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.get_lr",
        parameters=("self", "param_group"),
        why="warm-up begins with one rate for all groups (--lr-warmup-init), whatever each group's own rate is",
        lower_rung="a group's override has `max_lr` and `min_lr`, and nothing for where warm-up begins",
        until="a group's override has a rate that warm-up begins with",
        when="always",
        wrap=_warms_up_by_group,
    ),
    Patch(
        name="training-fsdp2-checkpoint",
        distribution="megatron-core",
        versions=_VERSIONS,
        symbol="megatron.core.dist_checkpointing.optimizer:to_local_if_dtensor",
        parameters=("tensor",),
        why="a checkpoint under torch FSDP2 finds the optimizer's parameters by the identity of their local tensors, "
        "and torch 2.13 gives a new view of a parameter's at each call (ValueError: Param id 0 does not match)",
        lower_rung="the function is called by name, in the map that is made of all parameters",
        until="megatron-core maps FSDP2's parameters by something that lasts",
        when="always",
        wrap=_itself,
    ),
    _on_cpu("tensor-cuda", "torch:Tensor.cuda", "scripts and megatron.training move tensors with .cuda()", _stays),
    _on_cpu(
        "get-rng-state", "torch:cuda.get_rng_state", "every step and every checkpoint keeps CUDA's state", _cpu_state
    ),
    _on_cpu(
        "set-rng-state", "torch:cuda.set_rng_state", "the counterpart of `cpu-training-get-rng-state`", _set_cpu_state
    ),
    _on_cpu(
        "seed", "megatron.training.initialize:_set_random_seed", "seeds CUDA's generators alone", _also_the_tracker
    ),
    _on_cpu(
        "jit", "megatron.training.training:set_jit_fusion_options", "warms kernels up that only CUDA has", _nothing
    ),
    _on_cpu("memory", "megatron.training.training:report_memory", "reports CUDA's memory", _nothing),
    _on_cpu("pretrain", "megatron.training:pretrain", _LITERALS),
    _on_cpu("pretrain-module", "megatron.training.training:pretrain", _LITERALS),
    _on_cpu("initialize", "megatron.training.training:initialize_megatron", "refuses to start without CUDA"),
    _on_cpu(
        "distributed",
        "megatron.training.initialize:_initialize_distributed",
        "starts megatron-core's groups only where it counts CUDA devices",
    ),
    *(
        _on_cpu(name.strip("_").replace("_", "-"), f"megatron.training.training:{name}", _LITERALS)
        for name in (
            "train_step",
            "training_log",
            "post_training_step_callbacks",
            "checkpoint_and_decide_exit",
            "train",
            "evaluate",
            "build_train_valid_test_data_loaders",
            "build_train_valid_test_data_iterators",
        )
    ),
    _on_cpu("rerun", "megatron.core.rerun_state_machine:RerunStateMachine._reduce_any", _LITERALS),
    _on_cpu(
        "architecture",
        "megatron.training.arguments:get_device_arch_version",
        "asks a GPU whether tensor parallelism needs CUDA_DEVICE_MAX_CONNECTIONS",
        _no_architecture,
    ),
    _on_cpu("read-metadata", "megatron.training.checkpointing:read_metadata", _LITERALS),
    _on_cpu("ddp", "megatron.training.models.dist_utils:_ddp_wrap", _LITERALS),
    _on_cpu("loss-scale", "megatron.core.optimizer.grad_scaler:MegatronGradScaler.__init__", _LITERALS),
    _on_cpu("dynamic-loss-scale", "megatron.core.optimizer.grad_scaler:DynamicGradScaler.__init__", _LITERALS),
    _on_cpu("loaded-loss-scale", "megatron.core.optimizer.grad_scaler:DynamicGradScaler.load_state_dict", _LITERALS),
    _on_cpu("timer-start", "megatron.core.timers:Timer.start", "waits for CUDA"),
    _on_cpu("timer-stop", "megatron.core.timers:Timer.stop", "waits for CUDA"),
)

ELSEWHERE_PATCHES: tuple[Patch, ...] = tuple(
    Patch(
        name=f"elsewhere-{name}",
        distribution="megatron-core",
        versions=_VERSIONS,
        symbol=symbol,
        parameters=None,
        why=f"options of a run on other machines are checked against {what} of this one",
        lower_rung="upstream's checks of options call it by name",
        until="upstream checks options without the machine that runs them",
        when="cpu",
        wrap=wrap,
    )
    for name, symbol, what, wrap in (
        ("capability", "torch:cuda.get_device_capability", "the GPU", _hopper),
        (
            "transformer-engine",
            "megatron.core.transformer.transformer_config:is_te_min_version",
            "Transformer Engine's version",
            _newest,
        ),
    )
)
