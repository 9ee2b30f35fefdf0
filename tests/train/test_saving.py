"""Checkpoints that are written while the run goes on: those of a run that waits, and whole or not there."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from mup_megatron.checkpoints.checkpoint import Checkpoints
from mup_megatron.checkpoints.manifest import CheckpointManifest
from mup_megatron.config import load_config
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.saved_weights import SavedWeights, saved_shapes
from mup_megatron.engines.setup import resolve
from mup_megatron.engines.state import Saving
from mup_megatron.parallel.ranks import Rank
from mup_megatron.train import run, saver
from mup_megatron.train.hooks import Ask, Step
from mup_megatron.train.saver import Saver
from mup_megatron.util.errors import DiskFull
from tests.helpers.breakages import replaced
from tests.helpers.commands import environment, losses, mup, until
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import RankError, Ranks
from tests.train.test_loop import HEARD, Recorder
from tests.train.two_ranks import without_times

KEYS: dict[str, Any] = {
    "model__hidden_dropout": 0.1,  # random states that move with every step
    "training__train_steps": 4,
    "training__checkpoint_interval": 2,
    "training__lr_decay_steps": 4,
    "training__async_save": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "deepspeed, one process": {"parallel__zero_stage": 0},
    "deepspeed TP 2": {"parallel__tensor_model_parallel_size": 2, "parallel__zero_stage": 0},
    "ZeRO 1": {"parallel__zero_stage": 1},
    "ZeRO 3": {"parallel__zero_stage": 3},
    "megatron TP 2": {
        "parallel__engine": "megatron",
        "parallel__tensor_model_parallel_size": 2,
        "parallel__use_distributed_optimizer": False,
    },
    "distributed optimizer": {"parallel__engine": "megatron", "parallel__use_distributed_optimizer": True},
}
QUICK = ("deepspeed, one process",)


def config_file(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = make(MIXED, "gpt3", **{**KEYS, "run__dir": str(folder / "run"), **changed})
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


@contextlib.contextmanager
def written_late() -> Iterator[None]:
    """A checkpoint's files are written when the run waits for them, and no step is left to be done before."""
    waited_for = threading.Event()
    write, finish = saver._write, Saver.finish

    def written(saving: Saving) -> dict[str, str]:
        assert waited_for.wait(60)
        return write(saving)

    def finished(self: Saver) -> tuple[int, Path] | None:
        waited_for.set()
        try:
            return finish(self)
        finally:
            waited_for.clear()

    with replaced(saver, "_write", written), replaced(Saver, "finish", finished):
        yield


def trained(rank: Rank, *, path: Path, late: bool) -> None:
    with written_late() if late else contextlib.nullcontext():
        run.train(resolve(load_config(path), rank.world_size), rank)


def held(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor and every random state that a checkpoint holds."""
    found = {path.name: path.read_bytes() for path in checkpoint.glob("random_*")}
    for kind in {key.partition(".")[0] for key in saved_shapes(checkpoint)}:
        saved = SavedWeights(checkpoint, kinds=[kind])
        found.update({f"{kind}.{name}": saved.read(name).numpy().tobytes() for name in saved.shapes})
    return found


def step(folder: Path, number: int) -> Path:
    return folder / "run" / "checkpoints" / f"step_{number:08d}"


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_it_is_what_a_run_that_waits_writes(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """To the last bit, though every later step is done when it is written; and a run goes on from it as from those."""
    count = 1 if layout.endswith("one process") else 2
    waits, goes_on = tmp_path / "waits", tmp_path / "goes on"
    keys = {"parallel__tensor_model_parallel_size": 1, **LAYOUTS[layout]}
    path = config_file(waits, **{**keys, "training__async_save": False})
    ranks.run(count, trained, path=path, late=False)
    path = config_file(goes_on, **keys)
    ranks.run(count, trained, path=path, late=True)
    assert without_times(goes_on / "run") == without_times(waits / "run")
    first = held(step(waits, 2))
    assert len(first) > 3 * 20
    assert held(step(goes_on, 2)) == first
    assert held(step(goes_on, 4)) == held(step(waits, 4)) != first

    shutil.rmtree(step(goes_on, 4))
    ranks.run(count, trained, path=path, late=False)
    assert without_times(goes_on / "run") == without_times(waits / "run")
    assert held(step(goes_on, 4)) == held(step(waits, 4))


class Ending(Recorder):
    """In the place of the screen's hook; `does` says what it does behind the third step."""

    def __init__(self, does: str) -> None:
        super().__init__(ends_at=3 if does == "ends" else None)
        self._does = does

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        if step.number == 3 and self._does == "raises":
            raise RuntimeError("of one rank alone")

    def asks(self) -> Ask:
        return Ask.STOP if self._does == "asks" and HEARD[-1] == ("evaluation", 3, ["eval_loss"]) else Ask.NOTHING


def ended(rank: Rank, *, path: Path, does: str) -> tuple[str, list[tuple[Any, ...]]]:
    """What a run raised, and what its hook heard from the third step on."""
    HEARD.clear()
    with written_late(), replaced(run, "Screen", lambda *_: Ending(does)):
        try:
            run.train(resolve(load_config(path), 1), rank)
        except Exception as error:
            return type(error).__name__, _behind_two_steps()
    return "", _behind_two_steps()


def _behind_two_steps() -> list[tuple[Any, ...]]:
    return [event for event in HEARD if event[0] not in ("begin", "update")][4:]


FIRST, LAST = ("checkpoint", 2, "step_00000002"), ("checkpoint", 4, "step_00000004")
EVALUATION = ("evaluation", 3, ["eval_loss"])
STEP_4 = [("step", 4, 4 * 8 * 32), ("evaluation", 4, ["eval_loss"])]
ENDS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "goes on": ("", [EVALUATION, *STEP_4, FIRST, LAST]),
    "ends": ("", [EVALUATION, FIRST]),
    "asks": ("Alarmed", [EVALUATION, FIRST, ("checkpoint", 3, "step_00000003")]),
    "raises": ("RuntimeError", [FIRST]),
}


