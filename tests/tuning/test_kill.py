"""kill -9 of ranks and launchers at seeded moments: what is left is whole, the same command ends as if nothing was.

A case is a run that is killed, started again and killed again, then left to its end: one of the two kills lands while a
checkpoint's file is open, so that half of all do (the issue asks for a quarter). That takes no luck: a rank that is
seen with such a file open is stopped, looked at again while it cannot move, and only then killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mup_megatron.checkpoints.checkpoint import Checkpoints
from mup_megatron.checkpoints.manifest import CheckpointManifest
from tests.helpers import bodies
from tests.helpers.commands import Background, losses, metrics, mup, until
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

STEPS, INTERVAL = 24, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "deepspeed TP 2": {"parallel__tensor_model_parallel_size": 2},
    "megatron DP 2": {
        "parallel__engine": "megatron",
        "parallel__tensor_model_parallel_size": 1,
        "training__async_save": True,
    },
    "megatron TP 2": {"parallel__engine": "megatron", "parallel__tensor_model_parallel_size": 2},
    "deepspeed DP 2": {"parallel__tensor_model_parallel_size": 1, "training__async_save": True},
}


def config_file(folder: Path, layout: str) -> Path:
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(folder / "run"),
        training__train_steps=STEPS,
        training__checkpoint_interval=INTERVAL,
        **LAYOUTS[layout],
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[float]]]:
    """Losses of a run that nobody kills, by layout; made on ranks that are there already."""
    known: dict[str, list[float]] = {}

    def curve(layout: str) -> list[float]:
        if layout not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            ranks.run(2, bodies.train_file, path=config_file(folder, layout))
            known[layout] = losses(folder / "run")
            assert len(known[layout]) == STEPS
        return known[layout]

    yield curve
    ranks.stop()


@pytest.fixture
def start() -> Iterator[Callable[[Path], Background]]:
    """Starts a run of two ranks; none outlives the test."""
    started: list[Background] = []

    def begin(path: Path) -> Background:
        started.append(Background("train", path, "--nproc-per-node", "2"))
        return started[-1]

    yield begin
    for background in started:
        background.kill()


def ranks_of(run: Background) -> dict[int, int]:
    """Process by rank, of those that run."""
    found = {}
    for process in run.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            found.update({int(word[5:]): process for word in words if word.startswith(b"RANK=")})
    return found


def written(process: int) -> list[str]:
    """Files of a checkpoint in the making that a process has open for writing."""
    found = []
    try:
        for name in os.listdir(f"/proc/{process}/fd"):
            target = os.readlink(f"/proc/{process}/fd/{name}")
            if "/checkpoints/step_" in target and ".partial/" in target:
                flags = Path(f"/proc/{process}/fdinfo/{name}").read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                    found.append(Path(target).name)
    except OSError:  # closed, or ended, meanwhile
        return found
    return found


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def while_writing(run: Background) -> tuple[int, list[str]]:
    """A rank that is stopped while it has a checkpoint's file open, and the file's name."""
    ranks = list(ranks_of(run).values())

    def caught() -> tuple[int, list[str]] | None:
        for process in ranks:
            if not written(process):
                continue
            os.kill(process, signal.SIGSTOP)
            until(partial(stopped, process))
            if names := written(process):
                return process, names
            os.kill(process, signal.SIGCONT)
        assert run.process.poll() is None, "ended before any file was seen open"
        return None

    return until(caught, every=0)


def progress(folder: Path) -> int:
    """Steps in metrics.jsonl."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def kill_once(run: Background, folder: Path, kind: str, draw: random.Random) -> dict[str, Any]:
    """Kills at a drawn moment; what was killed, and which checkpoint files were open."""
    before = progress(folder)
    victim = draw.choice(["rank", "launcher", "all"])
    if kind == "start":
        time.sleep(draw.uniform(0.0, 12.0))
    else:
        steps = draw.randrange(1, 5)
        # A restart first cuts what came after its last checkpoint.
        until(lambda: len(ranks_of(run)) == 2)
        until(lambda: Path(folder / "run" / "metrics.jsonl").exists() and progress(folder) >= before + steps)
    names: list[str] = []
    process = 0
    if kind == "file":
        process, names = while_writing(run)
    elif kind == "step":
        time.sleep(draw.uniform(0.0, 0.2))
    ranks = ranks_of(run)
    if not process:
        names = [name for other in ranks.values() for name in written(other)]
        process = draw.choice(sorted(ranks.values())) if ranks else run.process.pid
    if victim == "all":
        run.kill()
    else:
        victims = [run.process.pid] if victim == "launcher" else [process]
        for one in victims:
            os.kill(one, signal.SIGKILL)
        if victim == "launcher":
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        # Nobody is left behind, and nobody waits for the dead.
        until(lambda: not [other for other in run.processes() if other != run.process.pid], 60)
        run.process.communicate(timeout=60)
        assert run.process.returncode != 0
    return {"kind": kind, "victim": victim, "open": names, "steps": progress(folder)}


def check_whole(directory: Path) -> None:
    """Nothing is half written, but what says of itself that it is partial."""
    checkpoints = Checkpoints(directory / "checkpoints", kept=2)
    for path in checkpoints.newest_first():
        assert checkpoints.problem(path) is None
        assert CheckpointManifest.read(path).step == int(path.name.removeprefix("step_"))
    if (directory / "metrics.jsonl").exists():
        metrics(directory)
    if (directory / "config.yaml").exists():
        assert yaml.safe_load((directory / "config.yaml").read_text())["slurm"]
    if (directory / "explain.json").exists():
        assert json.loads((directory / "explain.json").read_text())["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(LAYOUTS)))
def test_killed_twice(
    undisturbed: Callable[[str], list[float]],
    start: Callable[[Path], Background],
    tmp_path: Path,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    draw = random.Random(seed)
    layout = list(LAYOUTS)[seed]
    expected = undisturbed(layout)
    path = config_file(tmp_path, layout)
    kinds = ["file", draw.choice(["step", "start"]) if seed > 1 else "step"]
    draw.shuffle(kinds)
    kills = []
    for kind in kinds:
        kills.append(kill_once(start(path), tmp_path, kind, draw))
        print(layout, kills[-1])
        check_whole(tmp_path / "run")
    record_property("kills", kills)
    assert sum(bool(kill["open"]) for kill in kills) * 4 >= len(kills)
    ended = mup("train", path, "--nproc-per-node", "2")
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "run") == expected
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    check_whole(tmp_path / "run")
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == [f"step_{STEPS - INTERVAL:08d}", f"step_{STEPS:08d}"]
