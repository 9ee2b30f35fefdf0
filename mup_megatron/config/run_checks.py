"""What must hold between the keys of training, optimizer, data, tuning and SLURM. Public name: `CHECKS`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from pydantic import ValidationError

from mup_megatron.config.per_tensor import KINDS, is_pattern, split_name
from mup_megatron.config.schema import Config, Hparams, Range, Training
from mup_megatron.config.training import ONE_MINUS, TUNABLE
from mup_megatron.util.errors import ConfigError, shown


def _check_batch(config: Config) -> None:
    training = config.training
    if training.global_batch_size % training.micro_batch_size:
        raise config.error(
            "training.micro_batch_size",
            f"{training.micro_batch_size} does not divide training.global_batch_size {training.global_batch_size}",
        )
    for key in ("seq_length", "decoder_seq_length"):
        length = getattr(training, key) or 0
        if config.model.position_embedding_type == "learned_absolute" and config.max_position_embeddings < length:
            raise config.error(
                "model.max_position_embeddings",
                f"{config.max_position_embeddings} is less than training.{key} {length}",
            )
    if training.decoder_seq_length is not None and not config.data.of_pairs:
        raise config.error("training.decoder_seq_length", "is of pairs; expected data.pairs, or no such key")
    if training.recompute_granularity == "full" and training.recompute_method is None:
        raise config.error("training.recompute_method", "missing; full recomputation needs uniform or block")
    if training.recompute_granularity == "full" and training.recompute_num_layers is None:
        raise config.error(
            "training.recompute_num_layers", "missing; full recomputation needs the layers of a unit, such as 1"
        )


def _check_samples(config: Config) -> None:
    if config.run.samples:
        config.needs_gpt("run.samples")
    if config.run.samples and not config.training.eval_interval:
        raise config.error("run.samples", "are written at evaluations; expected training.eval_interval to be set")


def _check_schedule(config: Config, training: Training | None = None, hparams: Hparams | None = None) -> None:
    """Of the config, or of one with other training keys or hyperparameters."""
    training, hparams = training or config.training, hparams or config.hparams
    decay_steps = training.lr_decay_steps or training.train_steps
    if training.lr_warmup_steps >= decay_steps:
        raise config.error(
            "training.lr_warmup_steps", f"{training.lr_warmup_steps} leaves nothing of the {decay_steps} decay steps"
        )
    if training.lr_warmup_init > hparams.lr:
        raise config.error(
            "training.lr_warmup_init", f"{training.lr_warmup_init} is above the peak, hparams.lr {hparams.lr}"
        )
    if training.lr_schedule == "WSD" and training.lr_wsd_decay_steps is None:
        raise config.error("training.lr_wsd_decay_steps", "missing; the WSD schedule needs the length of its decay")
    if training.lr_schedule == "multi-step" and not training.lr_milestones:
        raise config.error("training.lr_milestones", "missing; the multi-step schedule needs the steps where it drops")
    if training.lr_milestones != sorted(set(training.lr_milestones)):
        raise config.error(
            "training.lr_milestones", f"expected increasing steps, found {shown(training.lr_milestones)}"
        )


def _check_optimizer(config: Config, hparams: Hparams | None = None) -> None:
    """Of the config, or of one with other hyperparameters."""
    optimizer, hparams = config.optimizer, hparams or config.hparams
    if optimizer.name == "adam" and hparams.weight_decay > 0:
        raise config.error(
            "hparams.weight_decay",
            f"{hparams.weight_decay} under optimizer.name adam would be L2 added to the gradient, which has no "
            "width-independent rule; expected 0, or optimizer.name adamw",
        )
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_lr is None:
        raise config.error("optimizer.decoupled_min_lr", "needs decoupled_lr")
    if optimizer.name in ("muon", "soap") and config.parallel.engine != "megatron":
        raise config.error(
            "optimizer.name", f"{optimizer.name} is megatron-core's; expected it with parallel.engine: megatron"
        )
    _check_implementation(config)


_LIONS = ("deepspeed_lion", "emerging_optimizers")
_TORCHS = ("torch", "torch_fused")


def _check_implementation(config: Config) -> None:
    """Whether the code that is named has the optimizer. megatron-core's engine takes what it took at its import."""
    name, implementation = config.optimizer.name, config.optimizer.implementation
    if implementation == "auto" or config.parallel.engine == "megatron":
        return
    has = _LIONS if name == "lion" else _TORCHS if name == "sgd" else None
    if implementation in _LIONS and name != "lion":
        raise config.error("optimizer.implementation", f"{implementation} implements Lion here, not {name}")
    if has is not None and implementation not in has:
        what = "SGD and Adam, not lion" if implementation in _TORCHS else f"Adam and AdamW, not {name}"
        raise config.error(
            "optimizer.implementation", f"{implementation} implements {what}; expected {' or '.join(has)}"
        )


