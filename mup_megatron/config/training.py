"""The sections that say how a model is trained: parametrization, hyperparameters, training, optimizer, parallel."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from mup_megatron.config.per_tensor import PerTensor
from mup_megatron.config.section import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Ranks,
    Section,
    Size,
    Width,
)

_POWER = r"^(none|fitted(:-?\d(\.\d+)?)?|power:-?\d(\.\d+)?)$"
_BATCH = _POWER.replace("none", "none|sqrt_sde|complete_d")
PLANE = r"^interpolate:-?\d(\.\d+)?,-?\d(\.\d+)?$"
"""Of a name that is a point between standard and µP."""
FORMS = {
    PLANE: "interpolate:INIT,LR",
    _BATCH: "none, sqrt_sde, complete_d, fitted or power:0.5",
    _POWER: "none, fitted or power:-0.32",
}
"""What texts of these patterns look like."""

ParametrizationName = Literal["mup", "standard", "fan_in", "per_layer", "one_ratio", "ntk"]
PARAMETRIZATIONS: tuple[ParametrizationName, ...] = get_args(ParametrizationName)


class ParametrizationSection(Section):
    """Which rules hold. Section numbers are those of docs/parametrization.md."""

    name: ParametrizationName | Annotated[str, Field(pattern=PLANE)] = "mup"
    """`mup`, or one to compare it with (section 8): `standard` is Megatron's own, the same numbers at every
    width, `fan_in` has initial values as 1/sqrt(fan-in) and one rate, `per_layer` has those initial values and each
    matrix's rate as 1/fan-in, `one_ratio` is megatron-core's MuP, which moves every matrix by hidden size / base
    hidden size, `ntk` is the neural tangent parametrization, in which the features of a wide model do not move,
    `interpolate:INIT,LR` is a point between `standard` (0,0) and `mup` (1,1), with exponents on µP's multipliers of
    initial values and of rates. All are one model at the base."""
    depth: Literal["none", "completep", "depth_mup"] | Annotated[float, Field(ge=0.5, le=1)] = "none"
    """Rule for models of different depth (section 5): `completep` (exponent 1), `depth_mup` (1/2), an exponent between
    them, or `none`, which refuses a depth other than the base's. Unit: an exponent."""
    experts: Literal["none", "fixed_share", "any_share"] = "none"
    """Rule for a growing number of experts (section 10): `fixed_share` where as large a share of them serves each token
    as in the base, `any_share` also where the share falls, `none` refuses a number other than the base's."""
    weight_decay: Literal["independent", "sqrt", "coupled", "timescale"] = "independent"
    """What decoupled weight decay keeps over width: `independent` keeps rate times decay, `coupled` keeps the decay as
    it is configured, as stock AdamW does, `sqrt` lies between them (decay by the root of the width; for AdamW alone).
    `timescale` is `independent` over width, and keeps rate times decay times steps over batch and tokens
    (section 9)."""
    batch: Annotated[str, Field(pattern=_BATCH)] = "none"
    """Rule for a step of more tokens than a trial's (section 9): `sqrt_sde` is the square root rule for Adam (rate,
    epsilon and betas), `complete_d` is Complete(d)P's over batch and tokens at once, `power:0.5` multiplies the rate by
    the ratio to that power, `fitted` does so with the exponent of a ladder (tuning.ladder, or the transfer record),
    which then stands behind it as in `fitted:0.41`, `none` changes nothing."""
    tokens: Annotated[str, Field(pattern=_POWER)] = "none"
    """Rule for a run on more tokens than a trial (section 9): `power:-0.32` multiplies the rate by the ratio to that
    power, `fitted` does so with a ladder's exponent, `none` changes nothing."""
    scaling: Literal["none", "unit"] = "none"
    """Scale at which weights are stored (section 11): `unit` stores every matrix with a standard deviation near 1 at
    the start, and its layer multiplies by what was divided out. The training is the same to the last bit, but for
    how an engine itself sums the norm that clips (section 11)."""
    fixed_fan_out_init: Literal["auto", "output_like", "hidden_like"] = "auto"
    """Init of tensors whose fan-in grows and whose fan-out does not (section 2). `auto` is what transferred best in
    docs/evidence: `hidden_like` in an MLP, `output_like` elsewhere."""
    zero_init_readout: bool = False
    """Whether the readout starts at zero (Tensor Programs V, appendix D.2); not with a tied head."""
    zero_init_query: bool = False
    """Whether query projections start at zero (Tensor Programs V, appendix D.2); not where a norm follows them."""

    @property
    def plane(self) -> tuple[float, float] | None:
        """INIT and LR of a point between standard and µP; None of any other name."""
        kind, _, exponents = self.name.partition(":")
        if kind != "interpolate":
            return None
        init, lr = exponents.split(",")
        return float(init), float(lr)

    @property
    def follows_width(self) -> bool:
        """Whether every tensor follows its own ratios: in µP, between it and standard, and in `ntk`."""
        return self.name in ("mup", "ntk") or self.plane is not None

    @property
    def depth_exponent(self) -> float | None:
        """α of the depth rule: 1 is CompleteP, 1/2 is Depth-µP, None is off."""
        named = {"none": None, "completep": 1.0, "depth_mup": 0.5}
        return named[self.depth] if isinstance(self.depth, str) else self.depth

    @property
    def fitted(self) -> list[str]:
        """Which of `batch` and `tokens` have a ladder's exponent, known or not."""
        return [name for name in ("batch", "tokens") if getattr(self, name).startswith("fitted")]

    @property
    def unfitted(self) -> list[str]:
        """Which of these have none yet."""
        return [name for name in self.fitted if getattr(self, name) == "fitted"]

    @property
    def has_horizon_rule(self) -> bool:
        """Whether a rule over batch or tokens is chosen."""
        return self.batch != "none" or self.tokens != "none" or self.weight_decay == "timescale"


