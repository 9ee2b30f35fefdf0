"""Which rank of a launch this process is, its device, what it says when it fails, and the signals that stop it.

Public names: `Rank`, `read_rank`, `device_of`, `say_error`, `end_at_sigterm`, `at_once`, `stop_signal`, `stopped_by`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from mup_megatron.util.errors import UserError
from mup_megatron.util.screens import silence
from mup_megatron.util.secrets import masked

if TYPE_CHECKING:
    import torch

# Variables that name (rank, world size, local rank), in the order in which they are believed.
_LAUNCHERS = (
    ("torchrun or deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)

# Launchers end the other ranks within so long of the first failure.
_SPEECHLESS_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among those of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0


def read_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Reads rank, world size and local rank from torchrun's variables, else SLURM's, else Open MPI's.

    SLURM's count only inside srun with several tasks or with an address to meet at: a plain `sbatch` script sets them
    too, and is no launcher.

    Raises:
        UserError: the variables contradict each other.
    """
    for launcher, rank_name, world_name, local_name in _LAUNCHERS:
        if rank_name not in environment or world_name not in environment:
            continue
        try:
            rank, world_size = int(environment[rank_name]), int(environment[world_name])
            local_rank = int(environment.get(local_name, rank))
        except ValueError:
            raise UserError(
                f"{rank_name}, {world_name}, {local_name}: expected whole numbers from {launcher}"
            ) from None
        if world_size == 1 and launcher == "SLURM":
            continue
        if not 0 <= rank < world_size:
            raise UserError(f"{rank_name}={rank} is not below {world_name}={world_size}, as {launcher} should have it")
        return Rank(rank=rank, world_size=world_size, local_rank=local_rank, launched=True)
    return Rank()


def say_error(message: str, *, same: bool = False) -> None:
    """Says what is wrong, once where all ranks say the same, as they do before they have met.

    Args:
        message: one sentence.
        same: whether all say the same although they have met.

    Then rank 0 prints the error. Other ranks wait 10 s before they exit; otherwise the launcher may kill rank 0 before
    it prints. A rank that is still alive after the wait has an error of its own, and prints it.
    """
    try:
        rank = read_rank()
    except UserError:  # it is what is being said: the launcher's variables contradict each other
        rank = Rank()
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    alone = (same or not met) and not rank.is_first
    if alone:
        time.sleep(_SPEECHLESS_SECONDS)
    where = f" (rank {rank.rank})" if rank.world_size > 1 and (met or alone) else ""
    print(f"mup-megatron: error{where}: {masked(message)}", file=sys.stderr, flush=True)


def device_of(rank: Rank) -> torch.device:
    """This process's device: its GPU where there is one, else the CPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(rank.local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    if "OMP_NUM_THREADS" not in os.environ:
        # torchrun shares the cores among its ranks; the deepspeed launcher leaves every rank to take them all.
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or rank.world_size)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, local_ranks)))
    return torch.device("cpu")


_came: list[signal.Signals] = []


def end_at_sigterm(*, of_script: bool = False) -> None:
    """SIGTERM ends this process with status 143, while nobody who saves something handles it. Once per process.

    Left to the operating system, it would end as by no handler (-15 to whoever started it). Python's handlers wait for
    the main thread, which may wait for other ranks; so another thread reads which signals came. In a rank SIGINT is
    treated alike (130), for its launcher sends it and waits for the rank's end.

    Args:
        of_script: whether the process is a script of the user's, which may handle KeyboardInterrupt.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGTERM, _end)
    launched = any(rank in os.environ and world in os.environ for _, rank, world, _ in _LAUNCHERS)
    if launched and not of_script and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=(reading,), name="SIGTERM", daemon=True).start()


@contextmanager
def at_once() -> Iterator[None]:
    """Ctrl-C ends this process with status 130 meanwhile. For imports, some of which swallow KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _watch(reading: int) -> None:
    while numbers := os.read(reading, 64):
        for number in (signal.SIGTERM, signal.SIGINT):
            # Where `stop_signal` saw one, the handler is back, and what was saved is being told.
            if number in numbers and signal.getsignal(number) is _end and not _came:
                os._exit(128 + number)


def _forget() -> None:
    """In a process that was forked: it has no such thread, and its signals are no business of the other's."""
    signal.set_wakeup_fd(-1)
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is _end:
            signal.signal(number, usual)


@contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether SIGTERM, SIGINT (Ctrl-C) or SIGHUP (a terminal that closed) came.

    Launchers may send each of them twice. SIGINT and SIGHUP stay ignored where they were: in a trial, which its worker
    stops, in what a shell put in the background, under nohup.
    """
    here: list[int] = []
    screens = [screen for screen in (1, 2) if os.isatty(screen)]

    def handle(number: int, _frame: FrameType | None) -> None:
        here.append(number)
        _came.append(signal.Signals(number))
        if number == signal.SIGHUP and screens:  # what is still said would raise OSError
            silence(screens)
            screens.clear()

    keyboard = (signal.SIGINT, signal.SIGHUP)
    numbers = [signal.SIGTERM, *(number for number in keyboard if signal.getsignal(number) is not signal.SIG_IGN)]
    previous = [(number, signal.signal(number, handle)) for number in numbers]
    try:
        yield lambda: bool(here)
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def stopped_by() -> signal.Signals:
    """The last signal that `stop_signal` saw in this process; SIGTERM where only another rank saw one."""
    return _came[-1] if _came else signal.SIGTERM
