"""A disk that is full under the log, and a reader of it that is gone, end no run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mup_megatron.checkpoints.checkpoint import Checkpoints
from tests.cli.test_cli import write
from tests.helpers.commands import environment, metrics
from tests.helpers.configs import MIXED, make

MUP = [sys.executable, "-m", "mup_megatron"]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(
    not FULL.exists(), reason="needs /dev/full, where every write says that the disk is full"
)


@needs_full
def test_output_that_is_lost_is_one_sentence() -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [*MUP, "config", "hparams.lr"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment()
        )
    assert ended.stderr == ("mup-megatron: error: standard output: No space left on device; what was printed is lost\n")
    assert ended.returncode == 2


def test_a_reader_that_leaves_is_no_error() -> None:
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*MUP, "config"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment())
    os.close(writer)
    assert (ended.stderr, ended.returncode) == ("", 1)


@pytest.mark.parametrize("option", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_what_is_printed_at_once_stays_so(option: list[str]) -> None:
    """PYTHONUNBUFFERED and -u, as in containers and jobs: a process that is killed has said what it printed."""
    code = "import os; from mup_megatron.util import screens; screens.outlast(); print('said'); os.kill(os.getpid(), 9)"
    environ = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, *option, "-c", code], capture_output=True, text=True, env=environ)
    assert ended.stdout == ("said\n" if option else "")


@pytest.mark.slow
@needs_full
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_run_goes_on_without_its_screen(tmp_path: Path, ranks: str) -> None:
    """All of its steps and its checkpoint are there."""
    folders = {"run__dir": str(tmp_path / "run"), "data__dir": str(tmp_path / "data")}
    config = write(tmp_path, make(MIXED, **folders, training__train_steps=4, training__checkpoint_interval=4))
    with FULL.open("w") as full:
        command = [*MUP, "train", config, "--nproc-per-node", ranks]
        ended = subprocess.run(command, stdout=full, stderr=full, env=environment())
    assert ended.returncode == 0
    assert [path.name for path in Checkpoints(tmp_path / "run" / "checkpoints", 2).newest_first()] == ["step_00000004"]
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3, 4]
