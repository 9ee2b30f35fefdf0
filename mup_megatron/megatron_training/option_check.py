"""What differs from its default is translated or refused; what no table has is taken, and told.

Public names: `Known` (the parser's options of the installed version), `check_table`, `check_options`,
`refused_in_a_run`, `unsaid_options`, `unread_options`, `check_config`, `check_optimizer`, `check_load`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from argparse import Action, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from mup_megatron.engines.setup.megatron import COPIED_POSITIONS, LEARNED, emerging_missing
from mup_megatron.megatron_training.field_table import FIELDS
from mup_megatron.megatron_training.option_table import OPTIONS, Rule, exists
from mup_megatron.megatron_training.translated_options import UNSAID
from mup_megatron.util.errors import UserError

_TE = "transformer_engine"
_CAUSAL_ALONE = (
    "under context parallelism local attention masks the future and nothing else; expected none, or "
    f"--transformer-impl {_TE}"
)
# Filled where they are not typed: from the tensor-parallel sizes (`gtp_weight_remat_size` tells where they are more),
# and from the file of layers.
_FILLED = (
    *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
    "heterogeneous_layers_config_encoded_json",
)


class Known:
    """Megatron's options in the parser at hand.

    Args:
        actions: the parser's, before a script adds options of its own.
    """

    def __init__(self, actions: Iterable[Action]) -> None:
        self.actions = {action.dest: action for action in actions if action.option_strings and action.dest != "help"}

    def rule(self, name: str) -> Rule | None:
        """Of an option by its destination, or of a config's field; None where neither table has it."""
        action = self.actions.get(name)
        for option in action.option_strings if action else ():
            if (found := OPTIONS.get(option.removeprefix("--"))) is not None:
                return found
        return FIELDS.get(name)

    def typed(self, name: str) -> str:
        """An option by its destination as a user types it; another name as it is."""
        return self.actions[name].option_strings[0] if name in self.actions else name


def check_table(known: Known, version: str) -> None:
    """Whether the installed version has what the tables refuse or translate: a rule for a name that is gone is none.

    Args:
        known: the parser's options.
        version: of megatron-core.

    Raises:
        UserError: names the option or field.
    """
    fields = _fields()
    options = {option for action in known.actions.values() for option in action.option_strings}
    missing = [f"option --{name}" for name, rule in _needed(OPTIONS, version) if f"--{name}" not in options]
    missing += [f"field {name}" for name, _ in _needed(FIELDS, version) if name not in fields]
    if missing:
        raise UserError(
            f"megatron-core {version}: has no {missing[0]}, for which mup_megatron/megatron_training has a rule "
            "(option_table.py, field_table.py); expected a release from 0.16.1 to 0.19, or a "
            "table that knows what took its place"
        )


