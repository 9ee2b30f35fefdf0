"""One trial, in the process that runs it: `python -m mup_megatron.tuning.trial`, started through process.py.

The process lives on from trial to trial, so that torch, megatron-core and DeepSpeed are imported once. process.py says
what it hears and says. Whatever libraries print goes to the worker's log.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from mup_megatron.tuning.abreast import memory_share
from mup_megatron.tuning.process import Answer, End, Evaluation, Ready, Said, Start, Step
from mup_megatron.util import collector

_TELL_SECONDS = 2.0
_Told = TypeVar("_Told", Start, Answer)


class _Wire:
    """The two ends of the conversation. The process ends when the other end is gone."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._in: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._in.put(line)
        os._exit(0)

    def receive(self, kind: type[_Told]) -> _Told:
        """The next message, which is of this kind; waits."""
        return kind.model_validate(json.loads(self._in.get()))

    def send(self, message: Said) -> None:
        """One message."""
        self._out.write(message.line())
        self._out.flush()


class _Watcher:
    """What the training loop tells (train/watching.py)."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._told = 0.0
        self.stopped = False

    def step(self, step: int, loss: float) -> None:
        """Says now and then that the trial is alive."""
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._told = time.monotonic()
            self._wire.send(Step(step=step, loss=loss, memory=memory_share()))

    def evaluated(self, step: int, loss: float) -> bool:
        """Reports an evaluation; whether the trial goes on."""
        self._wire.send(Evaluation(step=step, loss=loss))
        self.stopped = not self._wire.receive(Answer).go_on
        return not self.stopped


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this machine had no memory left, which may be another process's doing."""
    import torch

    of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch has no type for it
    return of_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def main() -> None:
    """Runs trials until the other end is gone."""
    collector.rarely()
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the worker too, which sends SIGTERM
        signal.signal(number, signal.SIG_IGN)
    wire = _Wire()
    from torch.distributed.checkpoint.api import CheckpointException

    from mup_megatron.parallel import upstream

    upstream.quiet()
    upstream.prepare_process()  # before megatron-core is imported, whose functions are then not compiled at once
    from mup_megatron.checkpoints.run_directory import Busy
    from mup_megatron.config import parse_config
    from mup_megatron.engines import deepspeed as _deepspeed  # noqa: F401  (imported before the first trial's clock)
    from mup_megatron.engines.setup import resolve
    from mup_megatron.parallel import runtime
    from mup_megatron.parallel.ranks import Rank
    from mup_megatron.train.loop import Diverged, Terminated
    from mup_megatron.train.run import train
    from mup_megatron.util.disk import full_disk
    from mup_megatron.util.errors import DiskFull

    wire.send(Ready())
    while True:
        told = wire.receive(Start)
        watcher = _Watcher(wire)
        try:
            config = parse_config(told.config, told.source)
            with full_disk(Path(config.run.dir), "files of the trial"):
                loss = train(resolve(config, 1), Rank(), watcher=watcher)
            if watcher.stopped:
                wire.send(End(state="stopped"))
            elif loss is not None and math.isfinite(loss):
                wire.send(End(state="complete", loss=loss))
            else:
                wire.send(End(state="diverged", reason="the evaluation loss is no finite number"))
        except Diverged as error:
            wire.send(End(state="diverged", reason=str(error)))
        except Terminated as error:
            wire.send(End(state="terminated", reason=str(error)))
            return
        except DiskFull as error:
            wire.send(End(state="disk_full", reason=str(error)))
            return
        except Busy:
            wire.send(End(state="busy", reason="its folder is another process's"))
            return
        except (Exception, CheckpointException) as error:  # the latter is torch's, and no Exception
            with suppress(OSError):  # the log's disk may be full
                traceback.print_exc()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            reason = f"{type(error).__name__}: {reason}"[:300]
            wire.send(End(state="died" if is_out_of_memory(error) else "failed", reason=reason))
            return  # whatever it left in this process (memory, groups) goes with it
        runtime.stop_distributed()


if __name__ == "__main__":
    main()
