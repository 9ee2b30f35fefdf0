"""Commands on a run of megatron.training: the words behind `--`, and the config that is written from them.

Public names: `read_command`, `processes_of`, `default_workers`, `DEFAULT`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mup_megatron.cli.common import aside, gpus, is_override, typed
from mup_megatron.util.errors import UserError

DEFAULT = "runs/megatron-proxy.yaml"
"""The config that is written where none is named."""

_WAIT_SECONDS = 600.0


def read_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The config of a command line, written where it is not there yet, and the overrides.

    Args:
        words: `[CONFIG] [KEY.PATH=VALUE]...` and what stands behind `--`.

    Raises:
        UserError: there is no command line, it cannot be read, or the config is of another one.
    """
    from mup_megatron.config import load_config
    from mup_megatron.tuning.megatron_command import MegatronCommand

    line = typed.get()
    if "--" not in line or line[-1] == "--":
        raise UserError(
            "--megatron: no command line; expected it behind --, as it starts the run: mup-megatron tune --megatron -- "
            "torchrun --nproc-per-node 2 -m mup_megatron.run pretrain_gpt.py --mup-base base.yaml ..."
        )
    command = line[line.index("--") + 1 :]
    before = list(words[: len(words) - len(command)])
    named = [word for word in before if not is_override(word)]
    if len(named) > 1:
        raise UserError(f"{named[1]}: unexpected; expected one CONFIG and KEY.PATH=VALUE before --")
    path = Path(named[0] if named else DEFAULT)
    parts = MegatronCommand.read(command)
    if not path.exists():
        _write(path, command, parts)
    found = load_config(path).tuning.command
    if found != command:
        raise UserError(
            f"{path}: tuning.command: is another command line than the one behind --; expected the same, or the name "
            "of a CONFIG that is not there yet"
        )
    return str(path), [word for word in before if is_override(word)]


def processes_of(settings: Any) -> int:
    """Of one run of a config's command line; one per GPU where its launcher says no number."""
    from mup_megatron.tuning.megatron_command import MegatronCommand

    return MegatronCommand.read(settings.tuning.command).processes or max(1, gpus())


def default_workers(settings: Any) -> int:
    """Runs at a time: as many as have GPUs of their own, else one."""
    return max(1, gpus() // processes_of(settings))


def _write(path: Path, command: list[str], parts: Any) -> None:
    """Has the run itself say what it is; under a launcher of the user's its first rank asks for all."""
    from mup_megatron.parallel.ranks import read_rank
    from mup_megatron.tuning.megatron import own_launch
    from mup_megatron.tuning.megatron_task import Task

    rank = read_rank()
    if not rank.is_first:
        until = time.monotonic() + _WAIT_SECONDS
        while not path.exists():
            if time.monotonic() > until:
                raise UserError(f"{path}: the first rank did not write it")
            time.sleep(0.2)
        return
    folder = Path(tempfile.mkdtemp(prefix="mup-megatron-"))
    try:
        task = Task(kind="config", path=str(path), command=command)
        own_launch(parts, list(parts.arguments), task, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    aside(f"written: {path}")
