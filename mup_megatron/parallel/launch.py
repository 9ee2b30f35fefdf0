"""Starts the ranks of a command that needs several and finds no launcher around it (torchrun's library).

Public names: `start_ranks`, `Nodes`, `is_ours`, `end_with_launcher`, `keep_log`, `LOGS`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.parallel.ranks import at_once
from mup_megatron.util.errors import Held

_LAUNCHER = "MUP_MEGATRON_LAUNCHER"
_PR_SET_PDEATHSIG = 1  # prctl(2)
_SECONDS_TO_SAVE = 24 * 3600
"""How long ranks have from a signal on, before torch kills them: theirs are steps, a checkpoint and slow disks."""

LOGS = "MUP_MEGATRON_LOGS"
"""Variable that names the folder where every rank keeps a log of its own."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """This node among those of a launch; what torchrun calls --node-rank, --nnodes, --master-addr and --master-port."""

    rank: int
    count: int
    address: str
    port: int


def start_ranks(
    arguments: list[str],
    ranks: int,
    nodes: Nodes | None = None,
    on_failure: Callable[[int, int], None] = lambda _rank, _status: None,
) -> int:
    """Runs `python -m mup_megatron ARGUMENTS` once per rank on this machine and waits.

    Args:
        arguments: of the command, as typed.
        ranks: processes on this machine.
        nodes: the machines of the launch, on each of which this is called; only this one unless given.
        on_failure: told the first rank of this machine that failed, and its exit status.

    Returns:
        0, or the exit status of the first rank that failed; 143 after SIGTERM, 130 after Ctrl-C.

    Raises:
        Held: another program has the port at which the nodes meet.
    """
    with at_once():
        from torch.distributed import DistNetworkError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The first failing rank says what is wrong; torchrun's own account of it is a page long. Each of its modules has a
    # logger with a level of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ[_LAUNCHER] = str(os.getpid())
    settings: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "max_restarts": 0}
    count = 1
    if nodes is not None:
        count = nodes.count
        settings["rdzv_backend"], settings["rdzv_endpoint"] = "static", f"{nodes.address}:{nodes.port}"
        settings["rdzv_configs"] = {"rank": nodes.rank, "timeout": 900}
        settings["run_id"] = "nodes"  # a prefix in the store, which all nodes must share
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:  # older ones wait 30 s
        settings["shutdown_timeout"] = _SECONDS_TO_SAVE
    config = LaunchConfig(min_nodes=count, max_nodes=count, nproc_per_node=ranks, **settings)
    try:
        elastic_launch(config, sys.executable)("-m", "mup_megatron", *arguments)
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda failure: failure[1].timestamp)
        status = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        on_failure(rank, status)
        return status
    except SignalException as error:
        return 128 + int(error.sigval)
    except DistNetworkError as error:
        if nodes is None or "EADDRINUSE" not in str(error):
            raise
        raise Held(f"{nodes.address}:{nodes.port}: another program uses this port, at which the nodes meet") from None
    return 0


def is_ours() -> bool:
    """Whether `start_ranks` started this process."""
    return os.environ.get(_LAUNCHER) == str(os.getppid())


def end_with_launcher() -> None:
    """In a rank that `start_ranks` started: asks for SIGTERM when the launcher is gone, however it went (Linux).

    Ranks would go on by themselves, and hold the run's folder against the same command for as long as they do.
    """
    if sys.platform == "linux" and is_ours():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def log_path(directory: Path, host: str, rank: int) -> Path:
    """The log of one rank."""
    return directory / f"{host}-rank-{rank}.log"


def keep_log() -> None:
    """Where the environment names a folder for logs: puts what this rank prints there, in a file of its own.

    The first rank's goes to the screen too.
    """
    if not (directory := os.environ.pop(LOGS, None)):
        return
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    path = log_path(Path(directory), socket.gethostname(), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    else:
        reading, target = os.pipe()
        # SIGTERM to a whole SLURM step reaches tee too; it must outlive what the rank says of it.
        subprocess.Popen(["tee", "-a", str(path)], stdin=reading, preexec_fn=_ignore_signals)  # noqa: S603, S607
        os.close(reading)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