class Hparams(Section):
    """Hyperparameters at the base shape. What each becomes on the target is computed and shown by `explain`."""

    lr: PositiveFloat
    """Peak learning rate at the base. Unit: parameter change per step (Adam), or per unit of gradient (SGD)."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of initial weights at the base; output projections take it over sqrt(2 · layers).
    Unit: that of a weight."""
    embedding_init_method_std: PositiveFloat | None = None
    """Standard deviation of initial embeddings. If unset: init_method_std. Unit: that of a weight."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the sum of word and position embeddings. Unit: a factor."""
    attention_multiplier: PositiveFloat = 1.0
    """Factor on attention logits beside 1/sqrt(head size). Unit: a factor."""
    output_multiplier: PositiveFloat = 1.0
    """Factor on the logits of the readout. Unit: a factor."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor on every residual branch. Unit: a factor."""
    relative_bias_multiplier: PositiveFloat = 1.0
    """Factor on the bias that tells attention positions (position_embedding_type: relative or alibi).
    Unit: a factor."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay at the base, on what has two dimensions or more. Unit: 1 / learning rate."""
    per_tensor: dict[str, PerTensor] = {}
    """Factors on rate, decay and initial values of kinds of tensors (embedding, hidden, attention, attention_q, mlp,
    experts, router, readout, gains, biases, ...: docs/tuning.md) or of global names with stars, such as
    `"*.mlp.linear_fc1.weight"`. Unit: factors."""