def _check_per_tensor(config: Config) -> None:
    for entry in config.hparams.per_tensor:
        _check_entry(config, entry)


def _check_entry(config: Config, entry: str) -> None:
    if entry not in KINDS and not is_pattern(entry):
        close = difflib.get_close_matches(entry, KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KINDS)}"
        raise config.error(f"hparams.per_tensor.{entry}", f"no kind of tensor, and no pattern with a star; {hint}")


def _check_fsdp2(config: Config) -> None:
    """What megatron-core's own scripts refuse beside torch's FSDP2, and what would be left unsharded or unsummed."""
    parallel = config.parallel
    if not parallel.use_torch_fsdp2:
        return
    expert_tensor = parallel.expert_tensor_parallel_size
    for key, wrong, why in (
        ("engine", parallel.engine != "megatron", "expected megatron; DeepSpeed's counterpart is zero_stage: 3"),
        (
            "use_distributed_optimizer",
            parallel.use_distributed_optimizer,
            "it already shares the state; expected false",
        ),
        ("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size > 1, "without stages; expected 1"),
        (
            "expert_model_parallel_size",
            parallel.expert_model_parallel_size > 1,
            "all ranks share all experts; expected 1",
        ),
        (
            "expert_tensor_parallel_size",
            expert_tensor not in (None, parallel.tensor_model_parallel_size),
            "experts are split as everything else is; expected null, or tensor_model_parallel_size",
        ),
        ("overlap_grad_reduce", parallel.overlap_grad_reduce, "it overlaps by itself; expected false"),
        ("overlap_param_gather", parallel.overlap_param_gather, "it overlaps by itself; expected false"),
    ):
        if wrong:
            found = shown(getattr(parallel, key))
            raise config.error(f"parallel.{key}", f"{found} with parallel.use_torch_fsdp2: {why}")
    if config.steps_matrices:
        raise config.error(
            "optimizer.name",
            f"{config.optimizer.name} with parallel.use_torch_fsdp2: it steps whole matrices, of which FSDP2 leaves a "
            "rank some rows; expected adamw, adam or sgd",
        )


def _check_data(config: Config) -> None:
    data = config.data
    given = [name for name in ("corpus", "files", "data_path") if getattr(data, name)]
    given += ["pairs"] if data.pairs.named else []
    if len(given) != 1:
        raise config.error(
            "data", f"expected one of corpus, files, data_path and pairs, found {' and '.join(given) or 'none'}"
        )
    if data.pairs.named not in ([], ["source", "target"], ["jsonl"]):
        raise config.error(
            "data.pairs", f"expected source and target, or jsonl alone, found {' and '.join(data.pairs.named)}"
        )
    try:
        parts = [float(part) for part in data.split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts, default=-1) < 0 or sum(parts) <= 0:
        raise config.error("data.split", f"expected train,valid,test shares such as 98,2,0, found {shown(data.split)}")
    if data.tokenizer.library in {"huggingface", "tiktoken"} and data.tokenizer.path is None:
        raise config.error(
            "data.tokenizer.path", f"missing; a {data.tokenizer.library} tokenizer is loaded, not trained"
        )
    if data.tokenizer.library in {"sentencepiece", "null"} and not (data.tokenizer.path or data.tokenizer.vocab_size):
        raise config.error("data.tokenizer.vocab_size", "missing; expected the size of the vocabulary")


def _check_pairs(config: Config) -> None:
    """Pairs are an encoder-decoder's, and it learns from nothing else."""
    model = config.model
    if config.data.of_pairs and model.family != "t5":
        raise config.error(
            "data", f"pairs are an encoder-decoder's, and {model.architecture} reads text; expected architecture: t5"
        )
    if model.family == "t5" and not config.data.of_pairs:
        raise config.error(
            "data", "an encoder-decoder learns from pairs; expected data.pairs, or corpus: libreoffice-help"
        )


def _check_translations(config: Config) -> None:
    training = config.training
    if config.tuning.objective == "bleu" and not training.eval_translations:
        raise config.error("tuning.objective", "bleu needs pairs to translate; expected training.eval_translations > 0")
    if not training.eval_translations:
        return
    if config.model.family != "t5":
        raise config.error(
            "training.eval_translations", f"{config.model.architecture} does not translate; expected architecture: t5"
        )


def _check_search(config: Config) -> None:
    for name, dimension in config.tuning.search.items():
        key = f"tuning.search.{name}"
        if name not in TUNABLE and split_name(name) is None:
            close = difflib.get_close_matches(name, TUNABLE, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(TUNABLE)}, per_tensor.KIND.lr"
            raise config.error(key, f"unknown hyperparameter; {hint}")
        if name == "relative_bias_multiplier" and not config.model.biases_attention:
            raise config.error(
                key, "moves nothing here; expected it with model.position_embedding_type: relative or alibi alone"
            )
        if what := config.optimizer.lacks(name):
            raise config.error(
                key, f"moves nothing here: {config.optimizer.name} has no {what}; expected another optimizer.name"
            )
        given = [kind for kind in Range.model_fields if getattr(dimension, kind) is not None]
        if len(given) != 1:
            raise config.error(key, "expected one of log_uniform, uniform and choice")
        bounds = dimension.log_uniform or dimension.uniform
        if bounds and not bounds[0] < bounds[1]:
            raise config.error(key, f"low {bounds[0]} is not below high {bounds[1]}")
        if dimension.log_uniform and bounds and bounds[0] <= 0:
            raise config.error(key, f"low {bounds[0]} of a log_uniform range must be above 0")
        _check_values(config, name, dimension.named)
        if config.tuning.sampler == "grid" and dimension.choice is None:
            raise config.error(key, "the grid sampler needs values to go through; expected choice")


def _check_values(config: Config, name: str, values: Sequence[float | str]) -> None:
    """Every value that a search dimension names must be one that the config itself would take."""
    for value in values:
        try:
            if name == "lr_schedule":
                training = Training.model_validate({**config.training.model_dump(), name: value})
                _check_schedule(config, training)
            elif name in ONE_MINUS:
                if isinstance(value, str) or not 0 < value <= 1:
                    raise config.error(ONE_MINUS[name], "expected a number above 0, and at most 1")
            elif (parts := split_name(name)) is not None:
                entry = {parts[0]: {parts[1]: value}}
                Hparams.model_validate({**config.hparams.model_dump(), "per_tensor": entry})
                _check_entry(config, parts[0])
            else:
                hparams = Hparams.model_validate({**config.hparams.model_dump(), name: value})
                _check_optimizer(config, hparams)
                _check_schedule(config, hparams=hparams)
        except (ValidationError, ConfigError) as error:
            why = error.problem if isinstance(error, ConfigError) else error.errors()[0]["msg"]
            raise config.error(f"tuning.search.{name}", f"{shown(value)} is no value of {name}: {why}") from None


def _check_tuning_batch(config: Config) -> None:
    """The proxy's batch, on its own single process."""
    tuning, training = config.tuning, config.training
    batch = tuning.global_batch_size or training.global_batch_size
    micro = tuning.micro_batch_size or training.micro_batch_size
    if (
        tuning.seq_length
        and config.model.position_embedding_type == "learned_absolute"
        and (config.max_position_embeddings < tuning.seq_length)
    ):
        raise config.error(
            "tuning.seq_length",
            f"{tuning.seq_length} is more than the {config.max_position_embeddings} positions of the model",
        )
    if batch % micro:
        raise config.error("tuning.micro_batch_size", f"{micro} does not divide the proxy's global batch size {batch}")
    if tuning.descent.trials and not (tuning.repeat_best and tuning.repeat_seeds):
        key = "repeat_seeds" if tuning.repeat_best else "repeat_best"
        raise config.error(
            "tuning.descent.trials",
            "a value is accepted where its loss is better beyond noise, which repetitions with other seeds measure; "
            f"expected tuning.{key} of 1 or more, found 0",
        )
    if tuning.command:
        config.needs_gpt("tuning.command")
        if tuning.trials_per_device != 1:
            raise config.error(
                "tuning.trials_per_device",
                f"a trial that a script runs (tuning.command) has the worker's GPUs to itself; expected 1, found "
                f"{shown(tuning.trials_per_device)}",
            )


# sbatch's own forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, ...
_SLURM_TIME = r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE"

# What the names of partitions, accounts and environment modules are made of.
_SLURM_NAME = r"[\w.+/@][\w.+/@,-]*"


def _check_slurm(config: Config) -> None:
    slurm = config.slurm
    if not re.fullmatch(_SLURM_TIME, slurm.time):
        raise config.error(
            "slurm.time", f'expected a time as sbatch takes it, such as "24:00:00", found {shown(slurm.time)}'
        )
    named = [("partition", slurm.partition), ("account", slurm.account), *(("modules", name) for name in slurm.modules)]
    for key, name in named:
        if name is not None and not re.fullmatch(_SLURM_NAME, name):
            raise config.error(
                f"slurm.{key}", f"expected a name of letters, digits and . + / @ , _ -, found {shown(name)}"
            )
    if slurm.container_mounts and slurm.container_image is None:
        raise config.error("slurm.container_mounts", "without slurm.container_image there is nothing to mount into")


CHECKS = (
    _check_batch,
    _check_samples,
    _check_schedule,
    _check_optimizer,
    _check_per_tensor,
    _check_fsdp2,
    _check_data,
    _check_pairs,
    _check_translations,
    _check_search,
    _check_tuning_batch,
    _check_slurm,
)
"""In this order; each takes a config and raises ConfigError."""
