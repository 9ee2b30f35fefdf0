"""How ranks split a model: the config's `parallel:` section fitted to a number of processes, checked, and as numbers.

Public names: `Layout`, `resolve_layout`, `smallest_world`, `tensor_parallel_problems`. Ranks are ordered as
megatron-core orders them: tensor parallel fastest, then context, then data, then pipeline (or pipeline, then data:
`pipeline_before_data`); inside the experts tensor, then expert, then data, then pipeline. stages.py says which stage
holds which layers. No torch here: `explain` resolves layouts of machines that are not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mup_megatron.config import Config
from mup_megatron.parallel.stages import Stages, chunks_per_stage, stages_of
from mup_megatron.rules.shapes import TensorSpec

_AUTO_TENSOR_PARALLEL_LIMIT = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The split of one run.

    Args:
        world_size: processes.
        tensor: tensor-parallel size.
        data: data-parallel size.
        sequence_parallel: whether activations between tensor-parallel regions are split along the sequence.
        zero_stage: DeepSpeed's ZeRO stage; 0 under the Megatron engine.
        micro_batches: micro-batches per rank and step (gradient accumulation).
        pipeline: pipeline-parallel size.
        virtual_pipeline: model chunks per pipeline stage (interleaved schedule where above 1).
        micro_batch_group: micro-batches that the interleaved schedule takes at once; 1 without it.
        stages: layers of the decoder, global numbers from 0: per pipeline stage, per chunk of it.
        expert: expert-parallel size.
        expert_tensor: tensor-parallel size inside the experts.
        context: context-parallel size.
        distributed_optimizer: whether Megatron's optimizer is split over data-parallel ranks.
        layer_wise: whether each data-parallel rank steps some of Muon's or SOAP's matrices, whole ones, for all.
        fully_sharded: whether parameters, gradients and optimizer state are (torch's FSDP2).
        pipeline_before_data: whether the next rank after those of a stage is in the next stage (Megatron's
            `--use-tp-pp-dp-mapping`), not in the next data-parallel replica.
    """

    world_size: int
    tensor: int
    data: int
    sequence_parallel: bool
    zero_stage: int
    micro_batches: int
    pipeline: int = 1
    virtual_pipeline: int = 1
    micro_batch_group: int = 1
    stages: Stages = ()
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    distributed_optimizer: bool = False
    layer_wise: bool = False
    fully_sharded: bool = False
    pipeline_before_data: bool = False

    def replicas(self, expert: bool) -> int:
        """How many ranks of a stage hold the same tensors: of experts, or the others."""
        split = self.expert * self.expert_tensor if expert else self.tensor
        return self.world_size // (self.pipeline * split)

    def tensor_rank(self, rank: int) -> int:
        """Tensor-parallel rank of a global rank."""
        return rank % self.tensor

    def context_rank(self, rank: int) -> int:
        """Context-parallel rank of a global rank."""
        return rank // self.tensor % self.context

    def data_rank(self, rank: int) -> int:
        """Data-parallel rank of a global rank."""
        stages = self.pipeline if self.pipeline_before_data else 1
        return rank // (self.tensor * self.context * stages) % self.data

    def pipeline_rank(self, rank: int) -> int:
        """Pipeline stage of a global rank."""
        replicas = 1 if self.pipeline_before_data else self.data
        return rank // (self.tensor * self.context * replicas) % self.pipeline

    def first_rank(self, stage: int) -> int:
        """Lowest global rank of a pipeline stage."""
        replicas = 1 if self.pipeline_before_data else self.data
        return stage * self.tensor * self.context * replicas

    def expert_tensor_rank(self, rank: int) -> int:
        """Tensor-parallel rank inside the experts."""
        return rank % self.expert_tensor

    def expert_rank(self, rank: int) -> int:
        """Expert-parallel rank: which of the experts a rank holds."""
        return rank // self.expert_tensor % self.expert

    def slice_of(self, spec: TensorSpec, rank: int) -> tuple[int, int]:
        """Which of how many slices of a tensor a global rank holds; experts are split over their own ranks."""
        if spec.expert:
            return self.expert_tensor_rank(rank), self.expert_tensor
        return self.tensor_rank(rank), self.tensor

    def writes(self, rank: int, spec: TensorSpec, number: int) -> bool:
        """Whether a rank is the one that writes its slice of a tensor into a checkpoint.

        Args:
            rank: global rank, of those that hold the slice.
            spec: of the tensor.
            number: of the tensor on this rank, so that data-parallel ranks take turns.
        """
        first = spec.partition_dim is not None or self.slice_of(spec, rank)[0] == 0
        if spec.expert:
            replicas, stages = self.replicas(True), self.pipeline if self.pipeline_before_data else 1
            return first and rank // (self.expert_tensor * self.expert * stages) % replicas == number % replicas
        return first and self.context_rank(rank) == 0 and self.data_rank(rank) == number % self.data

    def __str__(self) -> str:
        """For people: `TP 2, PP 2, DP 4, SP, ZeRO 1`; what is 1 is left out, but for TP and DP."""
        parts = [f"TP {self.tensor}"]
        sizes = {"PP": self.pipeline, "VPP": self.virtual_pipeline, "CP": self.context, "EP": self.expert}
        parts += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if self.expert_tensor != self.tensor:
            parts.append(f"ETP {self.expert_tensor}")
        parts.append(f"DP {self.data}")
        if self.sequence_parallel:
            parts.append("SP")
        if self.fully_sharded:
            return ", ".join([*parts, "FSDP2"])
        if self.layer_wise:
            return ", ".join([*parts, "layer-wise optimizer"])
        return ", ".join([*parts, "distributed optimizer" if self.distributed_optimizer else f"ZeRO {self.zero_stage}"])