class Training(Section):
    """Batch, length, schedule, precision and intervals (in optimizer steps)."""

    global_batch_size: Positive
    """Sequences per optimizer step, over all ranks. Unit: sequences."""
    micro_batch_size: Positive
    """Sequences that a rank computes at once; divides global_batch_size / data-parallel ranks. Unit: sequences."""
    seq_length: Width
    """Tokens per sequence; of pairs, of the encoder's. Unit: tokens."""
    decoder_seq_length: Width | None = None
    """Tokens of the decoder's sequence, of pairs alone. If unset: seq_length. Unit: tokens."""
    train_steps: Positive
    """Length of the target's training. Unit: optimizer steps."""
    lr_schedule: Literal["cosine", "linear", "WSD", "inverse-square-root", "constant", "multi-step"] = "cosine"
    """Shape of the learning rate after warm-up, as megatron-core computes it. `WSD`: constant, then a short decay."""
    lr_warmup_steps: NonNegative = 0
    """Steps over which the rate rises linearly from 0 to its peak (from lr_warmup_init, where it is set).
    Unit: optimizer steps."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Rate that warm-up begins with at the base, at most the peak. Unit: that of hparams.lr."""
    lr_decay_steps: Positive | None = None
    """Steps after which the rate has reached its minimum, warm-up included. If unset: train_steps.
    Unit: optimizer steps."""
    min_lr_ratio: Fraction = 0.0
    """Smallest rate of the schedule over the peak. Unit: a fraction."""
    lr_wsd_decay_steps: Positive | None = None
    """Length of the decay at the end of `WSD`. If unset: no decay; `WSD` needs it. Unit: optimizer steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of `WSD`."""
    lr_milestones: list[Positive] = []
    """Steps at which `multi-step` multiplies the rate by lr_gamma, increasing. Unit: optimizer steps."""
    lr_gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor on the rate at each milestone of `multi-step`. Unit: a factor."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0: no clipping. Unit: gradient norm."""
    clip_norm: Literal["global", "invariant"] = "global"
    """Norm that clip_grad bounds: the plain `global` one, or one weighted per tensor so that it keeps its size over
    width (section 6 of docs/parametrization.md)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Numbers that the model computes in; master weights are fp32. `auto`: bf16 on CUDA, else fp32. `fp16` with its
    scaled loss is what `mup-megatron run` trains in where the script says so."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Which activations are computed again in the backward pass to save memory: of whole layers (`full`) or of
    attention (`selective`). If unset: none."""
    recompute_method: Literal["uniform", "block"] | None = None
    """How `full` recomputation chooses layers: in equal units, or the first ones of a stage. If unset: none; `full`
    needs it."""
    recompute_num_layers: Positive | None = None
    """Layers of a recomputed unit (`uniform`), or how many are recomputed (`block`). If unset: none; `full` needs it.
    Unit: layers."""
    log_interval: Positive = 1
    """How often a line of progress is printed. Unit: optimizer steps."""
    eval_interval: Positive | None = None
    """How often the validation loss is measured; also at the last step. If unset: never. Unit: optimizer steps."""
    eval_steps: Positive = 8
    """Global batches of one evaluation. Unit: batches."""
    eval_translations: NonNegative = 0
    """Validation pairs that an encoder-decoder translates greedily at every evaluation, for BLEU in metrics.jsonl and
    in the report; at most as many as there are. 0: none. Unit: pairs."""
    checkpoint_interval: NonNegative | None = None
    """How often a checkpoint is written; also at the last step. 0: none, unless SIGTERM stops the run. If unset: at the
    last step alone. Unit: optimizer steps."""
    checkpoints_kept: Positive = 2
    """Newest checkpoints that are kept; older ones are removed. Unit: checkpoints."""
    async_save: bool = False
    """Whether the run trains on while a checkpoint is written, from copies of this rank's slices in host memory. A stop
    waits for the checkpoint that is being written."""

    @property
    def steps_between_checkpoints(self) -> int:
        """What `checkpoint_interval` comes to; 0 where none is written."""
        return self.train_steps if self.checkpoint_interval is None else self.checkpoint_interval

    @property
    def decoder_length(self) -> int:
        """Tokens of the decoder's sequence."""
        return self.decoder_seq_length or self.seq_length


class Optimizer(Section):
    """The optimizer and whose implementation of it steps."""

    name: Literal["adamw", "adam", "sgd", "muon", "lion", "soap"] = "adamw"
    """The update rule; the µP rates follow it. `muon`, `soap`, and under the Megatron engine `lion`, are
    megatron-core's, on matrices inside the blocks; AdamW steps everything else. Under DeepSpeed Lion steps every
    tensor."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay of Adam's averages of gradients and of their squares, per step; of Lion, the share of its average in an
    update, and the decay of that average; of SOAP, as Adam's, and the second also of its two matrices. Unit: a
    factor."""
    eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment at the base; scaled per tensor. Unit: gradient."""
    soap_eps: PositiveFloat = 1e-2
    """Added to the root of SOAP's second moment at the base; scaled per tensor. Far below the singular values of
    gradients SOAP's first updates have no bound (docs/parametrization.md). Unit: gradient."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD and Muon: the decay of their average of gradients, per step. Unit: a factor."""
    decoupled_lr: PositiveFloat | None = None
    """Learning rate of word embeddings and readout at the base, as Megatron's `--decoupled-lr`; of
    `mup-megatron run` alone. If unset: hparams.lr. Unit: that of hparams.lr."""
    decoupled_min_lr: NonNegativeFloat | None = None
    """Smallest rate of these, as Megatron's `--decoupled-min-lr`. If unset: that of the others. Unit: that of
    hparams.lr."""
    apply_wd_to_qk_layernorm: bool = False
    """Whether weight decay also falls on the norms of queries and keys, as Megatron's option of that name."""
    implementation: Literal[
        "auto",
        "torch",
        "torch_fused",
        "deepspeed_cpu_adam",
        "deepspeed_lion",
        "emerging_optimizers",
        "apex",
        "transformer_engine",
    ] = "auto"
    """Whose code steps. `auto` chooses by what is installed, is resolved once, printed and recorded. DeepSpeed's Lion
    (`deepspeed_lion`) is FusedLion on CUDA, DeepSpeedCPULion on a CPU and where the optimizer is offloaded."""

    def lacks(self, name: str) -> str:
        """What the update rule has not, of what a name of `ONE_MINUS` is of: betas or momentum; empty where it has it.

        Any other name is of nothing that it may lack.
        """
        if name in BETAS:
            return "betas" if self.name == "sgd" else ""
        return "momentum" if name in ONE_MINUS and self.name not in ("sgd", "muon") else ""


