"""The options of µP in Megatron's own parser, and what they name (what is refused beside them: option_check.py).

Public names: `Settings`, `DERIVED_SIZES`, `MULTIPLIERS`, `add_options`, `check_keys`, `check_sizes`, `known`,
`prepare`, `read_base`, `read_options`, `text_of`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mup_megatron.config.load import parse_yaml
from mup_megatron.config.per_tensor import folded, split_name
from mup_megatron.config.schema import Growth, Hparams, ParametrizationSection
from mup_megatron.megatron_training.option_check import Known, unread_options, unsaid_options
from mup_megatron.megatron_training.watched import task
from mup_megatron.model.as_built.base_sizes import LAYERS, NO_OTHERS, OTHER_SIZES, BaseSizes, read_layers
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_text

if TYPE_CHECKING:
    from mup_megatron.model.as_built.tensors import Entry

FLAGS = (
    *("--mup-base", "--mup-hparams", "--mup-config", "--mup-explain", "--mup-write-config", "--mup-allow-change"),
    *("--mup-tensors", "--mup-audit", "--mup-telemetry-interval"),
)
_SECTIONS = ("base", "parametrization", "hparams")
# Hyperparameters that are Megatron's own options, by our name: its name, and its default. Muon's momentum has another.
_MEGATRONS: dict[str, tuple[str, Any]] = {
    "lr": ("lr", None),
    "init_method_std": ("init_method_std", 0.02),
    "embedding_init_method_std": ("embedding_init_method_std", None),
    "weight_decay": ("weight_decay", 0.01),
    "lr_schedule": ("lr_decay_style", "linear"),
    "one_minus_beta1": ("adam_beta1", 0.9),
    "one_minus_beta2": ("adam_beta2", 0.999),
    "one_minus_momentum": ("sgd_momentum", 0.9),
}
MULTIPLIERS = tuple(name for name in Hparams.model_fields if name not in _MEGATRONS)
"""Hyperparameters that are no option of Megatron's."""

DERIVED_SIZES = ("ffn_hidden_size", "kv_channels", "moe_ffn_hidden_size")
"""Sizes that upstream fills from others where they are not typed: only what was typed is a size of its own."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the options name, read and checked; plain data of the sections of a config.

    Args:
        base: of `base:`.
        parametrization: of `parametrization:`.
        hparams: the multipliers of `hparams:`.
        record: the transfer record's file.
        explain: print the table and leave.
        allowed: keys that may differ from the checkpoint's.
        unread: options at other values than their defaults that no table has.
        sizes: of `DERIVED_SIZES`, those that were typed (or that the script sets), before upstream fills the others.
        written: the file to write a config for tuning to, before leaving; None without one.
        unsaid: the options that it cannot say.
        command: the command line that its trials are; empty where this project's engine trains them.
        tensors: what a user says of tensors.
        base_sizes: what the base says of models as built alone.
        audit: what happens where the first step is not the table's: `stop`, `warn`, or `off` to look at nothing.
        telemetry_interval: steps between two readings; 0 for none, and None for the usual.
    """

    base: dict[str, Any]
    parametrization: dict[str, Any]
    hparams: dict[str, Any]
    record: Path | None
    explain: bool
    allowed: tuple[str, ...]
    sizes: dict[str, int]
    written: Path | None = None
    unsaid: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    tensors: tuple[Entry, ...] = ()
    base_sizes: BaseSizes = NO_OTHERS
    audit: str = "stop"
    telemetry_interval: int | None = None


