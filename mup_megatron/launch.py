"""Starts the ranks of a command that needs several and finds no launcher around it (torchrun's library)."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import Any

_LAUNCHER = "MUP_MEGATRON_LAUNCHER"
_PR_SET_PDEATHSIG = 1  # prctl(2)


def start_ranks(arguments: list[str], ranks: int) -> int:
    """Runs `python -m mup_megatron ARGUMENTS` once per rank on this machine and waits.

    Args:
        arguments: of the command, as typed.
        ranks: processes.

    Returns:
        0, or the exit status of the first rank that failed; 143 after SIGTERM.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The first failing rank says what is wrong; torchrun's own account of it is a page long.
    for logger in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ[_LAUNCHER] = str(os.getpid())
    settings: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "max_restarts": 0}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=ranks, **settings)
    try:
        elastic_launch(config, sys.executable)("-m", "mup_megatron", *arguments)
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def end_with_launcher() -> None:
    """In a rank that `start_ranks` started: asks for SIGTERM when the launcher is gone, however it went (Linux).

    Ranks would go on by themselves, and hold the run's folder against the same command for as long as they do.
    """
    if sys.platform == "linux" and os.environ.get(_LAUNCHER) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
