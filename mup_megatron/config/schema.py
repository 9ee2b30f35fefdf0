"""The schema of a run's config: proxy, target, data, tuning and launch in a single YAML file.

Model keys carry megatron-core's TransformerConfig names, `parallel.deepspeed_config` points to a DeepSpeed JSON.
Numbers that follow from others (head size, padded vocabulary) are properties, never keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from mup_megatron.errors import ConfigError

# Bounds are far beyond what anybody trains; past them numbers overflow, and tables fill the memory.
Positive = Annotated[int, Field(gt=0, le=2**53)]
NonNegative = Annotated[int, Field(ge=0, le=2**53)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Width = Annotated[int, Field(gt=0, le=2**24)]
"""Of a dimension of a tensor."""
Count = Annotated[int, Field(gt=0, le=10_000)]
"""Of layers and experts: what is gone through one by one."""
Ranks = Annotated[int, Field(gt=0, le=1_000_000)]
"""Also trials and nodes."""
Repetitions = Annotated[int, Field(ge=0, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""NumPy's end at 2**32; repetitions count up from the run's."""
Size = Ranks | Literal["auto"]

# TransformerConfig's own names for the two architectures; every one can be overridden in `model:`.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt3": {
        "normalization": "LayerNorm",
        "activation_func": "gelu",
        "gated_linear_unit": False,
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": True,
    },
    "llama": {
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
    },
}