_known = Known([])


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Adds the options of µP to Megatron's parser; where they are there already, leaves it alone."""
    if any("--mup-base" in action.option_strings for action in parser._actions):
        return parser
    global _known
    _known = Known(parser._actions)
    group = parser.add_argument_group("mup-megatron", "maximal update parametrization by the size of every tensor")
    group.add_argument("--mup-base", metavar="FILE", help="Base sizes (YAML), or base shapes (.bsh): turns µP on.")
    group.add_argument("--mup-config", metavar="FILE", help="YAML with base:, parametrization: and hparams:.")
    group.add_argument("--mup-hparams", metavar="FILE", help="Transfer record (transfer.json) to take values from.")
    group.add_argument("--mup-explain", action="store_true", help="Print what each tensor gets, and leave.")
    group.add_argument(
        "--mup-write-config", metavar="FILE", help="Write a config to tune the run's proxy with, explain, and leave."
    )
    group.add_argument(
        "--mup-allow-change", metavar="KEY", action="append", help="A key that may differ from the checkpoint's."
    )
    group.add_argument(
        "--mup-audit",
        choices=("stop", "warn", "off"),
        default="stop",
        help="Where the first step is not the table's (off: not asked).",
    )
    group.add_argument(
        "--mup-telemetry-interval",
        type=int,
        metavar="STEPS",
        help="Steps between two readings of tensors and modules; 0 for none (100, or a thousandth of the steps).",
    )
    group.add_argument(
        "--mup-tensors",
        metavar="FILE",
        action="append",
        help="YAML that says what tensors of the script's own are, or standard:mamba, standard:gated-delta-net.",
    )
    return parser


def known() -> Known:
    """Megatron's options in the parser that `add_options` saw last."""
    return _known


def prepare() -> None:
    """Applies the patches that this machine needs to run megatron.training. Idempotent."""
    import torch

    from mup_megatron.parallel import upstream
    from mup_megatron.patches import apply_patches
    from mup_megatron.patches.megatron_training import TRAINING_PATCHES

    upstream.prepare_process()
    apply_patches(TRAINING_PATCHES, cuda=torch.cuda.is_available())


def read_options(args: Namespace, defaults: Mapping[str, Any] = MappingProxyType({})) -> Settings | None:
    """Reads what the options name, and puts the transfer record's values into `args`; None without any option.

    Args:
        args: as Megatron's parser returns them, nothing derived yet.
        defaults: the script's `args_defaults`, which upstream takes where an option was not typed.

    Raises:
        UserError: a file cannot be used, or two options contradict each other.
    """
    named = (args.mup_base, args.mup_config, args.mup_hparams, args.mup_explain, args.mup_write_config)
    if not any(named):
        return None
    _refuse_beside(args, defaults)
    sections = _read_config(args.mup_config) if args.mup_config else {}
    base, base_sizes = _base_of(args, sections.get("base", {}))
    hparams = sections.get("hparams", {})
    if args.mup_hparams:
        hparams = _put_values(args, args.mup_hparams, hparams)
    if args.weight_decay_incr_style != "constant" and args.mup_hparams:
        raise UserError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style}: {args.mup_hparams} holds one weight decay for "
            "the whole run; expected constant"
        )
    if args.lr is None:
        raise UserError(
            "--lr: missing; expected the learning rate at the base, or --mup-hparams with a transfer record"
        )
    asked = task()
    command = tuple(asked.command) if asked is not None else ()
    if args.weight_decay_incr_style != "constant" and command:
        raise UserError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style}: a transfer record holds one weight decay "
            "for the whole run; expected constant where a proxy is tuned"
        )
    if (args.mup_telemetry_interval or 0) < 0:
        raise UserError(f"--mup-telemetry-interval {args.mup_telemetry_interval}: expected 0 or more steps")
    return Settings(
        base=base,
        base_sizes=base_sizes,
        command=command,
        parametrization=sections.get("parametrization", {}),
        hparams=hparams,
        record=Path(args.mup_hparams) if args.mup_hparams else None,
        explain=bool(args.mup_explain or args.mup_write_config),
        written=Path(args.mup_write_config) if args.mup_write_config else None,
        tensors=_read_tensors(args),
        unsaid=tuple(unsaid_options(args, defaults, known())) if args.mup_write_config else (),
        allowed=tuple(args.mup_allow_change or ()),
        audit=args.mup_audit,
        telemetry_interval=args.mup_telemetry_interval,
        unread=tuple(unread_options(args, defaults, known())),
        sizes={name: size for name in DERIVED_SIZES if (size := _given(args, defaults, name)) is not None},
    )


