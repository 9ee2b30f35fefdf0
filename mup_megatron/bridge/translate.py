"""A ConfigContainer as Megatron's options: Bridge's fields have the names of the options that they took the place of.

Public names: `arguments_of`, `in_fields`, `put_values`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from mup_megatron.config import BETAS, ONE_MINUS
from mup_megatron.megatron_training.options import MULTIPLIERS, add_options
from mup_megatron.tuning.space import in_config
from mup_megatron.util.errors import UserError

# Where two sections have a field of one name, the later one's holds.
_SECTIONS = (
    *("profiling", "validation", "logger", "tokenizer", "dist", "rng", "ddp", "checkpoint"),
    *("train", "scheduler", "optimizer", "model"),
)
_OWN = {
    "--mup-base": "base",
    "--mup-hparams": "hparams",
    "--mup-config": "multipliers and parametrization",
    "--mup-allow-change KEY": "allow_change=[KEY]",
    "--mup-tensors": "tensors",
    "--mup-write-config": "write_config",
}
_FIELDS: dict[str, str] = {}


def arguments_of(config: Any, given: Mapping[str, Any]) -> Namespace:
    """Megatron's arguments with what a container says; what it does not say is Megatron's default.

    Args:
        config: the container, finalized by Bridge.
        given: what GPTModel is constructed with, by parameter name.
    """
    from megatron.training.arguments import add_megatron_arguments

    args = add_options(add_megatron_arguments(ArgumentParser(allow_abbrev=False))).parse_args([])
    for section in _SECTIONS:
        for name, value in _fields_of(getattr(config, section)):
            _FIELDS[name] = f"{section}.{name}"
            if value is not None and hasattr(args, name):
                setattr(args, name, value)
    core, optimizer, scheduler, dataset = (
        given["config"],
        config.optimizer,
        config.scheduler,
        getattr(config, "dataset", None),
    )
    # Bridge's scheduler sets the weight decay of every step, whatever the optimizer's config says.
    decay = scheduler.end_weight_decay
    args.weight_decay = args.end_weight_decay = optimizer.weight_decay if decay is None else decay
    args.min_lr = args.min_lr or 0.0
    args.decoupled_weight_decay = optimizer.decoupled_weight_decay
    if args.embedding_init_method_std == args.init_method_std:
        args.embedding_init_method_std = None
    args.vocab_size, args.num_experts = config.model.vocab_size, core.num_moe_experts
    args.group_query_attention, args.ffn_hidden_size = False, None  # both are read from the config itself
    args.rotary_seq_len_interpolation_factor = given["seq_len_interpolation_factor"]
    args.transformer_impl = _implementation(given["transformer_layer_spec"])
    args.data_path, args.split = _data_path(dataset), getattr(dataset, "split", None)
    args.mock_data = args.data_path is None
    return args


def _fields_of(section: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a section; of a GPTModelConfig also those of the TransformerConfig in it."""
    if section is None:
        return
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.name == "transformer":
            yield from _fields_of(value)
        elif not callable(value):
            yield field.name, value


def _data_path(dataset: Any) -> list[str] | None:
    """What Megatron's --data-path would say: prefixes, each behind its weight where there are weights."""
    paths, weights = getattr(dataset, "blend", None) or (None, None)
    if weights is None:
        return paths
    return [word for pair in zip(weights, paths or (), strict=True) for word in map(str, pair)]


def _implementation(spec: Any) -> str:
    """What Megatron calls the implementation of a layer spec, by the classes in it."""
    engines = any(kind.__module__.startswith("megatron.core.extensions.transformer_engine") for kind in _classes(spec))
    return "transformer_engine" if engines else "local"


def _classes(spec: Any) -> Iterator[type]:
    if isinstance(spec, type):
        yield spec
    elif isinstance(spec, functools.partial):
        for part in (spec.func, *spec.args, *spec.keywords.values()):
            yield from _classes(part)
    elif isinstance(spec, (list, tuple)):
        for part in spec:
            yield from _classes(part)
    elif dataclasses.is_dataclass(spec):
        for field in dataclasses.fields(spec):
            yield from _classes(getattr(spec, field.name))


def in_fields(message: str) -> str:
    """A sentence about Megatron's options in the names of the container's fields."""
    for option, ours in _OWN.items():
        message = message.replace(option, ours)

    def field(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return _FIELDS.get(name, found[0])

    return re.sub(r"--([a-z][a-z0-9-]+)", field, message)


def put_values(config: Any, values: Mapping[str, Any], source: str) -> dict[str, float]:
    """Puts a transfer record's values into a container; returns those that are multipliers.

    Args:
        config: the container.
        values: by name.
        source: the record, for the message.

    Raises:
        UserError: a value that is not known here.
    """
    model, optimizer, scheduler = config.model, config.optimizer, config.scheduler
    found: dict[str, float] = {}
    for name, value in values.items():
        if name == "lr":
            if optimizer.lr and optimizer.min_lr:
                optimizer.min_lr *= value / optimizer.lr
            optimizer.lr = value
        elif name == "weight_decay":
            optimizer.weight_decay = scheduler.start_weight_decay = scheduler.end_weight_decay = value
            scheduler.weight_decay_incr_style = "constant"
        elif name in ("init_method_std", "embedding_init_method_std"):
            setattr(model, name, value)
        elif name == "lr_schedule":
            scheduler.lr_decay_style = value
        elif name in BETAS:
            setattr(optimizer, name.replace("one_minus", "adam"), in_config(name, value))
        elif name in ONE_MINUS:
            setattr(optimizer, f"{'muon' if optimizer.optimizer == 'muon' else 'sgd'}_momentum", in_config(name, value))
        elif name in MULTIPLIERS:
            found[name] = value
        else:
            raise UserError(f"{source}: values: {name}: not a hyperparameter that is known here")
    return found