class Section(BaseModel):
    """A part of the config: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Run(Section):
    """Where a run lives, which random numbers it draws, and the Weights & Biases project that it also reports to."""

    name: str = "run"
    dir: str
    seed: Seed = 1234
    wandb_project: str | None = None


class Model(Section):
    """The target model, in TransformerConfig's field names. Sizes are global (unsharded)."""

    architecture: Literal["gpt3", "llama"]
    num_layers: Count
    hidden_size: Width
    num_attention_heads: Width
    ffn_hidden_size: Width | None = None
    num_query_groups: Width | None = None
    kv_channels: Width | None = None
    max_position_embeddings: Width | None = None
    num_moe_experts: Count | None = None
    moe_ffn_hidden_size: Width | None = None
    moe_layer_freq: Positive | list[Literal[0, 1]] = 1
    moe_router_topk: Positive = 2
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = "aux_loss"
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    moe_router_num_groups: Positive | None = None
    moe_router_group_topk: Positive | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_shared_expert_intermediate_size: Width | None = None
    moe_shared_expert_gate: bool = False
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"  # noqa: S105
    multi_latent_attention: bool = False
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_head_dim: Width | None = None
    qk_pos_emb_head_dim: Width | None = None
    v_head_dim: Width | None = None
    rope_type: Literal["rope", "yarn"] = "rope"
    rotary_scaling_factor: PositiveFloat = 40.0
    original_max_position_embeddings: Positive = 4096
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 1.0
    mscale_all_dim: NonNegativeFloat = 0.0
    mtp_num_layers: Annotated[int, Field(gt=0, le=64)] | None = None
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    vocab_size: Width | None = None
    make_vocab_size_divisible_by: Width = 128
    share_embeddings_and_output_weights: bool
    normalization: Literal["LayerNorm", "RMSNorm"]
    layernorm_epsilon: PositiveFloat = 1e-5
    activation_func: Literal["gelu", "silu", "relu", "squared_relu"]
    gated_linear_unit: bool
    position_embedding_type: Literal["learned_absolute", "rope", "none"]
    rotary_base: Positive = 10000
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    add_bias_linear: bool
    add_qkv_bias: bool = False
    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    qk_layernorm: bool = False
    norm_gains: Literal["trained", "frozen", "none"] = "trained"
    without_norms: list[Literal["input_layernorm", "pre_mlp_layernorm", "final_layernorm"]] = []
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    norm_implementation: Literal["auto", "torch", "apex", "transformer_engine"] = "auto"
    core_attention: Literal["auto", "megatron", "sdpa", "transformer_engine"] = "auto"

    # Keys that say which kernels compute, not what: torch's and megatron-core's, which are everywhere.
    PLAIN_KERNELS: ClassVar[dict[str, str]] = {
        "transformer_impl": "local",
        "norm_implementation": "torch",
        "core_attention": "sdpa",
    }

    @property
    def head_size(self) -> int:
        """Size of a query/key head, d; under MLA its part without positions and its part with them."""
        if self.multi_latent_attention:
            return (self.qk_head_dim or 0) + (self.qk_pos_emb_head_dim or 0)
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads; as many as heads unless `num_query_groups` is set."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """FFN hidden size; TransformerConfig's 4·hidden_size unless `ffn_hidden_size` is set."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def moe_ffn_size(self) -> int:
        """FFN hidden size of one expert; the dense one's unless `moe_ffn_hidden_size` is set."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        return bool(self.hidden_dropout or self.attention_dropout)

    @property
    def expert_layers(self) -> list[bool]:
        """Which decoder layers hold experts; every `moe_layer_freq`-th from the first, or as it lists them."""
        if self.num_moe_experts is None:
            return [False] * self.num_layers
        if isinstance(self.moe_layer_freq, list):
            return [bool(layer) for layer in self.moe_layer_freq]
        return [layer % self.moe_layer_freq == 0 for layer in range(self.num_layers)]

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` rounded up to a multiple that does not depend on the layout: it is part of the global shape."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple

    def resized(self, growth: Growth) -> Model:
        """This model with the sizes that `growth` names replaced: what shapes are read from, no config."""
        return self.model_copy(update=growth.sizes)

    @property
    def with_plain_kernels(self) -> Model:
        """This model computed by torch's and megatron-core's own kernels."""
        return self.model_copy(update=self.PLAIN_KERNELS)


class Growth(Section):
    """Sizes that grow from proxy to target; under `base:` they are the sizes where hyperparameters are defined."""

    hidden_size: Width | None = None
    ffn_hidden_size: Width | None = None
    num_attention_heads: Width | None = None
    num_query_groups: Width | None = None
    kv_channels: Width | None = None
    moe_ffn_hidden_size: Width | None = None
    moe_shared_expert_intermediate_size: Width | None = None
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_head_dim: Width | None = None
    qk_pos_emb_head_dim: Width | None = None
    v_head_dim: Width | None = None
    num_layers: Count | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are named, width and depth."""
        return {name: getattr(self, name) for name in type(self).model_fields if getattr(self, name) is not None}

    @property
    def width(self) -> Growth:
        """The same without the depth."""
        return Growth(**{name: size for name, size in self.sizes.items() if name != "num_layers"})

    def enlarged(self) -> Growth:
        """Every named width doubled: what then changes in a tensor's shape is what grows (see shapes.py)."""
        return Growth().model_copy(update={name: 2 * size for name, size in self.width.sizes.items()})


