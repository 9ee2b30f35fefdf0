"""Gloo ranks that stay alive between tests: starting torch, megatron-core and DeepSpeed is what costs.

`Ranks.run(n, body, **arguments)` runs a module-level function on n ranks and returns what each returned. Every call
gets fresh process groups; a body that raises fails the call with its traceback, one that hangs ends the ranks, and the
next call starts new ones.
"""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.ranks import Rank

MOST = 4
_TIMEOUT = 180.0
_MOST_THREADS = 100
_NO_GROUP = "Gloo connectFullMesh failed"


def _threads(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/task"))


class RankError(AssertionError):
    """A body failed on some rank."""


class NoGroupError(RankError):
    """The ranks did not find each other, for gloo's connections sometimes break on a busy machine; tried once more."""


class Ranks:
    """A pool of up to four ranks on this machine; `prepare` runs in each before anything else."""

    def __init__(self, prepare: Callable[[], None] = upstream.prepare_deepspeed) -> None:
        self._prepare = prepare
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="mup-ranks-")
        self._jobs = 0

    def run(self, count: int, body: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Runs `body(rank, **arguments)` on `count` ranks; `rank` is a Rank. Returns the results by rank."""
        try:
            return self._run(count, body, arguments)
        except NoGroupError:
            return self._run(count, body, arguments)

    def _run(self, count: int, body: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
        self._start(count)
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store{self._jobs}")
        active = self._workers[:count]
        for number, (_, pipe) in enumerate(active):
            pipe.send((number, count, store, body, arguments))
        answers: dict[int, tuple[Any, str]] = {}
        waiting: dict[Any, int] = {pipe: number for number, (_, pipe) in enumerate(active)}
        failed = False
        while waiting:
            # Where one has failed the others may wait for it in a collective, or have failed too.
            ready: list[Any] = multiprocessing.connection.wait(list(waiting), 2.0 if failed else _TIMEOUT)
            if not ready and failed:
                break
            if not ready:
                self.stop()
                raise RankError(f"{body.__name__}: ranks {sorted(waiting.values())} did not answer in {_TIMEOUT:.0f} s")
            for answered in ready:
                number = waiting.pop(answered)
                try:
                    answers[number] = answered.recv()
                except (EOFError, OSError):
                    process = self._workers[number][0]
                    process.join(5.0)
                    self.stop()
                    raise RankError(
                        f"{body.__name__}: rank {number} of {count} died with exit code {process.exitcode}"
                    ) from None
                failed = failed or bool(answers[number][1])
        results = [answers.get(number, (None, "")) for number in range(count)]
        failures = [f"rank {number}:\n{error}" for number, (_, error) in enumerate(results) if error]
        if failures:
            if waiting or len(failures) < count:
                self.stop()  # the others may still wait for a collective
            kind = NoGroupError if any(_NO_GROUP in error for _, error in results) else RankError
            raise kind(f"{body.__name__}:\n" + "\n".join(failures))
        if max(_threads(process.pid) for process, _ in self._workers) > _MOST_THREADS:
            self.stop()  # some model of upstream's is still held, and its process groups' threads take the cores
        return [value for value, _ in results]

    def _start(self, count: int) -> None:
        # Children must not fight over two cores, and must not inherit this process's launcher variables.
        os.environ["OMP_NUM_THREADS"] = "1"
        # Forks of one process that has imported what takes long, and has done nothing yet.
        usual = self._prepare is upstream.prepare_deepspeed
        context = multiprocessing.get_context("forkserver" if usual else "spawn")
        context.set_forkserver_preload(["tests.helpers.imported"])
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._prepare), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self) -> None:
        """Ends every rank."""
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
            process.join()
        self._workers = []

    def close(self) -> None:
        """Ends every rank and removes what they left on disk."""
        self.stop()
        self._folder.cleanup()


def _serve(pipe: Connection, prepare: Callable[[], None]) -> None:
    import datetime

    import torch
    import torch.distributed

    prepare()
    torch.set_num_threads(1)
    while True:
        try:
            number, count, store, body, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(RANK=str(number), WORLD_SIZE=str(count), LOCAL_RANK=str(number))
        try:
            torch.distributed.init_process_group(
                "gloo",
                rank=number,
                world_size=count,
                store=torch.distributed.FileStore(store, count),
                timeout=datetime.timedelta(seconds=60),
            )
            result = (
                body(Rank(rank=number, world_size=count, local_rank=number, launched=True), **arguments),
                "",
            )
        except BaseException:
            result = (None, traceback.format_exc())
        finally:
            try:
                _stop()
            except Exception as error:
                result = (None, f"{result[1]}\nand process groups did not end: {error}")
        pipe.send(result)


def _stop() -> None:
    """Ends the process groups. Each waits for 10 ms until gloo's loop has let go of it: here all at once."""
    from torch.distributed.distributed_c10d import _world

    groups = [[group] for group in _world.pg_map]
    _forget_models()
    runtime.stop_distributed()
    waits = [threading.Thread(target=group.clear) for group in groups]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join()


def _forget_models() -> None:
    """What upstream keeps for a process's life, which here sees many models.

    ZeRO 3 numbers parameters and modules and compares the numbers over ranks, and ranks of a pool have run different
    numbers of models. Its two caches hold every model, and those of rotary embeddings the last 32, with their process
    groups and the threads of these, which take turns on the cores until nothing else does. torch's DTensor keeps meshes
    whose groups have ended, and takes them for equal ones of the next body (tests/parallel/test_ranks.py).
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    Init.param_id = 0
    register = parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
    inspect.signature(register).parameters["count"].default[0] = 0
    parameter_offload.FWD_MODULE_STACK.clear()
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in cached.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    for rotary in (RotaryEmbedding, YarnRotaryEmbedding):
        vars(rotary)["forward"].cache_clear()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
