"""What no single key of a config can tell: each function is one thing that must hold, and raises ConfigError."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from mup_megatron.config.schema import Config, Hparams, Model, Range, Training
from mup_megatron.errors import ConfigError, masked_value, shown


def check(config: Config) -> None:
    """Runs every check of this module. Raises ConfigError."""
    for must_hold in (
        _check_texts,
        _check_latent_attention,
        _check_heads,
        _check_experts,
        _check_multi_token_prediction,
        _check_norms,
        _check_zero_init,
        _check_growth,
        _check_head_size_growth,
        _check_depth,
        _check_batch,
        _check_schedule,
        _check_optimizer,
        _check_data,
        _check_search,
        _check_tuning_batch,
        _check_slurm,
    ):
        must_hold(config)


_WITHOUT_PASSWORD = {
    "tuning.storage": "PostgreSQL takes it from PGPASSWORD, ~/.pgpass or the file that PGPASSFILE names, MySQL from an "
    "option file (mysql+pymysql://user@host/name?read_default_file=/home/user/.my.cnf)",
    "slurm.container_image": "enroot takes it from its credentials file",
}
# What Weights & Biases gives out as keys.
_WANDB_KEY = r"(local-)?[0-9a-f]{40}|wandb_v\d_\w+"


def _check_texts(config: Config) -> None:
    """What is in no text of a config: secrets, which every file of the run would hold; control characters.

    Raises:
        ConfigError: names the key and never shows a secret.
    """
    for key, text in _texts(config.model_dump(), ""):
        if masked_value(text) != text:
            way = _WITHOUT_PASSWORD.get(key, "expected it in the environment or in a file of its own")
            raise config.error(key, f"holds a password or another secret, which the run's files would show; {way}")
        # Cc and Cs: control characters, and halves of characters that no file can hold.
        if any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in text):
            raise config.error(key, f"expected text without control characters, found {shown(text)}")
    if config.run.wandb_project is not None and re.fullmatch(_WANDB_KEY, config.run.wandb_project):
        raise config.error(
            "run.wandb_project", "is a key, not a project's name; expected the key in WANDB_API_KEY, or wandb login"
        )


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Every text of plain data with its dotted key; keys are texts too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield key, name
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


def _check_heads(config: Config) -> None:
    models = {"model": config.model, "base": config.model.resized(config.base.width)}
    models["proxy"] = config.proxy_model
    for section, model in models.items():
        if model.multi_latent_attention:
            continue
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


_MOST_EXPERTS = 200_000
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_YARN_KEYS = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def _given(model: Model) -> list[str]:
    """Keys of the model that say something else than their default (a dumped config names them all)."""
    fields = type(model).model_fields
    return [name for name, field in fields.items() if not field.is_required() and getattr(model, name) != field.default]


def _check_latent_attention(config: Config) -> None:
    model, given = config.model, _given(config.model)
    if not model.multi_latent_attention:
        named = [f"model.{name}" for name in (*_LATENT_SIZES, "rope_type", *_YARN_KEYS) if name in given]
        named += [f"{section}.{name}" for section, name in _grown(config) if name in _LATENT_SIZES]
        if named:
            raise config.error(
                named[0], "belongs to multi-latent attention; expected model.multi_latent_attention: true"
            )
        return
    for name in _LATENT_SIZES[1:]:
        if getattr(model, name) is None:
            raise config.error(f"model.{name}", "missing; multi-latent attention needs it")
    for name in ("num_query_groups", "kv_channels"):
        if getattr(model, name) is not None:
            raise config.error(f"model.{name}", "multi-latent attention has no such size; remove the key")
    for section, name in _grown(config):
        if name in ("num_query_groups", "kv_channels"):
            raise config.error(f"{section}.{name}", "multi-latent attention has no such size; remove the key")
        if name == "q_lora_rank" and model.q_lora_rank is None:
            raise config.error(f"{section}.{name}", "the model compresses no queries; expected model.q_lora_rank set")
    if model.position_embedding_type != "rope":
        raise config.error(
            "model.position_embedding_type",
            f"{model.position_embedding_type} under multi-latent attention, which carries rotary positions of its own; "
            "expected rope",
        )
    if model.add_qkv_bias:
        raise config.error("model.add_qkv_bias", "multi-latent attention has no such bias; expected false")
    if model.rope_type != "yarn" and (named := [name for name in _YARN_KEYS if name in given]):
        raise config.error(f"model.{named[0]}", "belongs to YaRN; expected model.rope_type: yarn")
    for section, sizes in (("model", model), ("base", config.base), ("proxy", config.proxy)):
        if (sizes.qk_pos_emb_head_dim or 0) % 2:
            raise config.error(
                f"{section}.qk_pos_emb_head_dim", f"{sizes.qk_pos_emb_head_dim} is odd; RoPE needs an even size"
            )


def _grown(config: Config) -> list[tuple[str, str]]:
    """(section, key) of every size that is declared to grow."""
    return [(section, name) for section in ("base", "proxy") for name in getattr(config, section).sizes]


def _check_experts(config: Config) -> None:
    model, given = config.model, _given(config.model)
    experts, topk = model.num_moe_experts, model.moe_router_topk
    if experts is None:
        named = [f"model.{name}" for name in given if name.startswith("moe_")]
        named += [f"{section}.{name}" for section, name in _grown(config) if name.startswith("moe_")]
        if named:
            raise config.error(named[0], "belongs to a mixture of experts; expected model.num_moe_experts set")
        return
    if config.model.num_layers * experts > _MOST_EXPERTS:
        raise config.error(
            "model.num_moe_experts",
            f"{experts} experts in {model.num_layers} layers are more than {_MOST_EXPERTS:,}, which nobody has listed "
            "tensor by tensor; expected fewer",
        )
    if topk > experts:
        raise config.error(
            "model.moe_router_topk", f"{topk} experts per token of {experts}; expected at most {experts}"
        )
    if topk == 1 and model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax:
        raise config.error(
            "model.moe_router_pre_softmax",
            "softmax over a single chosen expert is 1 and gives the router no gradient; expected true, or "
            "moe_router_score_function: sigmoid",
        )
    _check_expert_groups(config, experts, topk)
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        raise config.error(
            "model.moe_router_enable_expert_bias", "needs moe_router_score_function: sigmoid (megatron-core)"
        )
    if "moe_router_bias_update_rate" in given and not model.moe_router_enable_expert_bias:
        raise config.error("model.moe_router_bias_update_rate", "needs moe_router_enable_expert_bias: true")
    if model.moe_aux_loss_coeff and model.moe_router_load_balancing_type == "none":
        raise config.error("model.moe_aux_loss_coeff", "moe_router_load_balancing_type is none; expected 0")
    shared = model.moe_shared_expert_intermediate_size
    if shared is None:
        named = [f"{section}.{name}" for section, name in _grown(config) if name.startswith("moe_shared")]
        named += ["model.moe_shared_expert_gate"] if model.moe_shared_expert_gate else []
        if named:
            raise config.error(named[0], "no shared experts; expected model.moe_shared_expert_intermediate_size set")
    elif model.add_bias_linear:
        raise config.error("model.add_bias_linear", "megatron-core's shared experts have no biases; expected false")
    if isinstance(model.moe_layer_freq, list):
        if len(model.moe_layer_freq) != model.num_layers:
            raise config.error(
                "model.moe_layer_freq",
                f"{len(model.moe_layer_freq)} entries for {model.num_layers} layers; expected a 0 (dense) or 1 "
                "(experts) for each",
            )
        if not any(model.moe_layer_freq):
            raise config.error("model.moe_layer_freq", "no layer has experts; expected a 1, or no num_moe_experts")
        if config.parametrization.depth != "none" and config.num_layers_base != model.num_layers:
            raise config.error(
                "model.moe_layer_freq", "a list names the layers of one depth; expected a number where depth grows"
            )


def _check_expert_groups(config: Config, experts: int, topk: int) -> None:
    model = config.model
    groups, per_token = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and per_token is None:
        return
    if groups is None or per_token is None:
        missing = "moe_router_num_groups" if groups is None else "moe_router_group_topk"
        raise config.error(f"model.{missing}", "missing; routing by groups needs their number and how many per token")
    if experts % groups:
        raise config.error("model.moe_router_num_groups", f"{groups} does not divide num_moe_experts {experts}")
    if per_token > groups:
        raise config.error("model.moe_router_group_topk", f"{per_token} groups per token of {groups}")
    if topk % per_token or topk // per_token > experts // groups:
        raise config.error(
            "model.moe_router_topk",
            f"{topk} experts per token cannot be taken in equal parts from {per_token} groups of {experts // groups}",
        )


def _check_multi_token_prediction(config: Config) -> None:
    model = config.model
    if model.mtp_num_layers is None:
        if "mtp_loss_scaling_factor" in _given(model):
            raise config.error("model.mtp_loss_scaling_factor", "needs mtp_num_layers")
        return
    if model.mtp_num_layers >= config.training.seq_length:
        raise config.error(
            "model.mtp_num_layers",
            f"{model.mtp_num_layers} further tokens cannot be predicted within training.seq_length "
            f"{config.training.seq_length}",
        )


def _check_norms(config: Config) -> None:
    model = config.model
    if model.norm_gains == "none" and model.norm_implementation in ("apex", "transformer_engine"):
        raise config.error(
            "model.norm_implementation",
            f"{model.norm_implementation}'s norms have gains; expected torch, or norm_gains: trained",
        )


def _check_zero_init(config: Config) -> None:
    model, parametrization = config.model, config.parametrization
    if parametrization.zero_init_query and model.qk_layernorm and not model.multi_latent_attention:
        raise config.error(
            "parametrization.zero_init_query",
            "a norm follows the query (model.qk_layernorm), whose gradient at zero is unbounded; expected false",
        )
    if parametrization.zero_init_readout and model.share_embeddings_and_output_weights:
        raise config.error(
            "parametrization.zero_init_readout",
            "the readout is tied to the embedding (model.share_embeddings_and_output_weights), which would be zero "
            "too; expected false",
        )


def _check_growth(config: Config) -> None:
    if config.parametrization.name != "standard" and not config.base.sizes and config.base.file is None:
        raise config.error("base", "missing; expected the sizes that grow, for example base: {hidden_size: 256}")
    if config.base.file is not None:
        beside = [name for name in config.base.sizes if name not in _beside_a_file(config.model)]
        if beside:
            raise config.error(
                f"base.{beside[0]}",
                f"base.file tells the base size of every tensor; expected one of the two (remove {', '.join(beside)}, "
                "or file)",
            )
    for name in config.proxy.sizes:
        if name not in config.base.sizes and not (name == "num_layers" and config.parametrization.depth != "none"):
            raise config.error(
                f"proxy.{name}",
                f"{name} differs from the base without being declared; expected only keys of base: "
                f"({', '.join(config.base.sizes) or 'none'})",
            )


def _beside_a_file(model: Model) -> set[str]:
    """Base sizes that no tensor's shape tells, so that they may stand beside a file of base shapes."""
    head = {"qk_head_dim", "qk_pos_emb_head_dim"} if model.multi_latent_attention else {"kv_channels"}
    return {"num_layers", *head}


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
    depth = config.parametrization.depth
    if config.parametrization.name != "mup":
        return
    if depth != "none":
        if config.base.num_layers is None:
            raise config.error(
                "base.num_layers",
                f"missing; parametrization.depth: {depth} needs the number of layers where hyperparameters are "
                "defined, the same for every model of the family",
            )
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
    if training.recompute_granularity == "full" and training.recompute_num_layers is None:
        raise config.error(
            "training.recompute_num_layers", "missing; full recomputation needs the layers of a unit, such as 1"
        )


