"""What no single key of a config can tell: each function is one thing that must hold, and raises ConfigError."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import ValidationError

from mup_megatron.config.schema import Config, Hparams, Range, Training
from mup_megatron.errors import ConfigError


def check(config: Config) -> None:
    """Runs every check of this module. Raises ConfigError."""
    for must_hold in (
        _check_heads,
        _check_growth,
        _check_head_size_growth,
        _check_depth,
        _check_batch,
        _check_schedule,
        _check_optimizer,
        _check_data,
        _check_search,
        _check_tuning_batch,
    ):
        must_hold(config)


def _check_heads(config: Config) -> None:
    models = {"model": config.model, "base": config.model.resized(config.base.width)}
    models["proxy"] = config.proxy_model
    for section, model in models.items():
        if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
            raise config.error(
                f"{section}.hidden_size",
                f"{model.hidden_size} is not divisible by num_attention_heads {model.num_attention_heads}; "
                "expected a multiple of it, or model.kv_channels set",
            )
        if model.num_attention_heads % model.query_groups:
            raise config.error(
                f"{section}.num_query_groups",
                f"{model.query_groups} does not divide num_attention_heads {model.num_attention_heads}",
            )
        if model.position_embedding_type == "rope" and model.head_size % 2:
            raise config.error(f"{section}.kv_channels", f"head size {model.head_size} is odd; RoPE needs an even one")


def _check_growth(config: Config) -> None:
    if config.parametrization.name == "mup" and not config.base.sizes and config.base.file is None:
        raise config.error("base", "missing; expected the sizes that grow, for example base: {hidden_size: 256}")
    for name in config.proxy.sizes:
        if name not in config.base.sizes and not (name == "num_layers" and config.parametrization.depth != "none"):
            raise config.error(
                f"proxy.{name}",
                f"{name} differs from the base without being declared; expected only keys of base: "
                f"({', '.join(config.base.sizes) or 'none'})",
            )


def _check_head_size_growth(config: Config) -> None:
    """Whether a head size that follows from two declared sizes moves although nobody declared it."""
    base = config.model.resized(config.base.width)
    enlarged = base.resized(config.base.enlarged())
    for section, model in (("model", config.model), ("proxy", config.proxy_model)):
        if config.base.file is None and base.head_size == enlarged.head_size != model.head_size:
            raise config.error(
                f"{section}.hidden_size",
                f"head size (hidden_size / num_attention_heads) is {model.head_size} here and {base.head_size} in the "
                "base although hidden_size and num_attention_heads grow together; set model.kv_channels to fix it, or "
                "declare base.kv_channels if it grows",
            )


def _check_depth(config: Config) -> None:
    if config.parametrization.name == "standard" or config.parametrization.depth != "none":
        return
    for section, layers in (("model", config.model.num_layers), ("proxy", config.proxy.num_layers)):
        if layers is not None and layers != config.num_layers_base:
            raise config.error(
                f"{section}.num_layers",
                f"{layers} differs from the base's {config.num_layers_base} and depth rules are off; expected equal "
                "depths, or parametrization.depth: completep",
            )


def _check_batch(config: Config) -> None:
    training = config.training
    if training.global_batch_size % training.micro_batch_size:
        raise config.error(
            "training.micro_batch_size",
            f"{training.micro_batch_size} does not divide training.global_batch_size {training.global_batch_size}",
        )
    if config.model.position_embedding_type == "learned_absolute" and (
        config.max_position_embeddings < training.seq_length
    ):
        raise config.error(
            "model.max_position_embeddings",
            f"{config.max_position_embeddings} is less than training.seq_length {training.seq_length}",
        )
    if training.recompute_granularity == "full" and training.recompute_method is None:
        raise config.error("training.recompute_method", "missing; full recomputation needs uniform or block")


def _check_schedule(config: Config) -> None:
    training = config.training
    decay_steps = training.lr_decay_steps or training.train_steps
    if training.lr_warmup_steps >= decay_steps:
        raise config.error(
            "training.lr_warmup_steps", f"{training.lr_warmup_steps} leaves nothing of the {decay_steps} decay steps"
        )
    if training.lr_schedule == "WSD" and training.lr_wsd_decay_steps is None:
        raise config.error("training.lr_wsd_decay_steps", "missing; the WSD schedule needs the length of its decay")
    if training.lr_schedule == "multi-step" and not training.lr_milestones:
        raise config.error("training.lr_milestones", "missing; the multi-step schedule needs the steps where it drops")
    if training.lr_milestones != sorted(set(training.lr_milestones)):
        raise config.error("training.lr_milestones", f"expected increasing steps, found {training.lr_milestones}")


def _check_optimizer(config: Config) -> None:
    optimizer, hparams = config.optimizer, config.hparams
    if optimizer.name == "adam" and hparams.weight_decay > 0:
        raise config.error(
            "hparams.weight_decay",
            f"{hparams.weight_decay} under optimizer.name adam would be L2 added to the gradient, which has no "
            "width-independent rule; expected 0, or optimizer.name adamw",
        )
    adam_only = {"deepspeed_cpu_adam", "apex", "transformer_engine"}
    if optimizer.name == "sgd" and optimizer.implementation in adam_only:
        raise config.error(
            "optimizer.implementation", f"{optimizer.implementation} implements Adam and AdamW, not sgd; expected torch"
        )


def _check_data(config: Config) -> None:
    data = config.data
    given = [name for name in ("corpus", "files", "data_path") if getattr(data, name)]
    if len(given) != 1:
        raise config.error(
            "data", f"expected one of corpus, files and data_path, found {' and '.join(given) or 'none'}"
        )
    try:
        parts = [float(part) for part in data.split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts, default=-1) < 0 or sum(parts) <= 0:
        raise config.error("data.split", f"expected train,valid,test shares such as 98,2,0, found {data.split!r}")
    if data.tokenizer.library in {"huggingface", "tiktoken"} and data.tokenizer.path is None:
        raise config.error(
            "data.tokenizer.path", f"missing; a {data.tokenizer.library} tokenizer is loaded, not trained"
        )
    if data.tokenizer.library in {"sentencepiece", "null"} and not (data.tokenizer.path or data.tokenizer.vocab_size):
        raise config.error("data.tokenizer.vocab_size", "missing; expected the size of the vocabulary")


def _check_search(config: Config) -> None:
    known = [*Hparams.model_fields, "lr_schedule"]
    for name, dimension in config.tuning.search.items():
        key = f"tuning.search.{name}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise config.error(key, f"unknown hyperparameter; {hint}")
        given = [kind for kind in Range.model_fields if getattr(dimension, kind) is not None]
        if len(given) != 1:
            raise config.error(key, "expected one of log_uniform, uniform and choice")
        bounds = dimension.log_uniform or dimension.uniform
        if bounds and not bounds[0] < bounds[1]:
            raise config.error(key, f"low {bounds[0]} is not below high {bounds[1]}")
        if dimension.log_uniform and bounds and bounds[0] <= 0:
            raise config.error(key, f"low {bounds[0]} of a log_uniform range must be above 0")
        _check_values(config, name, dimension.choice or bounds or [])
        if config.tuning.sampler == "grid" and dimension.choice is None:
            raise config.error(key, "the grid sampler needs values to go through; expected choice")


def _check_values(config: Config, name: str, values: Sequence[float | str]) -> None:
    """Every value that a search dimension names must be one that the config itself would take."""
    for value in values:
        try:
            if name == "lr_schedule":
                training = Training.model_validate({**config.training.model_dump(), name: value})
                _check_schedule(config.model_copy(update={"training": training}))
            else:
                hparams = Hparams.model_validate({**config.hparams.model_dump(), name: value})
                _check_optimizer(config.model_copy(update={"hparams": hparams}))
        except (ValidationError, ConfigError) as error:
            why = error.problem if isinstance(error, ConfigError) else error.errors()[0]["msg"]
            raise config.error(f"tuning.search.{name}", f"{value!r} is no value of {name}: {why}") from None


def _check_tuning_batch(config: Config) -> None:
    """The proxy's batch, on its own single process."""
    tuning, training = config.tuning, config.training
    batch = tuning.global_batch_size or training.global_batch_size
    micro = tuning.micro_batch_size or training.micro_batch_size
    if batch % micro:
        raise config.error("tuning.micro_batch_size", f"{micro} does not divide the proxy's global batch size {batch}")
    if tuning.storage != "journal" and "://" not in tuning.storage:
        raise config.error(
            "tuning.storage", f"expected journal, or a database such as sqlite:///study.db, found {tuning.storage!r}"
        )
