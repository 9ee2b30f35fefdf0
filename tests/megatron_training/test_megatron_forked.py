"""Watched runs in forks of one process: each is what it is in a process of its own, and one that fails ends it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.tuning.megatron import MegatronProcess, own_launch, own_process
from mup_megatron.tuning.megatron_command import MegatronCommand
from mup_megatron.tuning.megatron_task import Task
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = [pytest.mark.slow, needs_training]
TWO_RANKS = ("torchrun", "--nproc-per-node", "2", "-m", "mup_megatron.run")
# A script that keeps something in upstream's module, on which its next run in the same process depends.
LEAKS = f"""
import runpy
import sys

import megatron.core
import megatron.training

megatron.core.left_behind = getattr(megatron.core, "left_behind", 100) + 1
sys.argv += ["--seed", str(megatron.core.left_behind)]
runpy.run_path({str(megatron_runs.SCRIPT)!r}, run_name="__main__")
"""


def words_of(folder: Path, *extra: str, **changed: Any) -> list[str]:
    """With more steps than the two that are measured."""
    return megatron_runs.words(folder, *extra, train_iters=8, **changed)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A word for each process that is started, really."""
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        started.append(args[0])
        return real(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def measured(folder: Path, words: list[str], *command: str, process: MegatronProcess | None = None) -> str:
    """What a coordinate check measures in one run: sizes, updates and losses of two steps, with all digits."""
    path = folder / "coordinates.json"
    task = Task(kind="coordinates", path=str(path), steps=2)
    own_launch(MegatronCommand.read(command), words, task, folder, process)
    return path.read_text()


@pytest.mark.parametrize("launcher", [(), TWO_RANKS], ids=["alone", "torchrun"])
def test_as_in_processes_of_their_own(launcher: tuple[str, ...], tmp_path: Path, starts: list[Any]) -> None:
    """Three runs of two sizes and seeds, the third as the first: to the last bit, after one start of the launcher."""
    command = (*launcher, str(megatron_runs.SCRIPT))
    split = ("--tensor-model-parallel-size", "2") if launcher else ()
    small, large = (
        words_of(tmp_path, *split, hidden_size=size, num_attention_heads=size // 16, seed=seed)
        for size, seed in ((32, 7), (64, 8))
    )
    with own_process() as process:
        runs = [
            measured(tmp_path / f"run-{number}", words, *command, process=process)
            for number, words in enumerate((small, large, small))
        ]
        assert len(starts) == 1
    fresh = [measured(tmp_path / f"fresh-{number}", words, *command) for number, words in enumerate((small, large))]
    assert len(starts) == 3
    assert runs == [*fresh, fresh[0]]
    assert fresh[0] != fresh[1]
    for number in range(3):  # each run's own log has its own output, once
        assert (tmp_path / f"run-{number}" / "log.txt").read_text().count("mup-megatron: mup applied") == 1
        assert not list((tmp_path / f"run-{number}").glob("talk-*"))


def test_what_a_run_leaves_behind(ranks: Ranks, tmp_path: Path) -> None:
    """A second run sees nothing of the first. Control: where both are in one process, the second has another seed."""
    script = tmp_path / "leaks.py"
    script.write_text(LEAKS)
    words = words_of(tmp_path)
    with own_process() as process:
        first, second = (measured(tmp_path / name, words, str(script), process=process) for name in ("one", "two"))
    assert first == second
    one, two = (ranks.run(1, megatron_runs.train, words=words, script=script)[0]["initial"] for _ in range(2))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert one[name].shape == two[name].shape
    assert not np.array_equal(one[name], two[name])


def test_a_run_that_fails(tmp_path: Path, starts: list[Any]) -> None:
    """It says why, its process ends, and the next run has a new one."""
    command = str(megatron_runs.SCRIPT)
    with own_process() as process:
        before = measured(tmp_path / "before", words_of(tmp_path), command, process=process)
        with pytest.raises(UserError, match="--qk-clip: computes on CUDA alone, and none is here"):
            measured(tmp_path / "fails", words_of(tmp_path, "--qk-clip"), command, process=process)
        assert len(starts) == 1
        assert measured(tmp_path / "after", words_of(tmp_path), command, process=process) == before
        assert len(starts) == 2


CANNOT = """
import os


def cannot_compute():
    import torch

    def zeros(*_args, **_kwargs):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    torch.zeros = zeros


os.register_at_fork(after_in_child=cannot_compute)
"""


def test_where_a_fork_cannot_compute(tmp_path: Path, starts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, once an import has used it: each run has a process of its own, and is the same to the last bit."""
    words, command = words_of(tmp_path), str(megatron_runs.SCRIPT)
    fresh = measured(tmp_path / "fresh", words, command)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CANNOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    starts.clear()
    with own_process() as process:
        runs = [measured(tmp_path / f"run-{number}", words, command, process=process) for number in range(2)]
    assert len(starts) == 2
    assert runs == [fresh, fresh]
