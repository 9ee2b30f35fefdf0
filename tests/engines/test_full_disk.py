"""A disk that is full: one sentence (what, where, how much is missing), nothing lost, the same command goes on.

The disks are file systems in memory, mounted for a test; where that is not allowed, those tests are skipped.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.checkpoint.api import CheckpointException

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import Checkpoints
from mup_megatron.config import Config, load_config
from mup_megatron.data.batches import build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.state import state_bytes
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.ranks import Rank
from mup_megatron.telemetry.alarms import Alarms, write_alarms
from mup_megatron.telemetry.series import SeriesFile, read_series
from mup_megatron.train.metrics import Metrics
from mup_megatron.tuning.study import Study
from mup_megatron.util.disk import full_disk, reason
from mup_megatron.util.errors import DiskFull, UserError
from mup_megatron.util.files import cut_lines, json_lines
from tests.helpers import bodies
from tests.helpers.commands import losses, metrics, mup, run
from tests.helpers.configs import MIXED, SEARCH, VOCABULARY, make, pipeline_file
from tests.helpers.distributed import Ranks


class Disk:
    """A small file system. Its size is in kilobytes."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small file system can be mounted by root alone")

    def resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(self.path)], check=True)

    def leave(self, free: int) -> None:
        """So much room, and no more."""
        stat = os.statvfs(self.path)
        self.resize((stat.f_blocks - stat.f_bfree) * stat.f_frsize // 1024 + free)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    mounted: list[Disk] = []

    def mount(size: int, path: Path | None = None) -> Disk:
        mounted.append(Disk(path or tmp_path / f"disk-{len(mounted)}", size))
        return mounted[-1]

    yield mount
    for one in mounted:
        subprocess.run(["umount", "-l", str(one.path)], check=True)


SENTENCE = (
    r"(?P<where>\S+): no space left on device while writing (?P<what>.+) "
    r"\((?P<needed>\S+ \w+) needed, (?P<free>\S+ \w+) free, (?P<missing>\S+ \w+) missing\)"
    r"; what was written before is whole, the same command goes on when there is room$"
)


def parts(error: object) -> dict[str, str]:
    found = re.search(SENTENCE, str(error).strip())
    assert found, error
    return found.groupdict()


def numbers(folder: Path, **overrides: Any) -> Config:
    """A config on 2,000 documents of 100 numbers."""
    corpus = folder / "numbers.jsonl"
    line = json.dumps({"text": " ".join(str(number % 190) for number in range(100))})
    corpus.write_text("\n".join([line] * 2000) + "\n")
    tokenizer = {"library": "null", "vocab_size": 200}
    keys = {"data__dir": str(folder / "data"), "data__files": [str(corpus)], "data__tokenizer": tokenizer}
    return make(MIXED, "gpt3", **{**keys, **overrides})


def test_tokens(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    """404 kB of tokens on a disk of 200 kB."""
    small = disk(200)
    settings = numbers(tmp_path, data__dir=str(small.path / "data"))
    with pytest.raises(DiskFull) as error:
        prepare(settings)
    said = parts(error.value)
    assert (said["where"], said["what"]) == (str(small.path / "data"), "the tokens of the corpus")
    assert [path.name for path in (small.path / "data").iterdir()] == [".prepare.lock"]
    small.resize(4000)
    assert prepare(settings).tokens == 2000 * 101


def test_an_estimate_that_was_too_small(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    """403 kB by the size of the text, which 404 kB of tokens and 40 kB of their index exceed: no nonsense is said."""
    small = disk(430)
    settings = numbers(tmp_path, data__dir=str(small.path / "data"))
    with pytest.raises(DiskFull) as error:
        prepare(settings)
    sentence = (
        r"data: no space left on device while writing the tokens of the corpus \(more is needed than the "
        r"4\d\d\.\d kB and \d+ inodes that are free\); what was written before is whole, the same command goes on"
    )
    assert re.search(sentence, str(error.value)), error.value
    small.resize(4000)
    assert prepare(settings).tokens == 2000 * 101


def test_no_inode_is_left(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    small = disk(4000)
    stat = os.statvfs(small.path)
    subprocess.run(
        ["mount", "-o", f"remount,nr_inodes={stat.f_files - stat.f_ffree + 2}", str(small.path)], check=True
    )  # for the folder and its lock
    with pytest.raises(DiskFull, match=r"more is needed than the 4\.1 MB and 0 inodes that are free\)"):
        prepare(numbers(tmp_path, data__dir=str(small.path / "data")))


def test_index_of_samples(tmp_path: Path, disk: Callable[..., Disk]) -> None:
    small = disk(300)
    settings = numbers(tmp_path, data__cache_dir=str(small.path / "cache"), training__train_steps=4000)
    with pytest.raises(DiskFull) as error:
        build_datasets(settings, prepare(settings))
    assert parts(error.value)["what"] == "the index of samples"
    small.resize(8000)
    train, _ = build_datasets(settings, prepare(settings))
    elsewhere = numbers(tmp_path, training__train_steps=4000, data__dir=str(tmp_path / "elsewhere"))
    expected, _ = build_datasets(elsewhere, prepare(elsewhere))
    assert [train[n]["tokens"].tolist() for n in range(50)] == [expected[n]["tokens"].tolist() for n in range(50)]


def test_metrics(disk: Callable[..., Disk]) -> None:
    """What is whole is read again; a line that was cut short is not."""
    small = disk(60)
    settings = make(MIXED, "gpt3", run__dir=str(small.path), training__train_steps=100000)
    step = 0
    with pytest.raises(DiskFull) as error, Metrics(settings, 0, Rank()) as written:  # noqa: PT012
        while True:
            step += 1
            written.write(step=step, loss=1.0, lr=0.5)
    said = parts(error.value)
    assert (said["where"], said["what"]) == (str(small.path / "metrics.jsonl"), "the run's metrics")
    assert said["missing"].endswith(" MB")  # of the lines that are left, 46 bytes each
    small.resize(4000)
    with Metrics(settings, step - 1, Rank()) as written:
        written.write(step=step, loss=1.0, lr=0.5)
    assert [line["step"] for line in metrics(small.path)][-2:] == [step - 1, step]


def test_readings_and_alarms(disk: Callable[..., Disk]) -> None:
    """What is whole is read again; the run goes on behind the last reading that is."""
    small = disk(60)
    path, step = small.path / "telemetry.jsonl", 0
    file = SeriesFile(path, 0)
    with pytest.raises(DiskFull) as error:  # noqa: PT012
        while True:
            step += 1
            file.write(step, {("layer", "output rms"): 1.0 / step, ("layer", "weight rms"): 2.0})
    said = parts(error.value)
    assert (said["where"], said["what"]) == (str(path), "the run's telemetry")
    assert read_series(path).steps == list(range(1, step))
    config = make(MIXED, "gpt3")
    alarms = Alarms(parametrize(config, VOCABULARY), None).see(3, {("layer", "output rms"): math.nan}, 1.0)
    with pytest.raises(DiskFull) as error:
        write_alarms(small.path / "alarms.jsonl", alarms * 100, print)
    assert parts(error.value)["what"] == "the run's alarms"
    small.resize(4000)
    SeriesFile(path, step - 1).write(step, {("layer", "output rms"): 1.0})
    assert read_series(path).steps == list(range(1, step + 1))
    kept = cut_lines(small.path / "alarms.jsonl", 3)  # as the run does that goes on
    write_alarms(small.path / "alarms.jsonl", alarms, print)
    assert len(list(json_lines(small.path / "alarms.jsonl"))) == len(kept) + 1
    lines: list[str] = []
    write_alarms(None, alarms * 4, lines.append)  # a run without --save
    assert lines[-1] == "alarm: and 1 more series, which no file keeps"


def test_page(disk: Callable[..., Disk], capfd: pytest.CaptureFixture[str]) -> None:
    """Plotly's code alone is more; what did not fit is gone, and the command writes the page once there is room."""
    small = disk(1000)
    (small.path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "lr": 0.1, "seconds": 1.0}\n')
    (small.path / "config.yaml").write_text(yaml.safe_dump(make(MIXED, "gpt3").model_dump()))
    assert cli.run(["report", str(small.path)]) == 2
    said = parts(capfd.readouterr().err)
    assert (said["where"], said["what"]) == (str(small.path / "report.html"), "the page")
    assert said["missing"].endswith(" MB")
    assert sorted(path.name for path in small.path.iterdir()) == ["config.yaml", "metrics.jsonl"]
    small.resize(20_000)
    assert cli.run(["report", str(small.path)]) == 0
    assert (small.path / "report.html").stat().st_size > 3_000_000


def test_journal(disk: Callable[..., Disk]) -> None:
    small = disk(64)
    keys = {"tuning__search": SEARCH, "tuning__trials": 8, "tuning__train_steps": 4000}
    config = make(MIXED, "gpt3", run__dir=str(small.path), proxy={"hidden_size": 64}, **keys)
    study = Study.create(config)
    trial = study.claim()
    assert trial is not None
    step = 0
    with pytest.raises(DiskFull) as error, full_disk(study.directory, "the study"):  # noqa: PT012
        while True:
            step += 1
            study.report(trial, step, 1.0 / step)
    assert parts(error.value)["what"] == "the study"
    small.resize(4000)
    again = Study.create(config).trials()
    assert [one.state for one in again] == ["waiting"] * 8
    assert again[0].reports == {number: 1.0 / number for number in range(1, step)}


def train_file(folder: Path, directory: Path) -> Path:
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(directory),
        data__dir=str(folder / "data"),
        training__train_steps=4,
        training__checkpoint_interval=2,
        training__lr_decay_steps=4,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_checkpoint(tmp_path: Path, disk: Callable[..., Disk], ranks: Ranks, processes: int) -> None:
    """The second of two does not fit: nothing of it is left, the first stays, and with room the run goes on from it."""
    small = disk(64000)
    words = ["train", str(train_file(tmp_path, small.path / "run")), "parallel.tensor_model_parallel_size=1"]
    ((status, _, err), *_) = ranks.run(processes, bodies.command, arguments=[*words, "training.train_steps=2"])
    assert status == 0, err
    checkpoints = Checkpoints(small.path / "run" / "checkpoints", 2)
    (first,) = checkpoints.newest_first()
    size = sum(path.stat().st_size for path in first.iterdir()) // 1024
    small.leave(size // 2)
    ends = ranks.run(processes, bodies.command, arguments=words)
    assert {status for status, _, _ in ends} == {2}
    said = parts(ends[0][2])
    assert said["what"] == "the checkpoint of step 4"
    assert said["where"] == str(small.path / "run" / "checkpoints" / "step_00000004.partial")
    assert "Traceback" not in "".join(err for _, _, err in ends)
    assert [path.name for path in (small.path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
    assert checkpoints.problem(first) is None
    small.resize(64000)
    ((status, out, err), *_) = ranks.run(processes, bodies.command, arguments=words)
    assert status == 0, err
    assert f"resumed from {first} at step 2" in out
    assert len(losses(small.path / "run")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "background"),
    [(1, "true"), (1, "false"), (2, "true")],
)
def test_a_disk_that_is_full_before_a_checkpoint_is_written(
    tmp_path: Path, disk: Callable[..., Disk], ranks: Ranks, processes: int, background: str
) -> None:
    """There is room for what it holds, and not for its files: that shows while it is written, and ends the same."""
    small = disk(64000)
    path = train_file(tmp_path, small.path / "run")
    words = ["train", str(path), "parallel.tensor_model_parallel_size=1", f"training.async_save={background}"]
    ((status, _, err), *_) = ranks.run(processes, bodies.command, arguments=[*words, "training.train_steps=2"])
    assert status == 0, err
    checkpoints = Checkpoints(small.path / "run" / "checkpoints", 2)
    (first,) = checkpoints.newest_first()
    config = load_config(path)
    size = state_bytes(parametrize(config, prepare(config).vocab_size), config.optimizer)
    assert sum(file.stat().st_size for file in first.iterdir()) > size + 80_000
    small.leave(size // 1024 + 40)
    ends = ranks.run(processes, bodies.command, arguments=words)
    assert {status for status, _, _ in ends} == {2}
    for _, _, err in ends:
        assert f"{checkpoints.partial(4)}: no space left on device while writing the checkpoint of step 4 (more" in err
        assert "Traceback" not in err
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step_00000002"]
    assert checkpoints.problem(first) is None
    small.resize(64000)
    ((status, out, err), *_) = ranks.run(processes, bodies.command, arguments=words)
    assert status == 0, err
    assert f"resumed from {first} at step 2" in out
    assert len(losses(small.path / "run")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "background"), [(1, "false"), (2, "false"), (2, "true")])
def test_a_limit_that_is_met_while_a_checkpoint_is_written(tmp_path: Path, processes: int, background: str) -> None:
    """As a quota: nothing tells of it before. The writer's CheckpointException is no Exception."""
    path = train_file(tmp_path, tmp_path / "run")
    prepare(load_config(path))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
    start = limit + "from mup_megatron.cli import main; main()"
    settings = "parallel.tensor_model_parallel_size=1", f"training.async_save={background}"
    words = "--nproc-per-node", str(processes), *settings
    result = run(sys.executable, "-c", start, "train", path, *words)
    assert result.returncode == 2, result.stderr
    partial = tmp_path / "run" / "checkpoints" / "step_00000002.partial"
    # torch logs beside it. One of several ranks says which it is; another says the same if it lives on for 10 s.
    said = {re.sub(r" \(rank \d\)", "", line) for line in result.stderr.splitlines() if line.startswith("mup-megatron")}
    assert said == {
        f"mup-megatron: error: {partial}: file too large while writing the checkpoint of step 2; what was written "
        "before is whole, the same command goes on when there is room"
    }
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def raised(error: BaseException) -> str:
    """What a checkpoint's exception, which is no Exception, or another one is told as."""
    if isinstance(error, CheckpointException) and (found := reason(error, Path("/"), "words")):
        return str(found)
    try:
        with full_disk(Path("/"), "words"):
            raise error
    except DiskFull as full:
        return str(full)


FULL = OSError(errno.ENOSPC, "No space left on device")


def failed(errors: dict[int, BaseException]) -> CheckpointException:
    """What torch raises of what went wrong, by rank."""
    return CheckpointException("write", {rank: (error, traceback.StackSummary()) for rank, error in errors.items()})


def caused() -> Exception:
    error = Exception("Failed to write dataset materials to the data cache directory.")
    error.__cause__ = FULL
    return error


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        failed({1: FULL}),
        failed({0: RuntimeError("Local process 0 encountered an error"), 1: FULL}),
        caused(),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ],
    ids=["plain", "quota", "checkpoint", "checkpoint, other rank", "cache", "sqlite"],
)
def test_what_is_a_full_disk(error: BaseException) -> None:
    assert "while writing words" in raised(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "Permission denied"),
        failed({0: OSError(errno.EIO, "Input/output error")}),
        RuntimeError("shape mismatch"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        UserError("run.dir: cannot write: No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=["permission", "checkpoint", "other", "there is room", "said already", "interrupt"],
)
def test_what_is_none(error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        raised(error)
    assert found.value is error


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the index of samples", "the checkpoint of step"])
def test_trials_wait_for_room(tmp_path: Path, disk: Callable[..., Disk], what: str) -> None:
    """No trial has failed, whatever it was that did not fit."""
    keys = {"tuning__trials": 2, "tuning__repeat_best": 0, "data__dir": str(tmp_path / "data")}
    if what == "the index of samples":
        (tmp_path / "run" / "tuning").mkdir(parents=True)
        small = disk(4, tmp_path / "run" / "tuning" / "cache-0")
        path = pipeline_file(tmp_path, **keys)
    else:
        small = disk(1500)
        path = pipeline_file(tmp_path, run__dir=str(small.path / "run"), **keys)
    prepare(load_config(path))
    result = mup("tune", path)
    assert result.returncode == 2, result.stderr
    assert parts(result.stderr)["what"].startswith(what)  # of which step depends on how many fit
    assert "Traceback" not in result.stderr
    assert [trial.state for trial in Study(load_config(path)).trials()] == ["waiting", "waiting"]
    small.resize(64000)
    ended = mup("tune", path)
    assert ended.returncode == 0, ended.stderr
    assert {trial.state for trial in Study(load_config(path)).trials()} <= {"complete", "stopped"}
