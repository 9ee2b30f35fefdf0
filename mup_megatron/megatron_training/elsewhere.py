"""`--mup-explain` on a machine that cannot run the command line: what each tensor gets, from the options alone.

A recipe for eight nodes of GPUs is explained on a laptop. Upstream's own code checks the options and makes the model's
config. The layout decides how many processes are counted. No process group, model or kernel is started. What a script
does to its model beside its options is not seen; megatron_run.py sees it, where the command line can run.

Public names: `cannot_run`, `explain_elsewhere`, `show`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mup_megatron.config import Config
from mup_megatron.megatron_training.built_alone import built_alone
from mup_megatron.megatron_training.model_section import check_translation
from mup_megatron.megatron_training.option_check import check_config, check_options, refused_in_a_run
from mup_megatron.megatron_training.options import Settings, known
from mup_megatron.megatron_training.telemetry import standard_tensors, unread_names
from mup_megatron.megatron_training.translate import config_of, stages_of
from mup_megatron.megatron_training.tuning_config import write_tuning_config
from mup_megatron.model.build import parametrize
from mup_megatron.model.explain import print_table
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.patches.megatron_training import ELSEWHERE_PATCHES
from mup_megatron.rules.shapes import without_numbers
from mup_megatron.rules.table import Parametrization
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    from mup_megatron.model.as_built.chunks import BuiltModel


def cannot_run(args: Namespace) -> bool:
    """Whether a command line needs GPUs, or more processes than were started.

    Args:
        args: as Megatron's parser returns them.
    """
    if torch.cuda.is_available():
        return False
    on_cuda = args.transformer_impl == "transformer_engine" or args.distributed_backend == "nccl"
    return on_cuda or bool(args.world_size % _processes(args))


def explain_elsewhere(
    validate_args: Callable[..., Any], args: Namespace, defaults: Mapping[str, Any], settings: Settings
) -> tuple[Config, Parametrization, Layout, list[str]]:
    """What the options mean, on as many processes as they ask for at least.

    Args:
        validate_args: upstream's.
        args: as Megatron's parser returns them.
        defaults: the script's own.
        settings: what the options of µP name.

    Returns:
        The run, and what a run of it would refuse, a sentence each.

    Raises:
        UserError: upstream refuses the options, or they belong to no family.
    """
    check_options(args, defaults, known(), here=False)
    asked = {
        "--spec": getattr(args, "spec", None),
        "--hybrid-layer-pattern": getattr(args, "hybrid_layer_pattern", None),
    }
    asked |= {"--mup-tensors": settings.tensors, **{f"base.{name}": True for name in settings.base_sizes.named}}
    _check_recorded(asked)
    refused = refused_in_a_run(args, defaults, known())
    args.rank, args.world_size = 0, max(args.world_size, _processes(args))
    with _said_by_upstream(), _checked_as_elsewhere():
        validate_args(args, defaults)
        args.apply_rope_fusion = args.moe_permute_fusion = False  # kernels, which upstream looks for here
        given = _given(args)
    check_config(given["config"], known(), here=False)
    _check_recorded(built_alone(given["config"]))
    vocabulary = _vocabulary(args)
    config = config_of(args, given, settings, vocabulary)
    layout = resolve_layout(config, args.world_size, stages=stages_of(given))
    parametrization = parametrize(config, given["vocab_size"])
    check_translation(
        given["config"], core_config(config, config.model, parametrization.forward, layout, torch.device("cpu"))
    )
    return config, parametrization, layout, refused


def _check_recorded(asked: Mapping[str, Any]) -> None:
    """Refuses what only a model as built tells, which needs the run's processes and kernels."""
    if own := next((option for option, value in asked.items() if value is not None and value not in (False, ())), None):
        raise UserError(
            f"{own}: such a model is parametrised as it is built, and this machine cannot run the command line; "
            "expected its processes and kernels, or --transformer-impl local on one process"
        )