def _fields() -> set[str]:
    """Names of all fields of megatron-core's configs."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    configs = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return {field.name for config in configs for field in dataclasses.fields(config)}


def _needed(rules: Mapping[str, Rule], version: str) -> list[tuple[str, Rule]]:
    return [(name, rule) for name, rule in rules.items() if exists(rule, version)]


def check_options(args: Namespace, defaults: Mapping[str, Any], known: Known, *, here: bool = True) -> None:
    """Refuses options by what they say, before Megatron's own checks, which end in tracebacks for want of a GPU.

    Args:
        args: as Megatron's parser returns them.
        defaults: the script's own, for what was not typed.
        known: the parser's options.
        here: whether the run is to be on this machine, and not only explained.

    Raises:
        UserError: names the option and what works.
    """
    import torch

    cuda = torch.cuda.is_available() or not here
    for name, value, rule in _values(args, defaults, known):
        if rule is not None and (here or not rule.explained):
            _check(known.typed(name), value, [known.actions[name].default], rule, cuda=cuda)
    if args.transformer_impl == "local":
        _check_local(args, cuda=cuda)
    if (
        getattr(args, "mtp_num_layers", None)
        and args.position_embedding_type == LEARNED
        and args.pipeline_model_parallel_size > 1
    ):
        raise UserError(f"--mtp-num-layers {args.mtp_num_layers}: {COPIED_POSITIONS}; expected rope, or one stage")
    if args.optimizer in ("muon", "dist_muon"):
        _check_muon(args, here=here)
    if args.optimizer == "lion":
        _check_lion(args, here=here)
    if getattr(args, "spec", None):
        _check_spec(args.spec)
    if cuda:
        return
    if args.moe_token_dispatcher_type == "flex":  # noqa: S105
        raise UserError(
            "--moe-token-dispatcher-type flex: DeepEP and HybridEP compute on CUDA alone, and none is here; expected "
            "alltoall"
        )
    if args.distributed_backend == "nccl":
        raise UserError("--distributed-backend nccl: there is no CUDA device; expected --distributed-backend gloo")
    if args.transformer_impl == _TE:
        raise UserError(
            "--transformer-impl transformer_engine computes on CUDA alone, and none is here; expected "
            "--transformer-impl local"
        )


def refused_in_a_run(args: Namespace, defaults: Mapping[str, Any], known: Known) -> list[str]:
    """What a run would refuse of options that can be explained all the same, a sentence each.

    Args:
        args: Megatron's.
        defaults: that the script gives in the place of Megatron's.
        known: options of this Megatron.
    """
    sentences = []
    for name, value, rule in _values(args, defaults, known):
        try:
            _check(known.typed(name), value, [known.actions[name].default], rule, cuda=True)
        except UserError as error:
            sentences.append(str(error))
    return sentences


def unsaid_options(args: Namespace, defaults: Mapping[str, Any], known: Known) -> list[str]:
    """Options at other values than their defaults that change what is trained, and that no config of ours says.

    Args:
        args: Megatron's.
        defaults: that the script gives in the place of Megatron's.
        known: options of this Megatron.
    """
    names = UNSAID.split()
    return [said for option, said, _ in _changed(args, defaults, known) if option.removeprefix("--") in names]


def unread_options(args: Namespace, defaults: Mapping[str, Any], known: Known) -> list[str]:
    """Options at other values than their defaults that no table has: nobody here knows what they do to the rules.

    Args:
        args: Megatron's.
        defaults: that the script gives in the place of Megatron's.
        known: options of this Megatron.
    """
    return [said for _, said, rule in _changed(args, defaults, known) if rule is None]


def _changed(args: Namespace, defaults: Mapping[str, Any], known: Known) -> Iterator[tuple[str, str, Rule | None]]:
    """Options at other values than their defaults: each as it is spelled, with its value as it is typed, its rule."""
    for name, value, rule in _values(args, defaults, known):
        if not _equal(value, known.actions[name].default):
            option = known.typed(name)
            yield option, option if isinstance(value, bool) else f"{option} {_said(value)}", rule


def _values(args: Namespace, defaults: Mapping[str, Any], known: Known) -> Iterator[tuple[str, Any, Rule | None]]:
    """What every option says, with its rule."""
    for name, action in known.actions.items():
        value = getattr(args, name, action.default)
        if value in (None, False) and name in defaults:
            value = defaults[name]
        yield name, value, known.rule(name)


def _check_local(args: Namespace, *, cuda: bool) -> None:
    """What local attention cannot do: under context parallelism its mask is the causal one."""
    if args.moe_grouped_gemm and hasattr(args, "moe_use_legacy_grouped_gemm"):
        raise UserError(
            "--moe-grouped-gemm: local layers take megatron-core's legacy GroupedMLP up to 0.16, which later releases "
            "do not have; expected --transformer-impl transformer_engine, or none"
        )
    for name in ("experimental_attention_variant", "moe_latent_size"):
        if (value := getattr(args, name, None)) is not None and getattr(args, "spec", None) is None:
            raise UserError(
                f"--{name.replace('_', '-')} {value}: megatron-core builds it of Transformer Engine's layers alone; "
                "expected --transformer-impl transformer_engine, or --spec with layers of your own"
            )
    window = getattr(args, "window_size", None)
    masks = {
        f"--window-size {_said(window)}": window is not None,
        "--reset-attention-mask": args.reset_attention_mask,
        "--dataloader-inter-document-masking": getattr(args, "dataloader_inter_document_masking", False),
    }
    for option, given in masks.items():
        if given and args.context_parallel_size > 1:
            raise UserError(f"{option}: {_CAUSAL_ALONE}")
    if window is not None and not cuda:
        raise UserError(
            f"--window-size {_said(window)}: megatron-core makes the mask of a window on CUDA, and none is here; "
            "expected none"
        )


def _check_spec(spec: Sequence[str]) -> None:
    """Whether the layer spec is there: upstream goes on with its own where the import fails."""
    module, name = (*spec, "")[:2]
    try:
        found = hasattr(importlib.import_module(module), name)
        reason = f"{module} has no {name or 'second word'}"
    except ImportError as error:
        found, reason = False, str(error)
    if not found:
        raise UserError(f"--spec {' '.join(spec)}: {reason}; expected a module, and the name of a layer spec in it")


def _check_muon(args: Namespace, *, here: bool) -> None:
    """What Muon needs: its package, whole matrices under tensor parallelism, and bf16 where ranks share the steps."""
    if here and (missing := emerging_missing("muon")):
        raise UserError(f"--optimizer {args.optimizer}: {missing}")
    if (args.optimizer == "dist_muon" or args.use_distributed_optimizer) and not args.bf16:
        named = "--optimizer dist_muon" if args.optimizer == "dist_muon" else "--use-distributed-optimizer"
        raise UserError(
            f"{named}: Muon's layer-wise optimizer steps in bf16 alone (megatron-core wraps its parts for nothing "
            "else); expected --bf16, or --optimizer muon without --use-distributed-optimizer"
        )
    if args.tensor_model_parallel_size > 1 and args.muon_tp_mode == "blockwise":
        raise UserError(
            "--muon-tp-mode blockwise: each tensor-parallel rank would orthogonalise its slice by itself, and updates "
            "would depend on the layout; expected duplicated"
        )


def _check_lion(args: Namespace, *, here: bool) -> None:
    """What Lion needs: its package, and ranks that hold whole optimizer states."""
    if here and (missing := emerging_missing("lion")):
        raise UserError(f"--optimizer lion: {missing}")
    if args.use_distributed_optimizer:
        raise UserError(
            "--use-distributed-optimizer: megatron-core's layer-wise optimizer is tested with Muon alone; expected "
            "--optimizer lion without it"
        )


def check_load(args: Namespace) -> None:
    """Refuses what upstream cannot load again, before its first step ends in a traceback (KeyError: 'step').

    Args:
        args: Megatron's, of a run that goes on from a checkpoint.

    Raises:
        UserError: names the options.
    """
    from megatron.core.optimizer import Adam

    torchs = Adam.__module__.startswith("torch.")
    if args.use_torch_fsdp2 and torchs and not (args.no_load_optim or args.finetune):
        raise UserError(
            "--load with --use-torch-fsdp2: megatron-core cannot go on with the state of torch's AdamW that it saved; "
            "expected Transformer Engine or Apex, whose Adam counts its steps elsewhere, or --no-load-optim"
        )


def check_config(config: Any, known: Known, *, here: bool = True, kind: type | None = None) -> None:
    """Refuses what a config that upstream built says, wherever the script has it from.

    Args:
        config: a TransformerConfig, OptimizerConfig or DistributedDataParallelConfig.
        known: the parser's options.
        here: see `check_options`.
        kind: the class of megatron-core whose fields are looked at; None for the config's own class.

    Raises:
        UserError: names the field and what works.
    """
    import torch

    cuda = torch.cuda.is_available() or not here
    for field in dataclasses.fields(kind or config):
        if field.name in _FILLED:
            continue
        defaults = [field.default]
        if field.default_factory is not dataclasses.MISSING:
            defaults = [field.default_factory()]
        if field.name in known.actions:
            defaults.append(known.actions[field.name].default)
        rule = known.rule(field.name)
        if rule is not None and (here or not rule.explained):
            _check(f"{type(config).__name__}.{field.name}", getattr(config, field.name), defaults, rule, cuda=cuda)
    window, parts = getattr(config, "window_size", None), getattr(config, "context_parallel_size", 1)
    if window is not None and parts > 1 and getattr(config, "transformer_impl", None) == "local":
        raise UserError(f"{type(config).__name__}.window_size {_said(window)}: {_CAUSAL_ALONE}")
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        method = getattr(config, name, None)
        if method is not None and getattr(method, "func", None) is not torch.nn.init.normal_:
            raise UserError(
                f"{type(config).__name__}.{name}: the script's own; initial values are normal, with the rules' "
                "standard deviation; expected none"
            )


def check_optimizer(
    config: Any, model_chunks: Sequence[Any], overrides: Mapping[Any, Any] | None, known: Known
) -> None:
    """Refuses what the optimizer's configs say, and overrides of the script's own, which the rules' replace.

    Args:
        config: OptimizerConfig.
        model_chunks: as the script hands them over.
        overrides: `config_overrides`; upstream's own leave vectors out of weight decay, and so do the rules, and give
            embedding and head the rate of their own that the rules take too.
        known: the parser's options.

    Raises:
        UserError: names the field or override, and what works.
    """
    for one in (config, *(chunk.ddp_config for chunk in model_chunks if hasattr(chunk, "ddp_config"))):
        check_config(one, known)
    rates = {"max_lr": config.decoupled_lr, "min_lr": config.decoupled_min_lr}
    upstreams = ({"wd_mult": 0.0}, {name: rate for name, rate in rates.items() if rate is not None})
    for key, override in (overrides or {}).items():
        if dict(override) not in upstreams:
            raise UserError(
                f"config_overrides: {key} {dict(override)}: the script's own groups; rates and decay are the rules', "
                "by tensor; expected none"
            )


def _check(name: str, value: Any, defaults: Sequence[Any], rule: Rule | None, *, cuda: bool) -> None:
    if rule is None or any(_equal(value, default) for default in defaults):
        return
    if not rule.is_refused and (cuda or rule.kind != "cuda"):
        return
    said = _said(value)
    if said in rule.taken:
        return
    default = next((one for one in defaults if one is not dataclasses.MISSING), None)
    expected = " or ".join((_said(default), *rule.taken))
    shown = name if isinstance(value, bool) and name.startswith("--") else f"{name} {said}"
    if rule.kind == "cuda":
        raise UserError(f"{shown}: computes on CUDA alone, and none is here; expected {expected}")
    raise UserError(f"{shown}: not under µP here ({rule.why}); expected {expected}")


def _equal(value: Any, default: Any) -> bool:
    return bool(value == default) or _said(value) == _said(default)


def _said(value: Any) -> str:
    """A value as it is typed on a command line."""
    if value is None or value is False:
        return "none"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, functools.partial):
        value = value.func
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