def collector_while_written(rank: Rank, *, path: Path) -> list[bool]:
    found, original = [], FileSystemWriterAsync.write_preloaded_data

    @functools.wraps(original)
    def write(*arguments: Any, **keywords: Any) -> Any:
        found.append(gc.isenabled())
        return original(*arguments, **keywords)

    with replaced(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write)):
        run.train(resolve(load_config(path), rank.world_size), rank)
    return found


def test_steps_beside_it_collect_their_garbage(ranks: Ranks, tmp_path: Path) -> None:
    """megatron-core switches the collector off in the whole process while it writes."""
    (found,) = ranks.run(1, collector_while_written, path=config_file(tmp_path))
    assert set(found) == {True}


@pytest.mark.parametrize("does", ENDS)
def test_a_run_ends_with_its_checkpoints_whole(ranks: Ranks, tmp_path: Path, does: str) -> None:
    """Those of steps 2 and 4 are begun there, and written late: before the next one is begun, and at any end."""
    path = config_file(tmp_path, training__eval_interval=3, training__eval_steps=1, data__split="60,40,0")
    raised, heard = ranks.run(1, ended, path=path, does=does)[0]
    assert raised == ENDS[does][0]
    assert heard == [("step", 3, 3 * 8 * 32), *ENDS[does][1], ("exit",)]
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    whole = checkpoints.newest_first()
    assert {path.name for path in checkpoints.directory.iterdir()} == {path.name for path in whole}
    assert len(whole) == sum(event[0] == "checkpoint" for event in heard)
    assert [checkpoints.problem(path) for path in whole] == [None] * len(whole)


def test_a_run_that_diverges_ends_so_too(ranks: Ranks, tmp_path: Path) -> None:
    keys = {"training__checkpoint_interval": 1, "training__lr_warmup_steps": 0, "training__clip_grad": 0.0}
    path = config_file(tmp_path, hparams__lr=1e30, **keys)
    raised, heard = ranks.run(1, ended, path=path, does="")[0]
    assert raised == "Diverged"
    assert heard == [("checkpoint", 1, "step_00000001"), ("exit",)]


def raises_alone(rank: Rank, *, path: Path) -> None:
    with replaced(run, "Screen", lambda *_: Ending("raises" if rank.rank == 1 else "")):
        trained(rank, path=path, late=True)


def test_a_rank_that_fails_alone_waits_for_nobody(ranks: Ranks, tmp_path: Path) -> None:
    """The other one is in the next step, and a collective of the first would meet another one there."""
    with pytest.raises(RankError, match="of one rank alone") as error:
        ranks.run(2, raises_alone, path=config_file(tmp_path))
    assert "saver.py" not in str(error.value)
    assert Checkpoints(tmp_path / "run" / "checkpoints", 2).newest_first() == []


ERRORS = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "broken": OSError(errno.EIO, "Input/output error"),
}


def saved_by_two(rank: Rank, *, folder: Path, manifest: CheckpointManifest, fails: str) -> tuple[str, str]:
    """Two checkpoints of a file for each rank; the second rank's second one cannot be written."""

    def begin(partial: Path) -> Saving:
        file = partial / f"{rank.rank}"

        def write() -> list[Path]:
            file.write_text(partial.name)
            if rank.rank == 1 and partial.name.startswith("step_00000002"):
                raise ERRORS[fails]
            return [file]

        return Saving(write=write, finish=lambda: None)

    saver = Saver(Checkpoints(folder, 2), begin, 1, manifest, lambda step: 8 * step, rank)
    saver.begin(1)
    assert saver.finish() == (1, folder / "step_00000001")
    assert saver.finish() is None
    saver.begin(2)
    try:
        saver.finish()
    except (DiskFull, CheckpointException) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("fails", ERRORS)