def show(
    config: Config,
    parametrization: Parametrization,
    layout: Layout,
    refused: Sequence[str] = (),
    *,
    settings: Settings,
    built: BuiltModel | None = None,
) -> None:
    """Prints the table, and what a run would refuse; writes the config for tuning that the options ask for.

    Args:
        config: the run in this project's terms.
        parametrization: of its model.
        layout: how ranks split it.
        refused: a sentence each.
        settings: what the options of µP name.
        built: of a model that is parametrised as the script builds it; what says what its tensors are is printed too.

    Raises:
        UserError: there is no such config, or it cannot be written.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, markup=False)
    print_table(parametrization, layout, console)
    if built is not None:
        _print_entries(built, console)
    for said in (standard_tensors(parametrization), unread_names(settings.unread)):
        if said:
            console.print(said, style="yellow", highlight=False)
    for sentence in refused:
        console.print(f"a run refuses {sentence}", style="yellow", highlight=False)
    if settings.written is not None:
        write_tuning_config(settings.written, config, settings.unsaid, settings.command)
        following = f"mup-megatron tune {shlex.quote(str(settings.written))}"
        console.print(f"written: {settings.written}; next: {following}", highlight=False, soft_wrap=True)


def _print_entries(built: BuiltModel, console: Any) -> None:
    """What says what each tensor is, layers and experts folded into one line."""
    from rich.table import Table

    table = Table(title="what the tensors of the model as built are")
    for column in ("tensor", "kind", "by"):
        table.add_column(column, overflow="fold")
    lines = {without_numbers(name): entry for name, entry in built.entries.items()}
    for name, entry in lines.items():
        by = entry.source if entry.name else f"{entry.source}: {entry.meant}"
        table.add_row(name, entry.kind, by)
    console.print(table)


def _processes(args: Namespace) -> int:
    """The least number of processes that the layout needs."""
    tensor = args.tensor_model_parallel_size
    experts = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size
    return math.lcm(tensor * args.context_parallel_size, experts) * args.pipeline_model_parallel_size


def _given(args: Namespace) -> dict[str, Any]:
    """The arguments of GPTModel that the translation reads, as upstream's model provider would pass them."""
    try:
        from megatron.training.argument_utils import core_transformer_config_from_args
    except ImportError:  # before 0.19
        from megatron.training.arguments import core_transformer_config_from_args
    rows = args.padded_vocab_size
    if rows is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        rows = -(-_vocabulary(args) // multiple) * multiple
    return {
        "config": core_transformer_config_from_args(args),
        "vocab_size": rows,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_base": args.rotary_base,
        "rotary_percent": args.rotary_percent,
        "rope_scaling": args.use_rope_scaling,
        "rope_scaling_factor": args.rope_scaling_factor,
    }


def _vocabulary(args: Namespace) -> int:
    """Entries of the tokenizer, before padding."""
    if args.vocab_size:
        return int(args.vocab_size)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded here; what is in the cache is found
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return int(build_tokenizer(args).vocab_size)
    except (AssertionError, OSError, ImportError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"--tokenizer-type {args.tokenizer_type}: cannot be loaded here ({str(error) or type(error).__name__}); "
            "expected its files, or --vocab-size with the number of its entries"
        ) from None


@contextlib.contextmanager
def _said_by_upstream() -> Iterator[None]:
    """Hides upstream's listing of its options, and turns an assertion of upstream's into one sentence."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (AssertionError, ValueError, RuntimeError, ImportError) as error:
        said = str(error).split("\n", 1)[0] or type(error).__name__
        raise UserError(f"Megatron's own checks of these options: {said}") from None


@contextlib.contextmanager
def _checked_as_elsewhere() -> Iterator[None]:
    """Lets upstream's checks pass without the hardware that they ask for; resets its micro-batch counter afterwards."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    for patch in ELSEWHERE_PATCHES:
        patch.apply()
    try:
        yield
    finally:
        for patch in ELSEWHERE_PATCHES:
            patch.revert()
        unset_num_microbatches_calculator()
