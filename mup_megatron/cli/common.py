"""What all commands share: the app they register with, options and arguments by name.

Public names: `app`, `GROUPS`, `typed`, `is_override`, `launched_rank`, `start_typed`, `stopped`, `read_config`,
`laid_out`, `aside`, `show`, `gpus`, `console`, `one_process`, and the annotated types.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mup_megatron.util.errors import UserError

GROUPS = {
    "Start": ("new", "doctor", "config", "prepare", "explain", "plan"),
    "Tune and train": ("pipeline", "tune", "transfer", "train", "slurm"),
    "Check": ("coord-check", "stability", "horizon", "ladder", "reverse"),
    "Look": ("watch", "report", "diagnose", "generate", "evaluate"),
    "Convert": ("import", "export", "rebase"),
    "Megatron": ("run", "patch"),
}
"""The help's panels and their commands, both in the order of use."""


class _Grouped(TyperGroup):
    """Shows every command in its panel of GROUPS."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order of GROUPS."""
        return [name for names in GROUPS.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, told which panel it is in."""
        command: Any = super().get_command(ctx, cmd_name)
        for group, names in GROUPS.items():
            if cmd_name in names:
                command.rich_help_panel = group
        return command


app = typer.Typer(
    cls=_Grouped,
    name="mup-megatron",
    help="Maximal update parametrization (µP) for megatron-core and DeepSpeed: tune a small proxy, train the target.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        from mup_megatron import __version__
        from mup_megatron.util.provenance import commit

        checkout = commit()
        print(f"mup-megatron {__version__}" + (f", commit {checkout}" if checkout else ""))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _bare(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any config key, e.g. hparams.lr=3e-3.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for programs.")]
WorldSize = Annotated[
    int | None, typer.Option(min=1, help="Processes to lay the model out for; the fewest that fit unless given.")
]
AllowChange = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="A key that may differ from the checkpoint's; repeatable.")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes to start where no launcher did; one per GPU unless given.")
]
Megatron = Annotated[
    bool,
    typer.Option(
        "--megatron",
        help="Runs are those of the command line of megatron.training behind --; CONFIG is written from it if missing.",
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, or a run's (then its latest).")
]
TokenizerOf = Annotated[
    str | None,
    typer.Option(metavar="LIBRARY:PATH", help="The tokenizer, where the checkpoint does not tell it or it was moved."),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Runs at a time; one per GPU, else one per core.")]
Control = Annotated[
    bool, typer.Option(help="Afterwards train the same target in standard and in fan_in too, with the same values.")
]


typed: ContextVar[list[str]] = ContextVar("typed")
"""The command line that is being run."""


def is_override(word: str) -> bool:
    """Whether a word sets a key. The path of a file may have "=" in it too."""
    return "=" in word and "/" not in word.partition("=")[0] and not Path(word).is_file()


def launched_rank(processes: int | None) -> Any:
    """This process among those that a launcher started, where one did.

    Args:
        processes: what --nproc-per-node asks for.

    Raises:
        UserError: it asks for other processes than the launcher's; only one of the two can start them.
    """
    from mup_megatron.parallel.ranks import read_rank

    rank = read_rank()
    started = (os.environ.get("LOCAL_WORLD_SIZE"), str(rank.world_size))
    if rank.launched and processes is not None and str(processes) not in started:
        raise UserError(
            f"--nproc-per-node {processes}: a launcher started this process as rank {rank.rank} of {rank.world_size}, "
            "so the environment says; expected no --nproc-per-node, or neither RANK nor WORLD_SIZE in the environment"
        )
    return rank


def start_typed(ranks: int) -> int:
    """Runs the command that was typed, as it was typed, once per rank on this machine; its exit status.

    A rank reads the words itself, so that no option can be forgotten on the way to it.
    """
    from mup_megatron.parallel.launch import start_ranks

    return start_ranks(typed.get(), ranks)


def stopped(what: str) -> int:
    """Says on the first rank how a signal ended the command, and how it goes on; the exit status.

    Args:
        what: was saved, and where.
    """
    from mup_megatron.parallel.launch import is_ours
    from mup_megatron.parallel.ranks import read_rank, stopped_by

    number, rank = stopped_by(), read_rank()
    typed_here = is_ours() or not rank.launched  # else a launcher of the user's was typed, with words of its own
    command = f": {shlex.join(['mup-megatron', *typed.get()])}" if typed_here else ""
    if rank.is_first:
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        aside(f"{name}: {what}; the same command goes on from there{command}")
    return 128 + number


def read_config(path: str, overrides: list[str] | None, *, takes_ladder: bool = True) -> Any:
    """The config with its overrides, and with the exponents of the ladder that it names.

    Args:
        path: of the file.
        overrides: key.path=value.
        takes_ladder: whether `tuning.ladder` is read; not where it may not be there yet.

    Raises:
        UserError: bad input.
    """
    from mup_megatron.config import load_config, parse_overrides

    settings = load_config(path, parse_overrides(overrides or []))
    if settings.tuning.ladder is None or not takes_ladder:
        return settings
    from mup_megatron.tuning.fitted import ladder_of, settled

    return settled(settings, ladder_of(settings, None))


def aside(line: str) -> None:
    """Says a line beside the result."""
    print(line, file=sys.stderr, flush=True)


def show(result: Any, as_json: bool, lines: Iterable[object]) -> None:
    """Prints a command's result: lines for people, or JSON for programs."""
    print(json.dumps(result, indent=1) if as_json else "\n".join(map(str, lines)), flush=True)


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def laid_out(config: str, overrides: list[str] | None, world_size: int | None, *, on_cuda: bool = False) -> Any:
    """A run that is shown and not trained here, on so many processes, the fewest that fit unless given.

    Args:
        config: its file.
        overrides: of the command line.
        world_size: processes.
        on_cuda: whether precision and attention that are `auto` are those of a machine with CUDA.

    Raises:
        UserError: bad input.
    """
    from mup_megatron.engines.setup import resolve
    from mup_megatron.engines.setup.auto import as_on_cuda
    from mup_megatron.parallel.layout import smallest_world

    settings = read_config(config, overrides)
    if on_cuda:
        settings = as_on_cuda(settings)
    return resolve(settings, world_size or smallest_world(settings), trains=False)


def console(width: int = 140) -> Any:
    """Rich's console, of this width where nobody looks; what stands in brackets is text."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, markup=False)


def one_process(command: str) -> None:
    """Prepares a command that one process does; refuses a launcher before it."""
    from mup_megatron.parallel import upstream
    from mup_megatron.parallel.ranks import read_rank

    if read_rank().world_size > 1:
        raise UserError(f"{command} runs in one process; expected no launcher before it")
    upstream.prepare_process()
