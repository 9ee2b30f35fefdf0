"""The runs of one script after one another, each in a fork of a process that has imported what all of them need.

What upstream keeps for a process's life (global variables, process groups, caches, generators) begins anew in each
fork: a run is to the last bit what it is in a process of its own, without the seconds that imports take.

Public name: `next_run`.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from mup_megatron.megatron_training.watched import count_runs, end_with, is_pipe
from mup_megatron.parallel.ranks import read_rank
from mup_megatron.tuning.megatron_task import IDLE, LOG, NEXT
from mup_megatron.util.files import write_whole

_POLL_SECONDS = 0.05
# What megatron.training and this package import once a run is under way, which takes seconds.
_IMPORTED_LATE = (
    "mup_megatron.megatron_training.megatron_run",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.tokenizers.text",
)


def next_run(first: Path) -> Path:
    """The task of a run, in a process that is this run's own.

    The process that calls this returns only where it cannot fork: it is then the first run's. Elsewhere it waits for
    one task after the other until nobody is there to give it any, or ends as a run that failed did.

    Args:
        first: the first run's task.
    """
    if not _can_fork():
        end_with(0)
        return first
    for name in _IMPORTED_LATE:
        with suppress(ImportError):  # not in every release
            importlib.import_module(name)
    gc.freeze()  # what is here stays, and no run looks through it
    rank, parent, task, number = read_rank(), os.getppid(), first, 0
    while True:
        heard, held = os.pipe()  # closed when this process ends, however it does
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            os.close(held)
            count_runs(number)
            _enter(task, heard)
            return task
        os.close(heard)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if _is_alone(parent):
                os._exit(1)
            time.sleep(_POLL_SECONDS)
        os.close(held)
        _leave_as(os.waitstatus_to_exitcode(ended[1]))
        write_whole(task.parent / IDLE.format(rank.rank), str(rank.world_size))
        while not (task.parent / NEXT).exists():
            if _is_alone(parent) or not task.parent.is_dir():
                os._exit(0)
            time.sleep(_POLL_SECONDS)
        task, number = Path((task.parent / NEXT).read_text(encoding="utf-8")), number + 1


def _can_fork() -> bool:
    """Whether a fork of this process can compute. It cannot on CUDA, where an import has begun to use it here."""
    import torch

    cuda = torch.cuda.is_available()
    child = os.fork()
    if not child:
        try:
            torch.zeros(1, device="cuda" if cuda else "cpu")
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _enter(task: Path, heard: int) -> None:
    """What a run's own process says goes to the run's own log; it ends with the process that forked it."""
    log = os.open(task.parent.parent / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    end_with(heard)


def _leave_as(status: int) -> None:
    """Ends this process as a run that failed has ended, so that the launcher sees it."""
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    if status:
        os._exit(abs(status))


def _is_alone(parent: int) -> bool:
    """Whether whoever gives the tasks is gone, or the launcher."""
    hung_up = is_pipe(0) and bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1)
    return hung_up or os.getppid() != parent
