"""What megatron-core needs to train on a machine without CUDA: symbols that assume a current CUDA device.

Some functions name CUDA in their body: `device="cuda"`, `torch.cuda.synchronize()`, `"torch.cuda.FloatTensor"`. Their
patch is the same function with these names replaced by the CPU's. No line of upstream is copied here, so that none can
become outdated.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from .patch import Patch, PatchError


def _cpu_device(_original: Callable[[], int]) -> Callable[[], torch.device]:
    def current_device() -> torch.device:
        return torch.device("cpu")

    return current_device


def _get_cpu_rng_state(_original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    return get_cuda_rng_state


def _set_cpu_rng_state(_original: Callable[..., None]) -> Callable[..., None]:
    def set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    return set_cuda_rng_state


def seed_generators(seed: int, *, tensor: int, expert: int, expert_tensor: int) -> None:
    """Seeds the generators that dropout draws from on a CPU, as megatron-core's model_parallel_cuda_manual_seed does.

    The tracker's own `add` asks CUDA for a generator, so its states are set through its public `set_states`.

    Args:
        seed: with the offsets of the data-parallel and the pipeline-parallel rank in it.
        tensor: this process's tensor-parallel rank.
        expert: its expert-parallel rank.
        expert_tensor: its tensor-parallel rank among those of an expert.
    """
    from megatron.core.tensor_parallel import random

    seeds = {
        random.get_data_parallel_rng_tracker_name(): seed,
        random._MODEL_PARALLEL_RNG_TRACKER_NAME: seed + 2718 + tensor,
        random.get_expert_parallel_rng_tracker_name(): seed + 1024 + 100 * expert + expert_tensor,
    }
    states = {name: torch.Generator().manual_seed(value).get_state() for name, value in seeds.items()}
    random.get_cuda_rng_tracker().set_states(states)


def _rotary_part(_original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_pos_emb_on_this_cp_rank(
        pos_emb: torch.Tensor, seq_dim: int, cp_group: torch.distributed.ProcessGroup
    ) -> torch.Tensor:
        pieces, rank = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim), cp_group.rank()
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim=seq_dim)

    return get_pos_emb_on_this_cp_rank


def for_cpu(original: Any) -> Any:
    """The same function, class or static method, with CUDA's names in its code replaced by the CPU's.

    `torch.cuda` becomes `torch.cpu`, whose streams and events do nothing; `x.cuda()` becomes `x.cpu()`; "cuda" becomes
    "cpu" and "torch.cuda.FloatTensor" becomes "torch.FloatTensor".

    Raises:
        PatchError: the code names CUDA nowhere.
    """
    if isinstance(original, classmethod | staticmethod):
        return type(original)(for_cpu(original.__func__))
    code = _code_for_cpu(original.__code__)
    if code == original.__code__:
        raise PatchError(f"{original.__qualname__} does not name CUDA any more; its patch can go")
    arguments = (original.__globals__, original.__name__, original.__defaults__, original.__closure__)
    function = types.FunctionType(code, *arguments)
    function.__kwdefaults__ = original.__kwdefaults__
    function.__dict__.update(vars(original))
    return function


def _code_for_cpu(code: types.CodeType) -> types.CodeType:
    return code.replace(
        co_names=tuple("cpu" if name == "cuda" else name for name in code.co_names),
        co_consts=tuple(_constant_for_cpu(constant) for constant in code.co_consts),
    )


def _constant_for_cpu(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return _code_for_cpu(constant)
    if isinstance(constant, tuple):
        return tuple(_constant_for_cpu(part) for part in constant)
    if constant == "cuda":
        return "cpu"
    return constant.replace("torch.cuda.", "torch.") if isinstance(constant, str) else constant


def _broadcast_params(_original: Callable[[Any], None]) -> Callable[[Any], None]:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    return LayerWiseDistributedOptimizer.broadcast_params


def _l2_norm(_kernel_or_function: Any) -> Any:
    """megatron-core's function of torch, where it took Transformer Engine's or Apex's kernel at its import too."""
    from megatron.core.utils import local_multi_tensor_l2_norm

    return for_cpu(local_multi_tensor_l2_norm)