ONE_MINUS = {
    "one_minus_beta1": "optimizer.betas.0",
    "one_minus_beta2": "optimizer.betas.1",
    "one_minus_momentum": "optimizer.momentum",
}
"""Keys of Adam's betas and of the momentum by the names under which they are tuned. A factor on 1 - β is one on the
steps that an average goes back, as a factor on β is not; so these are what has octaves."""

BETAS = tuple(name for name, key in ONE_MINUS.items() if key.startswith("optimizer.betas."))
"""Of these, Adam's."""


def one_minus(number: float) -> float:
    """1 - β of β, and the other way round, without the digits that the difference of two floats makes."""
    return float(f"{1 - number:.12g}")


TUNABLE = {
    **{name: f"hparams.{name}" for name in Hparams.model_fields if name != "per_tensor"},
    "lr_schedule": "training.lr_schedule",
    **ONE_MINUS,
}
"""Keys of the config by the names under which they are tuned; a factor of `per_tensor` is tuned too."""


class Parallel(Section):
    """How the model and its optimizer are split over ranks.

    `zero_stage`, `offload_optimizer` and `deepspeed_config` are the DeepSpeed engine's; `use_distributed_optimizer`,
    `use_torch_fsdp2` and the overlaps are the Megatron engine's. What can be combined: docs/layouts.md.
    """

    engine: Literal["deepspeed", "megatron"] = "deepspeed"
    """What trains: DeepSpeed (ZeRO), or megatron-core's schedules and optimizers (pipeline and context parallelism)."""
    tensor_model_parallel_size: Size = "auto"
    """Ranks that share each layer. `auto`: the most, up to 8, that divide the ranks started and the model's sizes.
    Unit: ranks."""
    pipeline_model_parallel_size: Ranks = 1
    """Pipeline stages. Unit: ranks."""
    virtual_pipeline_model_parallel_size: Ranks | None = None
    """Model chunks per pipeline stage (interleaved schedule). If unset: one, without interleaving. Unit: chunks."""
    microbatch_group_size_per_virtual_pipeline_stage: Ranks | None = None
    """Micro-batches that a stage computes for one model chunk before it goes on to the next (interleaved schedule). If
    unset: as many as there are stages. Unit: micro-batches."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first stage, where stages are uneven. If unset: as many as other stages. Unit: layers."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last stage, where stages are uneven. If unset: as many as other stages. Unit: layers."""
    pipeline_model_parallel_layout: str | None = None
    """What each pipeline stage holds, in Megatron's letters: E the embedding, t a layer, m multi-token prediction, L
    the loss, a bar between parts, such as `Ett|(tt|)*2tL`; several times as many parts as stages are the interleaved
    schedule. If unset: as many layers on each stage, or what the two keys above say."""
    use_tp_pp_dp_mapping: bool = False
    """Whether the next ranks after those of a stage are in the next pipeline stage, and not in the next data-parallel
    replica, as Megatron's option of that name (Megatron engine)."""
    expert_model_parallel_size: Ranks = 1
    """Ranks over which the experts of a layer are spread. Unit: ranks."""
    expert_tensor_parallel_size: Ranks | None = None
    """Ranks that share each expert. If unset: tensor_model_parallel_size. Unit: ranks."""
    context_parallel_size: Ranks = 1
    """Ranks that share each sequence. Unit: ranks."""
    sequence_parallel: bool = False
    """Whether norms and dropout are split along the sequence over tensor-parallel ranks; saves activations."""
    use_distributed_optimizer: bool = True
    """Whether optimizer state is split over data-parallel ranks (Megatron engine); under Muon whole matrices are."""
    use_torch_fsdp2: bool = False
    """Whether data-parallel ranks share parameters, gradients and optimizer state: torch's FSDP2 in megatron-core's
    wrapper (Megatron engine, without use_distributed_optimizer, pipeline stages and expert parallelism)."""
    overlap_grad_reduce: bool = False
    """Whether gradients are reduced while the backward pass goes on (Megatron engine)."""
    overlap_param_gather: bool = False
    """Whether parameters are gathered while the forward pass goes on (Megatron engine, distributed optimizer)."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """What DeepSpeed splits over data-parallel ranks: 1 optimizer state, 2 gradients too, 3 parameters too, 0 nothing.
    Unit: a stage."""
    offload_optimizer: bool = False
    """Whether optimizer state lives in the host's memory (DeepSpeed, ZeRO 1 to 3)."""
    deepspeed_config: str | None = None
    """Path of a DeepSpeed JSON file for what this config does not say; contradictions are refused. It is looked for
    from the working directory, from the config's folder and from the folder above that. If unset: none."""