def _refuse_beside(args: Namespace, defaults: Mapping[str, Any]) -> None:
    """Raises UserError where an option of Megatron's cannot stand beside those of µP."""
    if getattr(args, "use_mup", False):
        others = {word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--mup-")} - set(FLAGS)
        raise UserError(
            "--use-mup: megatron-core's native MuP cannot be combined with this project's; remove "
            + ", ".join(["--use-mup", *sorted(others)])
        )
    if _given(args, defaults, "use_checkpoint_args"):
        raise UserError(
            "--use-checkpoint-args: a checkpoint's arguments hold sizes that were typed and sizes that Megatron "
            "derived from them alike, and which of them grow depends on that; expected the model's options typed again"
        )


def _base_of(args: Namespace, base: dict[str, Any]) -> tuple[dict[str, Any], BaseSizes]:
    """The base's sizes, of --mup-base and of --mup-config. Raises UserError."""
    if args.mup_base:
        of_file = read_base(args.mup_base)
        if base and ("file" not in of_file or "file" in base):
            raise UserError(f"{args.mup_config}: base: is given by --mup-base too; expected one of them")
        base = {**base, **of_file}  # what no shape tells (kv_channels, num_layers) may stand beside a .bsh file
    return _split_base(args.mup_base or str(args.mup_config), base)


def _split_base(source: str, base: Mapping[str, Any]) -> tuple[dict[str, Any], BaseSizes]:
    """Base sizes of this project's configs, and those of models as built alone.

    Args:
        source: the file, for messages.
        base: what it says.

    Raises:
        UserError: one of the latter is no size, or its file cannot be read.
    """
    sizes = {name: base[name] for name in OTHER_SIZES if name in base}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**24:
            raise UserError(f"{source}: {name}: {size!r:.40}; expected a whole number above 0")
    rest = {name: size for name, size in base.items() if name not in (*OTHER_SIZES, LAYERS)}
    if LAYERS not in base:
        return rest, BaseSizes(sizes=sizes)
    path = base[LAYERS]
    if not isinstance(path, str):
        raise UserError(f"{source}: {LAYERS}: {path!r:.40}; expected the file of the base's layers")
    return rest, BaseSizes(sizes=sizes, layers=read_layers(path, text_of(path)), source=path)


def _given(args: Namespace, defaults: Mapping[str, Any], name: str) -> Any:
    """An option's value, or the script's default for it."""
    return getattr(args, name, None) or defaults.get(name)


def _read_tensors(args: Namespace) -> tuple[Entry, ...]:
    """What --mup-tensors says."""
    if not args.mup_tensors:
        return ()
    from mup_megatron.model.as_built.ready_made import READY_MADE
    from mup_megatron.model.as_built.tensors_file import read_tensors

    texts = {path: READY_MADE.get(path) or text_of(path) for path in args.mup_tensors}
    return tuple(entry for path, text in texts.items() for entry in read_tensors(path, text))


def text_of(path: str) -> str:
    """What a file of text holds. Raises UserError."""
    try:
        return read_text(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None


def read_base(path: str) -> dict[str, Any]:
    """`base:` of a file of sizes, or a .bsh file's own name. Raises UserError."""
    if path.endswith(".bsh"):
        return {"file": path}
    sizes = parse_yaml(text_of(path), path)
    if not isinstance(sizes, dict) or not sizes:
        raise UserError(f"{path}: expected base sizes such as hidden_size: 256, or a file that ends in .bsh")
    check_sizes(path, sizes)
    return sizes


def check_sizes(source: str, sizes: Mapping[str, Any]) -> None:
    """Whether every name among base sizes is one.

    Args:
        source: where they stand, for the message.
        sizes: by name.

    Raises:
        UserError: names the first that is none.
    """
    for name in sizes:
        if name not in (*Growth.model_fields, *OTHER_SIZES, LAYERS):
            known = (*Growth.model_fields, *OTHER_SIZES, LAYERS)
            raise UserError(f"{source}: {name}: unknown size; known here: {', '.join(known)}")


def _read_config(path: str) -> dict[str, Any]:
    """The sections of a config that Megatron has no options for."""
    sections = parse_yaml(text_of(path), path)
    if not isinstance(sections, dict):
        raise UserError(f"{path}: expected {', '.join(f'{name}:' for name in _SECTIONS)} and nothing else")
    for name, section in sections.items():
        if name not in _SECTIONS:
            raise UserError(
                f"{path}: {name}: unknown key; expected {', '.join(f'{known}:' for known in _SECTIONS)} "
                "(the rest is Megatron's own options)"
            )
        if not isinstance(section, dict):
            raise UserError(f"{path}: {name}: expected keys and values")
    check_keys(path, sections)
    return sections


def check_keys(source: str, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Whether hyperparameters and rules that are named are multipliers and rules.

    Args:
        source: where they stand, for the message.
        sections: `hparams` and `parametrization`, as far as they are given.

    Raises:
        UserError: names the first key that is neither, or that is Megatron's own option.
    """
    for name in sections.get("hparams", {}):
        if name in _MEGATRONS:
            option = f"--{_MEGATRONS[name][0].replace('_', '-')}"
            raise UserError(f"{source}: hparams.{name}: is Megatron's own option; expected {option} instead")
        if name not in MULTIPLIERS:
            raise UserError(f"{source}: hparams.{name}: unknown key; known here: {', '.join(MULTIPLIERS)}")
    for name in sections.get("parametrization", {}):
        if name not in ParametrizationSection.model_fields:
            known = ", ".join(ParametrizationSection.model_fields)
            raise UserError(f"{source}: parametrization.{name}: unknown key; known here: {known}")


def _put_values(args: Namespace, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Puts a record's values into Megatron's options; returns those that are multipliers."""
    from mup_megatron.tuning.record import TransferRecord
    from mup_megatron.tuning.space import in_config

    record = TransferRecord.expect(Path(path), None)
    hparams = _with_factors(path, given, folded(record.values))
    for name, value in record.values.items():
        if name in _MEGATRONS:
            attribute, default = _MEGATRONS[name]
            if attribute == "sgd_momentum" and args.optimizer == "muon":
                attribute = "muon_momentum"
            typed, value = getattr(args, attribute), in_config(name, value)
            option = f"--{attribute.replace('_', '-')}"
            is_typed = typed != default or any(word.partition("=")[0] == option for word in sys.argv)
            if is_typed and typed != value:
                raise UserError(f"{option} {typed}: {path} says {value}; remove {option}, or --mup-hparams")
            setattr(args, attribute, value)
        elif name in MULTIPLIERS:
            if name in given and given[name] != value:
                raise UserError(
                    f"hparams.{name}: {given[name]} in --mup-config, {value} in {path}; expected one of them"
                )
            hparams[name] = value
        elif split_name(name) is None:
            raise UserError(f"{path}: values: {name}: not a hyperparameter that is known here")
    return hparams


def _with_factors(path: str, given: dict[str, Any], of_record: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What was given, with the record's factors of kinds of tensors."""
    if of_record and given.get("per_tensor", of_record) != of_record:
        raise UserError(
            f"hparams.per_tensor: {given['per_tensor']} in --mup-config, {dict(of_record)} in {path}; expected one of "
            "them"
        )
    return {**given, "per_tensor": dict(of_record)} if of_record else dict(given)