def _named_for_cpu(name: str, symbol: str, why: str, needed: str | None = None, wrap: Any = for_cpu) -> Patch:
    """The patch of a function that names CUDA in its body."""
    return Patch(
        name=f"cpu-{name}",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol=f"megatron.core.{symbol}",
        parameters=None,
        why=why,
        lower_rung="the device is a literal in the function's body: no argument, field or spec reaches it",
        until="megatron-core allocates on the device of its tensors",
        when="cpu",
        wrap=wrap,
        needed=needed,
    )


def _compile_at_first_call(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile that waits for a function's first call. A module, or anything else, is compiled at once."""

    @functools.wraps(compile_now)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        if not inspect.isfunction(model):
            return compile_now(model, **options)
        compiled: list[Callable[..., Any]] = []

        @functools.wraps(model)
        def first(*arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():  # called by a function that is being compiled, and part of it
                return model(*arguments, **keywords)
            if not compiled:
                compiled.append(compile_now(model, **options))
            return compiled[0](*arguments, **keywords)

        return first

    return compile


CPU_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cpu-compile-at-first-call",
        distribution="torch",
        versions=">=2.4",
        symbol="torch:compile",
        parameters=None,
        why="megatron-core hands dozens of small functions to torch.compile when it is imported, which loads "
        "torch._inductor and torch._dynamo: about half of the time in which a process on a CPU starts, for functions "
        "that training on a CPU does not call",
        lower_rung="megatron-core chooses the fuser while its package is imported, before its disable_jit_fuser can "
        "be called",
        until="torch.compile loads its compiler at the first call",
        when="cpu",
        wrap=_compile_at_first_call,
    ),
    Patch(
        name="cpu-current-device",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="torch:cuda.current_device",
        parameters=(),
        why="GlobalMemoryBuffer.get_tensor and RotaryEmbedding allocate on torch.cuda.current_device(), which raises "
        "where there is no CUDA",
        lower_rung="neither takes a device: there is no argument, field or spec to pass one",
        until="megatron-core allocates these on the device of their inputs",
        when="cpu",
        wrap=_cpu_device,
    ),
    Patch(
        name="cpu-get-rng-state",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        parameters=("device", "clone", "graph_safe"),
        why="the RNG tracker forks CUDA's generator around attention, even with dropout 0; on a CPU the generator that "
        "dropout draws from is torch's own",
        lower_rung="the tracker's class is fixed inside initialize_rng_tracker and calls this function by name",
        until="megatron-core's tracker knows devices other than CUDA",
        when="cpu",
        wrap=_get_cpu_rng_state,
    ),
    Patch(
        name="cpu-set-rng-state",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        parameters=("new_state", "device", "graph_safe"),
        why="the RNG tracker sets CUDA's generator when it forks; without CUDA torch only queues that call, so that "
        "the fork never takes effect",
        lower_rung="the tracker's class is fixed inside initialize_rng_tracker and calls this function by name",
        until="megatron-core's tracker knows devices other than CUDA",
        when="cpu",
        wrap=_set_cpu_rng_state,
    ),
    *(
        Patch(
            name=f"cpu-context-parallel-{name}",
            distribution="megatron-core",
            versions=">=0.16.1,<0.21",
            symbol=f"megatron.core.models.common.embeddings.{module}:get_pos_emb_on_this_cp_rank",
            parameters=("pos_emb", "seq_dim", "cp_group"),
            why="under context parallelism a rank takes its part of the rotary embedding by an index in pinned memory, "
            "which it sends to CUDA",
            lower_rung="RotaryEmbedding.forward calls it by name",
            until="megatron-core makes the index on the device of the embedding",
            when="cpu",
            wrap=_rotary_part,
        )
        for name, module in (("rotary", "rotary_pos_embedding"), ("yarn", "yarn_rotary_pos_embedding"))
    ),
    *(
        _named_for_cpu(
            name, f"pipeline_parallel.schedules:{symbol}", "the schedule counts tokens in a tensor on device='cuda'"
        )
        for name, symbol in (
            ("schedule", "forward_backward_no_pipelining"),
            ("schedule-1f1b", "forward_backward_pipelining_without_interleaving"),
            ("schedule-interleaved", "forward_backward_pipelining_with_interleaving"),
        )
    ),
    _named_for_cpu(
        "pipeline-shapes",
        "pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        "where multi-token prediction has a stage of its own, stages tell each other shapes and wait for CUDA",
    ),
    _named_for_cpu(
        "grad-norm", "optimizer.optimizer:get_grad_norm_fp32", "it sums the gradient norm in a tensor on device='cuda'"
    ),
    _named_for_cpu(
        "grad-norm-group",
        "optimizer.optimizer:MegatronOptimizer.has_grad_norm_group",
        "it gathers a flag in a tensor on device='cuda'",
        needed=">=0.19",
    ),
    _named_for_cpu(
        "layer-wise-norm",
        "optimizer.layer_wise_optimizer:get_grad_norm_fp32",
        "it sums the gradient norm in a tensor on device='cuda'",
        needed=">=0.19",
    ),
    _named_for_cpu(
        "layer-wise-norm-group",
        "optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.has_grad_norm_group",
        "it gathers a flag in a tensor on device='cuda'",
        needed=">=0.19",
    ),
    Patch(
        name="cpu-layer-wise-gather",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params",
        parameters=("self",),
        why="it gathers parts of unequal size at once, which NCCL takes and gloo refuses; upstream's broadcast_params, "
        "its reference, sends each matrix from the rank that stepped it",
        lower_rung="step_with_ready_grads calls it by name where the script gives no layout of the parameters, as "
        "upstream's config container gives none",
        until="megatron-core gathers parts of equal size, or gloo of unequal",
        when="cpu",
        wrap=_broadcast_params,
        needed=">=0.19",
    ),
    _named_for_cpu(
        "l2-norm",
        "optimizer.clip_grads:l2_norm_impl",
        "it returns the norm in a tensor on device='cuda'",
        wrap=_l2_norm,
    ),
    _named_for_cpu(
        "clip-grad",
        "optimizer.optimizer:clip_grad_by_total_norm_fp32",
        "it asserts that the type of gradients is 'torch.cuda.FloatTensor'",
    ),
    _named_for_cpu(
        "fp32-optimizer", "optimizer.optimizer:FP32Optimizer.__init__", "it keeps its loss scale on device='cuda'"
    ),
    _named_for_cpu(
        "mixed-precision-optimizer",
        "optimizer.optimizer:MixedPrecisionOptimizer.__init__",
        "it keeps its loss scale on device='cuda'",
    ),
    _named_for_cpu(
        "float16-optimizer",
        "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
        "it tells bf16 parameters by the type name 'torch.cuda.BFloat16Tensor'",
    ),
    _named_for_cpu(
        "distributed-optimizer",
        "optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        "it tells fp32 parameters by the type name 'torch.cuda.FloatTensor'",
    ),
    _named_for_cpu(
        "tied-embedding",
        "models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
        "it moves the tied weight of the last pipeline stage with .cuda()",
    ),
    _named_for_cpu(
        "gradient-buckets",
        "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        "it asks for the current CUDA stream",
        needed=">=0.19",
    ),
    _named_for_cpu(
        "torch-fsdp2",
        "distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.__init__",
        "it makes a mesh of CUDA devices",
    ),
    _named_for_cpu(
        "checkpoint-preload",
        "dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors",
        "it waits for CUDA before it writes",
    ),
)