def _check_schedule(config: Config, training: Training | None = None) -> None:
    """Of the config, or of one with other training keys."""
    training = training or config.training
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
    adam_only = {"deepspeed_cpu_adam", "apex", "transformer_engine"}
    # megatron-core takes SGD, too, from the package that has its Adam.
    if optimizer.name == "sgd" and optimizer.implementation in adam_only and config.parallel.engine == "deepspeed":
        raise config.error(
            "optimizer.implementation", f"{optimizer.implementation} implements Adam and AdamW, not sgd; expected torch"
        )
    if optimizer.name == "muon" and config.parallel.engine != "megatron":
        raise config.error("optimizer.name", "muon is megatron-core's; expected it with parallel.engine: megatron")


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
        raise config.error("data.split", f"expected train,valid,test shares such as 98,2,0, found {shown(data.split)}")
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
                _check_schedule(config, training)
            else:
                hparams = Hparams.model_validate({**config.hparams.model_dump(), name: value})
                _check_optimizer(config, hparams)
        except (ValidationError, ConfigError) as error:
            why = error.problem if isinstance(error, ConfigError) else error.errors()[0]["msg"]
            raise config.error(f"tuning.search.{name}", f"{shown(value)} is no value of {name}: {why}") from None


def _check_tuning_batch(config: Config) -> None:
    """The proxy's batch, on its own single process."""
    tuning, training = config.tuning, config.training
    batch = tuning.global_batch_size or training.global_batch_size
    micro = tuning.micro_batch_size or training.micro_batch_size
    if batch % micro:
        raise config.error("tuning.micro_batch_size", f"{micro} does not divide the proxy's global batch size {batch}")
    if tuning.storage != "journal" and "://" not in tuning.storage:
        raise config.error(
            "tuning.storage",
            f"expected journal, or a database such as sqlite:///study.db, found {shown(tuning.storage)}",
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