class Base(Growth):
    """Base sizes, or a saved .bsh file (microsoft/mup's format) that holds the base shapes of every tensor."""

    file: str | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that are named, width and depth."""
        return {name: size for name, size in super().sizes.items() if name != "file"}


class Parametrization(Section):
    """Which rules hold. Section numbers are those of docs/parametrization.md.

    `name` is `mup`, or one of two to compare it with: `standard`, Megatron's own, the same numbers at every width, and
    `fan_in`, initial values as 1/sqrt(fan-in) and one rate (section 8). All three are one model at the base.
    `fixed_fan_out_init` is of tensors whose fan-in grows and whose fan-out does not; `auto` is what transferred best in
    docs/evidence: `hidden_like` in an MLP, `output_like` elsewhere.
    """

    name: Literal["mup", "standard", "fan_in"] = "mup"
    depth: Literal["none", "completep", "depth_mup"] | Annotated[float, Field(ge=0.5, le=1)] = "none"
    weight_decay: Literal["independent", "coupled"] = "independent"
    fixed_fan_out_init: Literal["auto", "output_like", "hidden_like"] = "auto"
    zero_init_readout: bool = False
    zero_init_query: bool = False

    @property
    def depth_exponent(self) -> float | None:
        """α of the depth rule: 1 is CompleteP, 1/2 is Depth-µP, None is off."""
        named = {"none": None, "completep": 1.0, "depth_mup": 0.5}
        return named[self.depth] if isinstance(self.depth, str) else self.depth


class Hparams(Section):
    """Hyperparameters at the base shape. What each becomes on the target is computed and shown by `explain`."""

    lr: PositiveFloat
    init_method_std: PositiveFloat = 0.02
    embedding_init_method_std: PositiveFloat | None = None
    embedding_multiplier: PositiveFloat = 1.0
    attention_multiplier: PositiveFloat = 1.0
    output_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0
    weight_decay: NonNegativeFloat = 0.0


class Training(Section):
    """Batch, length, schedule, precision and intervals (in optimizer steps)."""

    global_batch_size: Positive
    micro_batch_size: Positive
    seq_length: Width
    train_steps: Positive
    lr_schedule: Literal["cosine", "linear", "WSD", "inverse-square-root", "constant", "multi-step"] = "cosine"
    lr_warmup_steps: NonNegative = 0
    lr_decay_steps: Positive | None = None
    min_lr_ratio: Fraction = 0.0
    lr_wsd_decay_steps: Positive | None = None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    lr_milestones: list[Positive] = []
    lr_gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    clip_grad: NonNegativeFloat = 1.0
    clip_norm: Literal["global", "invariant"] = "global"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: Positive | None = None
    log_interval: Positive = 1
    eval_interval: Positive | None = None
    eval_steps: Positive = 8
    checkpoint_interval: Positive | None = None
    checkpoints_kept: Positive = 2


class Optimizer(Section):
    """The optimizer and whose implementation of it steps.

    `muon` is megatron-core's, on matrices inside the blocks; AdamW steps everything else.
    """

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: PositiveFloat = 1e-8
    momentum: Fraction = 0.9
    implementation: Literal["auto", "torch", "torch_fused", "deepspeed_cpu_adam", "apex", "transformer_engine"] = "auto"


class Parallel(Section):
    """How the model and its optimizer are split over ranks.

    `zero_stage`, `offload_optimizer` and `deepspeed_config` are the DeepSpeed engine's; `use_distributed_optimizer` and
    the overlaps are the Megatron engine's.
    """

    engine: Literal["deepspeed", "megatron"] = "deepspeed"
    tensor_model_parallel_size: Size = "auto"
    pipeline_model_parallel_size: Ranks = 1
    virtual_pipeline_model_parallel_size: Ranks | None = None
    num_layers_in_first_pipeline_stage: Count | None = None
    num_layers_in_last_pipeline_stage: Count | None = None
    expert_model_parallel_size: Ranks = 1
    expert_tensor_parallel_size: Ranks | None = None
    context_parallel_size: Ranks = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    offload_optimizer: bool = False
    deepspeed_config: str | None = None


class Tokenizer(Section):
    """A tokenizer of any library that megatron-core knows; SentencePiece is trained when no path is given."""

    library: Literal["sentencepiece", "huggingface", "tiktoken", "byte-level", "null"] = "sentencepiece"
    path: str | None = None
    vocab_size: Width | None = None


class Data(Section):
    """Where the text comes from: the standard library's source, text or JSONL files, or existing Megatron datasets."""

    corpus: Literal["stdlib"] | None = None
    files: list[str] = []
    json_key: str = "text"
    data_path: list[str | float | int] = []
    split: str = "98,2,0"
    dir: str | None = None
    cache_dir: str | None = None
    tokenizer: Tokenizer = Tokenizer()


