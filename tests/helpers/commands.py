"""Commands as users type them, in processes of their own, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mup_megatron.util.locks import hold

BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    """Without what a launcher or another test left behind."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return {**kept, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [str(argument) for argument in arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=240, check=False, **options
    )


def next_commands(said: str) -> list[list[str]]:
    """The words of each command that a line of what was said names as the next, as a shell reads them."""
    lines = re.findall(r"\bnext: mup-megatron (.+?)(?:  #.*)?$", said, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def mup(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "mup_megatron", *arguments)


def compile_operator(name: str) -> None:
    """Builds an operator of DeepSpeed, which takes minutes: longer than ranks are waited for.

    With the ninja of the tests' own PATH, which the ranks take too: another one's log would be started over. One build
    at a time; the lock of torch's extension builder, found here, is of a build that was killed, as a mutant's tests
    are, and every later build would wait for it.

    Args:
        name: of its builder in deepspeed.ops.op_builder, e.g. ``CPULionBuilder``.
    """
    from deepspeed.ops import op_builder
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(getattr(op_builder, name).NAME, verbose=False))
    with hold(folder.with_name(f"{folder.name}.tests"), print, f"builds {folder}"):
        (folder / "lock").unlink(missing_ok=True)
        build = f"from deepspeed.ops.op_builder import {name}; {name}().load(verbose=False)"
        own = {**environment(), "PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, "-c", build], env=own, capture_output=True, timeout=900, check=True)


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in metrics(directory) if "loss" in line]


class Background:
    """A command that runs on, and every process that came of it, whatever session a launcher put it into."""

    def __init__(self, *arguments: str | Path) -> None:
        self._mark = f"MUP_TEST={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        command = [sys.executable, "-m", "mup_megatron", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**environment(), name: value}
        )

    def processes(self, word: str = "") -> list[int]:
        """Of this command, those whose command line has a word."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                ours = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if ours and word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def trials(self) -> list[int]:
        """Processes that run trials."""
        return self.processes("mup_megatron.tuning.trial")

    def kill(self) -> None:
        """All of them at once, as when a node goes."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()
        until(lambda: not self.processes())


def until(what: Callable[[], Any], seconds: float = 120, every: float = 0.05) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(every)
    raise AssertionError("did not happen")