def test_what_one_rank_cannot_write_every_rank_says(ranks: Ranks, tmp_path: Path, fails: str) -> None:
    """Together, in the run's own thread: a full disk in a sentence, other errors as torch's. What was whole stays."""
    manifest = CheckpointManifest(step=0, config={}, data_digest="", base_shapes={})
    (kind, said), other = ranks.run(2, saved_by_two, folder=tmp_path, manifest=manifest, fails=fails)
    assert (kind, said) == other
    assert kind == ("DiskFull" if fails == "full" else "CheckpointException")
    assert f"{ERRORS[fails].strerror}".lower() in said.lower()
    assert fails == "broken" or "the checkpoint of step 2" in said
    assert Checkpoints(tmp_path, 2).problem(tmp_path / "step_00000001") is None
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step_00000001"} | ({"step_00000002.partial"} if fails == "broken" else set())


SLOW = """
import os, pathlib, sys, time
fsync, (name, gate) = os.fsync, (sys.argv.pop(1), pathlib.Path(sys.argv.pop(1)))
def slow(file):
    while name in os.readlink(f"/proc/self/fd/{file}") and not gate.exists():
        time.sleep(0.05)
    fsync(file)
os.fsync = slow
from mup_megatron.cli import main
main()
"""
"""A run on a disk that takes its time with one folder, until a gate is there."""


@contextlib.contextmanager
def on_a_slow_disk(path: Path, number: int, gate: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that is behind a step whose checkpoint the disk is still writing, and goes on."""
    folder = step(path.parent, number).with_suffix(".partial")
    command = [sys.executable, "-c", SLOW, folder.name, str(gate), "train", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            steps = path.parent / "run" / "metrics.jsonl"
            until(lambda: steps.exists() and steps.read_text().count("\n") > number)
            assert any(file.stat().st_size for file in folder.glob("*.distcp"))
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_crash_while_it_is_written_loses_nothing_before(ranks: Ranks, tmp_path: Path) -> None:
    """kill -9 behind the fifth step, with the checkpoint of the fourth on its way and that of the second whole."""
    keys = {"training__train_steps": 7, "training__lr_decay_steps": 7, "training__checkpoints_kept": 9}
    whole = config_file(tmp_path / "whole", **{**keys, "training__async_save": False})
    ranks.run(1, trained, path=whole, late=False)
    ranks.stop()  # processes of the test's own take the cores now
    path = config_file(tmp_path / "killed", **keys)
    with on_a_slow_disk(path, 4, tmp_path / "gate") as process:
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    checkpoints = Checkpoints(tmp_path / "killed" / "run" / "checkpoints", 9)
    assert {path.name for path in checkpoints.directory.iterdir()} == {"step_00000002", "step_00000004.partial"}
    (first,) = checkpoints.newest_first()
    assert checkpoints.problem(first) is None
    resumed = mup("train", path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {first} at step 2" in resumed.stdout
    assert without_times(tmp_path / "killed" / "run") == without_times(tmp_path / "whole" / "run")
    assert [path.name for path in checkpoints.newest_first()] == [f"step_{number:08d}" for number in (7, 6, 4, 2)]
    assert len(list(checkpoints.directory.iterdir())) == 4
    assert [checkpoints.problem(path) for path in checkpoints.newest_first()] == [None] * 4


@pytest.mark.slow
def test_a_signal_while_it_is_written(tmp_path: Path) -> None:
    """It is finished first, and then the step at hand is saved."""
    path = config_file(tmp_path, training__train_steps=100_000, training__checkpoint_interval=20)
    prepare(load_config(path))
    with on_a_slow_disk(path, 20, tmp_path / "gate") as process:
        process.terminate()
        (tmp_path / "gate").touch()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM, said
    done = len(losses(tmp_path / "run"))
    assert f"SIGTERM: saved step {done} to {step(tmp_path, done)}" in said
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    assert checkpoints.newest_first()[0] == step(tmp_path, done)
    assert step(tmp_path, 20) in checkpoints.newest_first() or done > 40
    assert [checkpoints.problem(path) for path in checkpoints.newest_first()] == [None] * 2


def test_the_page_tells_what_it_costs(repository: Path) -> None:
    """docs/layouts.md, from the benchmark's results, which miss what the issue aims at."""
    page = (repository / "docs/layouts.md").read_text()
    result = json.loads((repository / "benchmarks/results/checkpoints/3.12.json").read_text())

    def told(found: dict[str, float], scale: float, unit: str) -> str:
        least, median, most = (f"{found[name] * scale:.0f}" for name in ("min", "median", "max"))
        return f"{median}{unit} ({least} to {most})"

    for size in result["sizes"]:
        waits, still, writing, copy = (
            told(size["seconds"][name], 1e3, " ms")
            for name in ("waiting", "standing still", "writing", "one plain copy")
        )
        share = told(size["still_over_writing"], 100, "%")
        assert f"| {size['megabytes']:.0f} MB | {waits} | {still} | {writing} | {share} | {copy} |" in page
        assert not size["target_met"]
        assert size["plain_copy_over_writing"]["median"] > result["target"]
    assert f"at most {result['target']:.0%} of the writing, is missed" in " ".join(page.split())