class Range(Section):
    """One dimension of the search space."""

    log_uniform: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    uniform: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    choice: Annotated[list[float | str], Field(min_length=1)] | None = None


class Tuning(Section):
    """How the proxy is tuned: its trials, when they stop early, where the study and its record live."""

    run: Literal["auto", "never", "only"] = "auto"
    record: str | None = None
    trials: Ranks = 16
    sampler: Literal["random", "tpe", "grid"] = "random"
    pruner: Literal["hyperband", "successive_halving", "none"] = "successive_halving"
    reduction_factor: Annotated[int, Field(ge=2)] = 2
    repeat_best: Repetitions = 2
    repeat_seeds: Repetitions = 2
    train_steps: Positive | None = None
    global_batch_size: Positive | None = None
    micro_batch_size: Positive | None = None
    max_compute_share: PositiveFloat = 0.5
    hang_timeout: Positive = 600
    lease_timeout: Positive = 60
    storage: str = "journal"
    search: dict[str, Range] = {}


class Slurm(Section):
    """What the jobs of launch/slurm ask for; SBATCH_* variables of the environment come before it, as in SLURM.

    `nodes` are the target's; tuning is an array of `tuning_jobs` jobs of one node. `processes_per_node` is
    `gpus_per_node` unless set.
    """

    nodes: Ranks = 1
    gpus_per_node: Repetitions = 8
    processes_per_node: Ranks | None = None
    tuning_jobs: Ranks | None = None
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    container_image: str | None = None
    container_mounts: list[str] = []
    modules: list[str] = []
    signal_seconds: Positive = 300
    retries: NonNegative = 3


class Config(Section):
    """A whole run."""

    run: Run
    model: Model
    base: Base = Base()
    proxy: Growth = Growth()
    parametrization: Parametrization = Parametrization()
    hparams: Hparams
    training: Training
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    data: Data = Data(corpus="stdlib")
    tuning: Tuning = Tuning()
    slurm: Slurm = Slurm()
    _source: str | None = PrivateAttr(default=None)
    _overrides: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def num_layers_base(self) -> int:
        """Depth of the base model; the target's own unless `base.num_layers` is declared."""
        return self.base.num_layers or self.model.num_layers

    @property
    def proxy_model(self) -> Model:
        """The model that is tuned: the base, with the sizes that `proxy:` names."""
        return self.model.resized(self.base).resized(self.proxy)

    @property
    def max_position_embeddings(self) -> int:
        """Positions of the model: the sequence length unless set."""
        return self.model.max_position_embeddings or self.training.seq_length

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary before padding, as far as the config itself tells it."""
        return self.model.vocab_size or self.data.tokenizer.vocab_size

    @property
    def record_path(self) -> str:
        """Where the transfer record lies."""
        return self.tuning.record or f"{self.run.dir}/transfer.json"

    @property
    def source(self) -> str | None:
        """The file that this was read from, for messages and relative paths."""
        return self._source

    def is_overridden(self, key: str) -> bool:
        """Whether a dotted key was given beside the file (`key.path=value`), by itself or with its section."""
        return any(key == given or key.startswith(given + ".") for given in self._overrides)

    def derive(self, keys: Mapping[str, Any]) -> Config:
        """This config with dotted keys replaced, checked as a whole: the one way to make a config from another.

        Args:
            keys: such as `{"run.seed": 7}`; a section's name replaces the whole section.

        Raises:
            ConfigError: the result is no config; names the key.
        """
        from mup_megatron.config.load import override, parse_config  # they read this schema

        data = self.model_dump()
        for key, value in keys.items():
            override(data, key, value, self._source)
        derived = parse_config(data, self._source)
        derived._overrides = self._overrides
        return derived

    def error(self, key: str, problem: str) -> ConfigError:
        """The error to raise for `key` of this config."""
        return ConfigError(key, problem, self._source)