def resolve_layout(config: Config, world_size: int, *, stages: Stages | None = None) -> Layout:
    """Fits the config's layout to a number of processes.

    Args:
        config: the run.
        world_size: processes.
        stages: where layers are, instead of what the config's sizes say.

    Raises:
        ConfigError: a size does not divide, the processes cannot share the batch, or upstream does not allow the mix.
    """
    parallel = config.parallel
    _check_mix(config)
    if stages is None:
        stages = stages_of(config)
    pipeline, context = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    tensor = _tensor_size(config, world_size)
    if config.training.seq_length % (2 * context) and context > 1:
        raise config.error(
            "training.seq_length",
            f"{config.training.seq_length} is not divisible by {2 * context}: each of {context} context-parallel ranks "
            "holds two equal parts",
        )
    data = world_size // (tensor * pipeline * context)
    expert = parallel.expert_model_parallel_size
    expert_tensor = parallel.expert_tensor_parallel_size or tensor
    _check_experts(config, world_size // pipeline, tensor, expert, expert_tensor)
    virtual = chunks_per_stage(config)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage or pipeline
    micro_batches = _micro_batches(config, world_size, tensor, data)
    # As upstream's schedule has it: groups of this many, and the last no smaller than the pipeline.
    if virtual > 1 and (micro_batches < group or 0 < micro_batches % group < pipeline):
        raise config.error(
            "training.global_batch_size",
            f"the interleaved schedule takes micro-batches in groups of {group}, of which the last has at least "
            f"{pipeline} (pipeline stages); {config.training.global_batch_size} makes {micro_batches}",
        )
    megatron = parallel.engine == "megatron"
    whole = config.optimizer.name in ("muon", "soap")  # whose steps ranks share matrix by matrix
    return Layout(
        world_size=world_size,
        tensor=tensor,
        data=data,
        sequence_parallel=parallel.sequence_parallel and tensor > 1,
        zero_stage=0 if megatron else parallel.zero_stage,
        micro_batches=micro_batches,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        micro_batch_group=group if virtual > 1 else 1,
        stages=stages,
        expert=expert,
        expert_tensor=expert_tensor,
        context=context,
        distributed_optimizer=megatron and parallel.use_distributed_optimizer and not whole,
        layer_wise=megatron and parallel.use_distributed_optimizer and whole,
        fully_sharded=megatron and parallel.use_torch_fsdp2,
        pipeline_before_data=parallel.use_tp_pp_dp_mapping,
    )


def _tensor_size(config: Config, world_size: int) -> int:
    """The tensor-parallel size; with pipeline stages and parts of the sequence it divides the processes."""
    parallel = config.parallel
    pipeline, context = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    if parallel.tensor_model_parallel_size == "auto":
        tensor = _auto_tensor_parallel(config, world_size)
    else:
        tensor = parallel.tensor_model_parallel_size
        for key, problem in tensor_parallel_problems(config, tensor):
            raise config.error(key, problem)
    if world_size % (tensor * pipeline * context):
        key = "tensor" if pipeline * context == 1 else "pipeline"
        what = f"{tensor}" if pipeline * context == 1 else f"TP {tensor} x PP {pipeline} x CP {context}"
        raise config.error(
            f"parallel.{key}_model_parallel_size",
            f"{what} does not divide the {world_size} processes",
        )
    return tensor


def _micro_batches(config: Config, world_size: int, tensor: int, data: int) -> int:
    """Micro-batches per rank and step."""
    samples = config.training.micro_batch_size * data
    if config.training.global_batch_size % samples:
        raise config.error(
            "training.global_batch_size",
            f"{config.training.global_batch_size} cannot be shared by {world_size} processes (tensor parallel "
            f"{tensor}, data parallel {data}, micro batch {config.training.micro_batch_size}); expected a multiple of "
            f"{samples}{_process_counts(config)}",
        )
    return config.training.global_batch_size // samples


def smallest_world(config: Config) -> int:
    """Processes that the config's explicit sizes ask for at least."""
    parallel = config.parallel
    tensor = 1 if parallel.tensor_model_parallel_size == "auto" else parallel.tensor_model_parallel_size
    dense = tensor * parallel.context_parallel_size
    experts = (parallel.expert_tensor_parallel_size or tensor) * parallel.expert_model_parallel_size
    return math.lcm(dense, experts) * parallel.pipeline_model_parallel_size


def _check_mix(config: Config) -> None:
    """Refuses by name what upstream does not allow, before anything is built."""
    parallel, model = config.parallel, config.model
    pipeline, virtual = parallel.pipeline_model_parallel_size, chunks_per_stage(config)
    if parallel.engine == "deepspeed":
        for key, size in (
            ("pipeline_model_parallel_size", pipeline),
            ("pipeline_model_parallel_layout", parallel.pipeline_model_parallel_layout or 1),
            ("virtual_pipeline_model_parallel_size", virtual),
            ("context_parallel_size", parallel.context_parallel_size),
        ):
            if size != 1:
                what = "context" if key.startswith("context") else "pipeline"
                expected = "null" if key.endswith("layout") else "1"
                raise config.error(
                    f"parallel.{key}",
                    f"engine deepspeed has no {what} parallelism here; expected {expected}, found {size}, or "
                    "parallel.engine: megatron",
                )
    elif parallel.context_parallel_size != 1 and model.core_attention == "megatron":
        raise config.error(
            "model.core_attention",
            "megatron-core's own has no context parallelism; expected sdpa, transformer_engine or auto",
        )
    elif parallel.offload_optimizer:
        raise config.error(
            "parallel.offload_optimizer", "is DeepSpeed's; expected parallel.engine: deepspeed, or false"
        )
    if parallel.use_tp_pp_dp_mapping and parallel.engine != "megatron":
        raise config.error(
            "parallel.use_tp_pp_dp_mapping", "is the Megatron engine's; expected parallel.engine: megatron, or false"
        )
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        raise config.error(
            "parallel.overlap_param_gather", "needs use_distributed_optimizer and overlap_grad_reduce (megatron-core)"
        )
    if (group := parallel.microbatch_group_size_per_virtual_pipeline_stage) is not None and (
        virtual == 1 or group < pipeline
    ):
        raise config.error(
            "parallel.microbatch_group_size_per_virtual_pipeline_stage",
            f"{group}; expected at least the {pipeline} pipeline stages, and virtual_pipeline_model_parallel_size "
            "above 1",
        )
    if virtual > 1 and pipeline == 1:
        raise config.error(
            "parallel.virtual_pipeline_model_parallel_size",
            f"{virtual} chunks per stage need stages; expected parallel.pipeline_model_parallel_size above 1",
        )


def _check_experts(config: Config, stage: int, tensor: int, expert: int, expert_tensor: int) -> None:
    """Whether the experts can be split so over the ranks of one pipeline stage."""
    model, parallel = config.model, config.parallel
    if model.num_moe_experts is None:
        for key, size in (("expert_model_parallel_size", expert), ("expert_tensor_parallel_size", expert_tensor)):
            if size != (1 if key == "expert_model_parallel_size" else tensor):
                raise config.error(f"parallel.{key}", f"{size}, but the model has no experts (model.num_moe_experts)")
        return
    if model.num_moe_experts % expert:
        raise config.error(
            "parallel.expert_model_parallel_size",
            f"{expert} does not divide model.num_moe_experts {model.num_moe_experts}",
        )
    if stage % (expert * expert_tensor):
        raise config.error(
            "parallel.expert_model_parallel_size",
            f"EP {expert} x ETP {expert_tensor} does not divide the {stage} processes of a pipeline stage",
        )
    if config.optimizer.name == "soap" and expert_tensor > 1:
        raise config.error(
            "parallel.expert_tensor_parallel_size", f"{expert_tensor} with optimizer.name: soap: {_WHOLE}"
        )
    if model.moe_ffn_size % expert_tensor:
        raise config.error(
            "model.moe_ffn_hidden_size", f"{model.moe_ffn_size} is not divisible by the experts' TP {expert_tensor}"
        )
    if model.add_bias_linear and expert_tensor > 1:
        raise config.error(
            "model.add_bias_linear",
            f"megatron-core's experts have biases only where they are whole; expected false, or "
            f"parallel.expert_tensor_parallel_size 1, found {expert_tensor}",
        )
    if parallel.engine == "deepspeed" and expert > 1 and parallel.zero_stage == 3:
        raise config.error("parallel.zero_stage", "DeepSpeed has no ZeRO 3 with expert parallelism; expected 0, 1 or 2")
    if parallel.engine == "deepspeed" and expert_tensor != tensor:
        raise config.error(
            "parallel.expert_tensor_parallel_size",
            f"engine deepspeed reduces over one tensor-parallel size; expected {tensor}, or parallel.engine: megatron",
        )


def tensor_parallel_problems(config: Config, tensor: int) -> list[tuple[str, str]]:
    """What keeps the model from being split over `tensor` ranks: (key, problem) pairs."""
    model = config.model
    sizes = {"model.num_attention_heads": model.num_attention_heads, "model.num_query_groups": model.query_groups}
    if not all(model.expert_layers):
        sizes["model.ffn_hidden_size"] = model.ffn_size
    if model.moe_shared_expert_intermediate_size is not None:
        sizes["model.moe_shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size
    if model.multi_latent_attention:
        # megatron-core splits the rows of the down-projections and gathers what they put out.
        sizes["model.kv_lora_rank"] = (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)
        sizes["model.q_lora_rank"] = model.q_lora_rank or 0
    if model.mtp_num_layers is not None:
        sizes["model.hidden_size"] = model.hidden_size
    if config.vocab_size is not None:
        sizes["model.make_vocab_size_divisible_by"] = model.padded_vocab_size(config.vocab_size)
    if config.parallel.sequence_parallel:
        sizes["training.seq_length"] = config.training.seq_length // config.parallel.context_parallel_size
        sizes["training.decoder_seq_length"] = config.training.decoder_length if config.data.of_pairs else 0
    what = {
        "model.make_vocab_size_divisible_by": "padded vocabulary ",
        "model.kv_lora_rank": "with qk_pos_emb_head_dim, ",
    }
    problems = [
        (key, f"{what.get(key, '')}{size} is not divisible by the tensor-parallel size {tensor}")
        for key, size in sizes.items()
        if size % tensor
    ]
    if model.num_moe_experts is not None and tensor > 1 and not config.parallel.sequence_parallel:
        problem = "megatron-core trains experts under tensor parallelism only with it; expected true"
        problems.append(("parallel.sequence_parallel", problem))
    if config.optimizer.name == "soap" and tensor > 1:
        problems.append(("parallel.tensor_model_parallel_size", f"{tensor} with optimizer.name: soap: {_WHOLE}"))
    return problems


_WHOLE = "megatron-core's SOAP takes what a rank holds of a matrix for the whole; expected 1"


def _auto_tensor_parallel(config: Config, world_size: int) -> int:
    """The largest tensor-parallel size, up to a node's 8, that divides the processes and the model."""
    pipeline, experts = config.parallel.pipeline_model_parallel_size, config.parallel.expert_model_parallel_size
    others = pipeline * config.parallel.context_parallel_size
    sizes = [
        size
        for size in range(1, _AUTO_TENSOR_PARALLEL_LIMIT + 1)
        if world_size % (size * others) == 0
        and not tensor_parallel_problems(config, size)
        and (world_size // pipeline) % (experts * (config.parallel.expert_tensor_parallel_size or size)) == 0
    ]
    return max(sizes, default=1)


def _process_counts(config: Config) -> str:
    """Numbers of processes, up to 16, that the config can use, as the end of a sentence."""
    counts = [str(world_size) for world_size in range(1, 17) if _fits(config, world_size)]
    if not counts:
        return ""
    listed = ", ".join(counts[:-1]) + f" or {counts[-1]}" if len(counts) > 1 else counts[0]
    return f", or {listed} processes"


def _fits(config: Config, world_size: int) -> bool:
    parallel = config.parallel
    tensor = parallel.tensor_model_parallel_size
    size = _auto_tensor_parallel(config, world_size) if tensor == "auto" else tensor
    split = size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    samples = config.training.micro_batch_size * world_size // split
    return world_size % split == 0 and config.training.global_batch_size % samples == 0
