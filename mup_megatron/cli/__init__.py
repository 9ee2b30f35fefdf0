"""`mup-megatron`: the command line. Commands are thin; the rooms below do the work.

Public names: `main`, `run`, `launched`, `default_config`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer

from mup_megatron.cli.common import app, is_override, typed
from mup_megatron.parallel.upstream import quiet
from mup_megatron.util import collector, screens
from mup_megatron.util.errors import DiskFull, UserError
from mup_megatron.util.shipped import shipped_folder

# They register their commands, which common.GROUPS puts into the order of the help.
from mup_megatron.cli import before  # noqa: F401  # isort: skip
from mup_megatron.cli import runs  # noqa: F401  # isort: skip
from mup_megatron.cli import proof  # noqa: F401  # isort: skip
from mup_megatron.cli import tools  # noqa: F401  # isort: skip
from mup_megatron.cli import convert  # noqa: F401  # isort: skip
from mup_megatron.cli import start  # noqa: F401  # isort: skip


_RUNS = {"train", "tune", "pipeline", "run"}
"""Commands whose result is in files, and not in what they print."""


def main() -> NoReturn:
    """Entry point: bad input is one sentence and exit status 2, never a traceback."""
    from mup_megatron.parallel.launch import end_with_launcher, keep_log
    from mup_megatron.parallel.ranks import end_at_sigterm

    is_script = sys.argv[1:2] == ["run"]
    collector.rarely()
    end_at_sigterm(of_script=is_script)
    end_with_launcher()
    keep_log()
    if not is_script:
        quiet()
    screens.outlast()
    sys.exit(_printed(run(sys.argv[1:]), sys.argv[1:]))


def _printed(status: int, arguments: list[str]) -> int:
    """The exit status of a command whose output may have got lost; says so, unless a reader left, as `| head` does."""
    failed = screens.failure()
    if failed is None or status:
        return status
    left = isinstance(failed, BrokenPipeError)
    if not left:
        print(f"mup-megatron: error: standard output: {failed.strerror}; what was printed is lost", file=sys.stderr)
    if not _RUNS.isdisjoint(arguments[:1]):
        return 0
    return 1 if left else 2


def run(arguments: list[str]) -> int:
    """Runs a command line; returns its exit status. Process groups that it started are ended."""
    others = _has_groups()
    token = typed.set(arguments)
    try:
        status = _status(arguments)
    finally:
        typed.reset(token)
    if _has_groups() and not others:
        from mup_megatron.parallel.runtime import stop_distributed

        stop_distributed()  # a process that leaves while gloo's threads run may abort, with a status of its own
    return status


def _has_groups() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()


@functools.cache
def _command() -> Any:
    """What `app` becomes, made once a process: it reads the signature of every command."""
    return typer.main.get_command(app)


def _status(arguments: list[str]) -> int:
    from mup_megatron.parallel.ranks import say_error

    # When rank 0 exits, the other ranks print our one-line error; this silences torch's traceback.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        result = _command().main(arguments, standalone_mode=False)
        return int(result or 0)
    except UserError as error:
        say_error(str(error), same=isinstance(error, DiskFull))
        return error.status
    except typer.TyperException as error:  # unknown command or option
        say_error(error.format_message().replace(": Value error, ", ": "))  # pydantic's word
        return 2
    except KeyboardInterrupt:
        return 130


def launched(command: str, arguments: list[str]) -> NoReturn:
    """What launch/*.sh run: a command, on `default_config` unless a config is named.

    Args:
        command: pipeline or tune.
        arguments: [CONFIG] [KEY.PATH=VALUE]..., and whatever `--local_rank` a launcher adds.
    """
    from mup_megatron.parallel.ranks import end_at_sigterm

    collector.rarely()
    end_at_sigterm()
    quiet()
    screens.outlast()
    arguments = [argument for argument in arguments if not argument.startswith(("--local_rank", "--local-rank"))]
    if not arguments or arguments[0].startswith("-") or is_override(arguments[0]):
        arguments = [os.path.relpath(default_config(Path(sys.argv[0]))), *arguments]
    sys.exit(_printed(run([command, *arguments]), [command]))


def default_config(script: Path) -> Path:
    """config.yaml beside the script's folder, as `mup-megatron new` writes it, else the configs/demo.yaml shipped.

    Args:
        script: launch/pretrain_gpt.sh or launch/tune_proxy.sh, wherever that was copied to.
    """
    beside = script.resolve().parent.parent / "config.yaml"
    return beside if beside.is_file() else shipped_folder("configs") / "demo.yaml"
