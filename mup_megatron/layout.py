"""How ranks split a model: the config's `parallel:` section fitted to a number of processes, checked, and as numbers.

Public names: `Layout`, `resolve_layout`. Ranks are ordered as megatron-core orders them (tensor parallel fastest, then
data parallel). No torch here: `explain` resolves layouts of machines that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from mup_megatron.config import Config
from mup_megatron.errors import ConfigError

_AUTO_TENSOR_PARALLEL_LIMIT = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The split of one run.

    Args:
        world_size: processes.
        tensor: tensor-parallel size.
        data: data-parallel size.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence.
        zero_stage: DeepSpeed's ZeRO stage.
        micro_batches: micro-batches per rank and step (gradient accumulation).
    """

    world_size: int
    tensor: int
    data: int
    sequence_parallel: bool
    zero_stage: int
    micro_batches: int

    def tensor_rank(self, rank: int) -> int:
        """Tensor-parallel rank of a global rank."""
        return rank % self.tensor

    def data_rank(self, rank: int) -> int:
        """Data-parallel rank of a global rank."""
        return rank // self.tensor

    def __str__(self) -> str:
        """For people: `TP 2, DP 4, SP, ZeRO 1`."""
        parts = [f"TP {self.tensor}", f"DP {self.data}"]
        if self.sequence_parallel:
            parts.append("SP")
        return ", ".join([*parts, f"ZeRO {self.zero_stage}"])


def resolve_layout(config: Config, world_size: int) -> Layout:
    """Fits the config's layout to a number of processes.

    Raises:
        ConfigError: a size does not divide, or the processes cannot share the batch.
    """
    parallel = config.parallel
    if parallel.engine == "megatron":
        raise config.error("parallel.engine", "the megatron engine is not built yet; expected deepspeed")
    if parallel.pipeline_model_parallel_size != 1:
        raise config.error(
            "parallel.pipeline_model_parallel_size",
            f"engine deepspeed has no pipeline parallelism here; expected 1, found "
            f"{parallel.pipeline_model_parallel_size}",
        )
    if parallel.tensor_model_parallel_size == "auto":
        tensor = _auto_tensor_parallel(config, world_size)
    else:
        tensor = parallel.tensor_model_parallel_size
        for key, problem in tensor_parallel_problems(config, tensor):
            raise config.error(key, problem)
    if world_size % tensor:
        raise config.error(
            "parallel.tensor_model_parallel_size",
            f"{tensor} does not divide the {world_size} processes that were started",
        )
    data = world_size // tensor
    samples = config.training.micro_batch_size * data
    if config.training.global_batch_size % samples:
        raise config.error(
            "training.global_batch_size",
            f"{config.training.global_batch_size} cannot be shared by {world_size} processes (tensor parallel "
            f"{tensor}, data parallel {data}, micro batch {config.training.micro_batch_size}); expected a multiple of "
            f"{samples}, "
            f"or {_process_counts(config)} processes",
        )
    return Layout(
        world_size=world_size,
        tensor=tensor,
        data=data,
        sequence_parallel=parallel.sequence_parallel and tensor > 1,
        zero_stage=parallel.zero_stage,
        micro_batches=config.training.global_batch_size // samples,
    )


def smallest_world(config: Config) -> int:
    """Processes that the config's explicit sizes ask for at least."""
    tensor = config.parallel.tensor_model_parallel_size
    return 1 if tensor == "auto" else tensor


def tensor_parallel_problems(config: Config, tensor: int) -> list[tuple[str, str]]:
    """What keeps the model from being split over `tensor` ranks: (key, problem) pairs."""
    model = config.model
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_size,
    }
    if config.vocab_size is not None:
        sizes["model.make_vocab_size_divisible_by"] = model.padded_vocab_size(config.vocab_size)
    if config.parallel.sequence_parallel:
        sizes["training.seq_length"] = config.training.seq_length
    what = {"model.make_vocab_size_divisible_by": "padded vocabulary "}
    return [
        (key, f"{what.get(key, '')}{size} is not divisible by the tensor-parallel size {tensor}")
        for key, size in sizes.items()
        if size % tensor
    ]


def _auto_tensor_parallel(config: Config, world_size: int) -> int:
    """The largest tensor-parallel size, up to a node's 8, that divides the processes and the model."""
    sizes = [
        size
        for size in range(1, _AUTO_TENSOR_PARALLEL_LIMIT + 1)
        if world_size % size == 0 and not tensor_parallel_problems(config, size)
    ]
    return max(sizes, default=1)


def _process_counts(config: Config) -> str:
    """Numbers of processes, up to 16, that the config can use."""
    counts = []
    for world_size in range(1, 17):
        try:
            _check_world(config, world_size)
        except ConfigError:
            continue
        counts.append(str(world_size))
    return ", ".join(counts[:-1]) + f" or {counts[-1]}" if len(counts) > 1 else "".join(counts)


def _check_world(config: Config, world_size: int) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    size = _auto_tensor_parallel(config, world_size) if tensor == "auto" else tensor
    if world_size % size or config.training.global_batch_size % (config.training.micro_batch_size * world_size // size):
        raise config.error("", "does not fit")
