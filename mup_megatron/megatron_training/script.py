"""`mup-megatron run`: an unmodified script written against megatron.training, in µP.

    mup-megatron run [--config mup.yaml] pretrain_gpt.py ARGS...
    torchrun --nproc-per-node 8 -m mup_megatron.run [--config mup.yaml] pretrain_gpt.py ARGS...
    deepspeed --module mup_megatron.run [--config mup.yaml] pretrain_gpt.py ARGS...

Public name: `run_script`.
"""

from __future__ import annotations

import ast
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from mup_megatron.megatron_training.option_table import OPTIONS
from mup_megatron.tuning.megatron_command import WATCHED
from mup_megatron.util import collector
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import read_bytes

_USAGE = (
    "expected mup-megatron run [--config mup.yaml] SCRIPT ARGS..., for example pretrain_gpt.py --mup-base base.yaml"
)


def run_script(arguments: Sequence[str]) -> None:
    """Runs a script under the entry patches, as if Python had been started on it.

    Args:
        arguments: `[--config FILE] SCRIPT ARGS...`; a launcher's `--local_rank` before the script is left out.

    Raises:
        UserError: no script, one that is not Megatron's, or no base sizes.
    """
    script, args, task = _split(arguments)
    from mup_megatron.megatron_training import watched

    try:
        if task is None:
            _check_script(script)
            _check_arguments(args)
            _prepare(script)
        else:
            watched.begin(task)
            _check_script(script)
            _prepare(script, is_watched=True)
            args += _asked(task)
            _check_arguments(args)
        sys.argv = [str(script), *args]
        collector.as_usual()
        _run(script)
    except BaseException as error:
        watched.failed(error)
        raise
    else:
        watched.finished()
    finally:
        watched.forget()


def _asked(first: Path) -> list[str]:
    """The arguments of the run that this process is from here on (forked.py), and those of its task."""
    from mup_megatron.megatron_training import watched
    from mup_megatron.megatron_training.forked import next_run

    task = watched.begin(next_run(first))
    watched.hold()
    return [*task.arguments, *(["--mup-write-config", task.path] if task.kind == "config" else [])]


def _check_arguments(args: list[str]) -> None:
    if not any(word.partition("=")[0] in ("--mup-base", "--mup-config") for word in args):
        raise UserError(
            "--mup-base: missing; expected a YAML file of the sizes where hyperparameters are defined, such as "
            "hidden_size: 256, or --config with base: in it"
        )
    if any(word.partition("=")[0] == "--yaml-cfg" for word in args):  # with it upstream checks no options
        raise UserError(f"--yaml-cfg: not under µP here ({OPTIONS['yaml-cfg'].why}); expected none")


def _prepare(script: Path, *, is_watched: bool = False) -> None:
    """What runs of a script have in common, whatever their arguments: imports and patches."""
    _announce_rank()
    sys.path.insert(0, str(script.resolve().parent))  # as `python SCRIPT` does: a checkout's own megatron comes first
    _check_training(script)

    import torch

    from mup_megatron import megatron_training
    from mup_megatron.megatron_training.options import prepare
    from mup_megatron.patches import PatchError, apply_patches
    from mup_megatron.patches.megatron_training import entry_patches, watch_patches
    from mup_megatron.patches.torchrun import torchrun_patches

    try:
        prepare()
        apply_patches(entry_patches(megatron_training), cuda=torch.cuda.is_available())
        if is_watched:
            from mup_megatron.megatron_training import watched, watched_coordinates

            patches = (*watch_patches(watched, watched_coordinates), *torchrun_patches(watched))
            apply_patches(patches, cuda=torch.cuda.is_available())
    except PatchError as error:
        raise UserError(f"{script}: {error}") from None


def _run(script: Path) -> None:
    from mup_megatron import megatron_training

    runpy.run_path(str(script), run_name="__main__")
    if megatron_training.current() is None:
        raise UserError(f"{script}: ended without reading Megatron's arguments; {_NOT_MEGATRONS}")


_NOT_MEGATRONS = "expected a script written against megatron.training, as Megatron-LM's pretrain_gpt.py is"


def _split(arguments: Sequence[str]) -> tuple[Path, list[str], Path | None]:
    """The script, its arguments with the options of this command as Megatron's parser will know them, and its task."""
    words, own = list(arguments), []
    task: Path | None = None
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not equals and words:
                words.pop(0)
        elif name == "--config":
            if not equals and not words:
                raise UserError(f"--config: expected a file; {_USAGE}")
            own += ["--mup-config", value if equals else words.pop(0)]
        elif name == WATCHED and words:
            task = Path(words.pop(0))
        else:
            raise UserError(f"{word}: unknown option before the script; {_USAGE}")
    if not words:
        raise UserError(f"no script was named; {_USAGE}")
    return Path(words[0]), [*words[1:], *own], task


def _check_script(script: Path) -> None:
    """Whether the script, or a module beside it that it imports, imports megatron.training."""
    waiting, seen = [script], set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        try:
            tree = ast.parse(read_bytes(path), str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot read the script: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            raise UserError(f"{path}: not Python ({error}); {_NOT_MEGATRONS}") from None
        for name in _imports(tree):
            if name == "megatron.training" or name.startswith("megatron.training."):
                return
            beside = script.parent.joinpath(*name.split(".")).with_suffix(".py")
            if beside not in seen and beside.is_file():
                waiting.append(beside)
    raise UserError(f"{script}: imports megatron.training nowhere; {_NOT_MEGATRONS}")


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _check_training(script: Path) -> None:
    import importlib.util

    try:
        found = importlib.util.find_spec("megatron.training")
    except ImportError:
        found = None
    if found is None:
        raise UserError(
            f"{script}: megatron.training is not installed, nor beside the script; expected a Megatron-LM checkout's "
            "script, or megatron-core 0.19 or later"
        )


def _announce_rank() -> None:
    """Tells megatron.training, which knows torchrun's variables alone, where this process stands."""
    from mup_megatron.parallel.ranks import read_rank

    rank = read_rank()
    for name, value in (("RANK", rank.rank), ("WORLD_SIZE", rank.world_size), ("LOCAL_RANK", rank.local_rank)):
        os.environ.setdefault(name, str(value))
    if not rank.launched and "MASTER_PORT" not in os.environ:
        # The store of a lone process takes a free port when it binds it; one chosen now may be another's by then.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
