"""Checkpoints that are damaged, foreign or malicious, through the whole command: one sentence, nothing overwritten."""

from __future__ import annotations

import importlib.metadata
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from packaging.version import Version

from mup_megatron.checkpoints.checkpoint import SUMS
from mup_megatron.checkpoints.manifest import FORMAT, MANIFEST
from tests.checkpoints.test_checkpoint import Evil, flip, seal
from tests.helpers import bodies
from tests.helpers.commands import losses
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import Ranks

STEPS = 6
OLD, NEW = "step_00000002", "step_00000004"


def config_file(folder: Path) -> Path:
    config = make(
        MIXED,
        "gpt3",
        run__dir=str(folder / "run"),
        training__train_steps=STEPS,
        training__checkpoint_interval=2,
        training__checkpoints_kept=3,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return path


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with a checkpoint after each second one."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(1, bodies.train_file, path=config_file(folder))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The same, with two steps to go: the checkpoints of steps 2 and 4."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}")
    config_file(tmp_path)
    return tmp_path / "run"


def tree(directory: Path) -> dict[str, bytes]:
    """Every file of the checkpoints, the metrics, and what is in them."""
    files = [directory / "metrics.jsonl", *(directory / "checkpoints").rglob("*")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if path.is_file()}


def train(ranks: Ranks, run: Path, *more: str) -> tuple[int, str, str]:
    return ranks.run(1, bodies.command, arguments=["train", str(run.parent / "run.yaml"), *more])[0]


def refused(ranks: Ranks, run: Path, *more: str) -> str:
    """What the command says, which leaves everything as it was."""
    before = tree(run)
    status, _, err = train(ranks, run, *more)
    assert status == 2, err
    assert tree(run) == before
    assert "Traceback" not in err
    (said,) = [line for line in err.splitlines() if line.startswith("mup-megatron:")]
    assert said.startswith(("mup-megatron: error (rank 0): ", "mup-megatron: error: "))
    return said


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_setting(path: Path) -> None:
    """One bit: the manifest can still be read, and says another setting than the run's."""
    text = path.read_text()
    assert '"target_key": "target"' in text
    path.write_text(text.replace('"target_key": "target"', '"target_key": "uarget"'))


FILES = ("__0_0.distcp", ".metadata", MANIFEST, SUMS, "random_0.safetensors", "common.pt", "metadata.json")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", flip),
        (MANIFEST, flip_a_setting),
        *(pytest.param(name, flip, marks=pytest.mark.slow) for name in FILES[1:]),
        pytest.param("__0_0.distcp", cut, marks=pytest.mark.slow),
        ("__0_0.distcp", Path.unlink),
    ],
)
def test_the_one_before_is_used(
    ranks: Ranks, trained: Path, run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(run / "checkpoints" / NEW / name)
    status, out, err = train(ranks, run)
    assert status == 0, err
    assert f"warning: {run / 'checkpoints' / NEW} is damaged (" in out
    assert name in out or name == SUMS  # a flipped checksum is of some other file
    assert f"resumed from {run / 'checkpoints' / OLD} at step 2" in out
    assert losses(run) == losses(trained / "run")


def test_all_of_them_are_damaged(ranks: Ranks, run: Path) -> None:
    for step in (OLD, NEW):
        flip(run / "checkpoints" / step / "__0_0.distcp")
    assert "every checkpoint is damaged; remove the folder to start over" in refused(ranks, run)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((path / MANIFEST).read_text())
    change(record)
    (path / MANIFEST).write_text(json.dumps(record))


def plant_in_tensors(path: Path, payload: bytes) -> None:
    """Puts a payload in the place of every tensor of a data file that is not shorter."""
    index = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301  written a moment ago, here
    content = bytearray((path / "__0_0.distcp").read_bytes())
    places = [place for place in index.storage_data.values() if len(payload) <= place.length]
    assert places
    for place in places:
        content[place.offset : place.offset + len(payload)] = payload
        place.length = len(payload)  # or a reader would look for the archive's end behind it
    (path / "__0_0.distcp").write_bytes(content)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


NOT_TENSORS = "a file of it holds something else than tensors; it will not be loaded"
SEALED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "evil index": (
        lambda path: (path / ".metadata").write_bytes(pickle.dumps(Evil())),
        "not an index that can be loaded safely",
    ),
    "evil tensors": (lambda path: plant_in_tensors(path, saved(Evil())), NOT_TENSORS),
    "evil old-style tensors": (
        lambda path: plant_in_tensors(path, saved(Evil(), _use_new_zipfile_serialization=False)),
        NOT_TENSORS,
    ),
    "evil bytes": (lambda path: plant_in_tensors(path, pickle.dumps(Evil())), ""),
    "evil common": (lambda path: (path / "common.pt").write_bytes(saved(Evil())), NOT_TENSORS),
    "tensors of another shape": (lambda path: plant_in_tensors(path, saved(torch.zeros(3))), "damaged"),
    "no tensors": (lambda path: plant_in_tensors(path, saved({"a": 1})), "damaged"),
    "cut data": (lambda path: cut(path / "__0_0.distcp"), "damaged"),
    "cut index": (lambda path: cut(path / ".metadata"), ".metadata"),
    "cut common": (lambda path: cut(path / "common.pt"), "damaged"),
    "backend unknown": (lambda path: (path / "metadata.json").write_text('{"sharded_backend": "x"}'), "damaged"),
    "backend no JSON": (lambda path: (path / "metadata.json").write_text("]"), "damaged"),
    "cut random state": (lambda path: cut(path / "random_0.safetensors"), "random_0.safetensors: damaged"),
    "newer": (
        lambda path: rewrite(path, lambda record: record.update(format=FORMAT + 1)),
        f"written in format {FORMAT + 1}; this version reads format {FORMAT}",
    ),
    "no config": (lambda path: rewrite(path, lambda record: record.update(config=None)), "config is missing or no"),
    "step below zero": (lambda path: rewrite(path, lambda record: record.update(step=-4)), "step"),
    "another step": (lambda path: rewrite(path, lambda record: record.update(step=3)), "step"),
    "changes that are none": (
        lambda path: rewrite(path, lambda record: record.update(changes=3)),
        "changes is missing or no list",
    ),
}


QUICK = ("evil index", "evil tensors", "evil common", "cut data", "newer", "no config", "another step")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in SEALED]
)
def test_sealed_anew(ranks: Ranks, run: Path, case: str) -> None:
    """Where the checksums agree with what is there, it is refused for what it is; nothing in it is ever executed."""
    if case == "backend unknown" and Version(importlib.metadata.version("megatron-core")) >= Version("0.17"):
        pytest.skip("megatron-core 0.17 and later do not read the backend's name")
    path = run / "checkpoints" / NEW
    change, sentence = SEALED[case]
    change(path)
    seal(path)
    assert sentence in refused(ranks, run)
    assert not Path("pwned").exists()


TAKEN_OUT = ("__0_0.distcp", "random_0.safetensors", ".metadata", MANIFEST)


@pytest.mark.parametrize(
    "name", [TAKEN_OUT[0], *(pytest.param(name, marks=pytest.mark.slow) for name in TAKEN_OUT[1:])]
)
def test_a_file_taken_out_with_its_line(ranks: Ranks, trained: Path, run: Path, name: str) -> None:
    """The checksums agree with what is there, but the manifest lists every file: that is damage."""
    (run / "checkpoints" / NEW / name).unlink()
    seal(run / "checkpoints" / NEW)
    status, out, err = train(ranks, run)
    assert status == 0, err
    assert f"warning: {run / 'checkpoints' / NEW} is damaged (" in out
    assert ("SHA256SUMS is cut short" if name == MANIFEST else name) in out
    assert losses(run) == losses(trained / "run")


@pytest.mark.parametrize("case", ["evil index", "evil tensors", "newer", "cut data"])
def test_generate_refuses_too(ranks: Ranks, run: Path, case: str) -> None:
    path = run / "checkpoints" / NEW
    change, sentence = SEALED[case]
    change(path)
    seal(path)
    before = tree(run)
    status, _, err = ranks.run(1, bodies.command, arguments=["generate", str(path), "def"])[0]
    assert status == 2, err
    assert sentence in err
    assert "Traceback" not in err
    assert tree(run) == before
    assert not Path("pwned").exists()


def test_evil_is_evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: read carelessly, these files run code."""
    monkeypatch.chdir(tmp_path)
    torch.load(io.BytesIO(saved(Evil())), weights_only=False)
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("model.ffn_hidden_size", 320), ("parametrization.weight_decay", "coupled"), ("run.seed", 8)]
)
def test_of_another_run(ranks: Ranks, run: Path, key: str, value: object) -> None:
    before = tree(run)
    status, _, err = train(ranks, run, f"{key}={value}")
    assert status == 2
    assert "the checkpoint does not belong to this config" in err
    assert f"  {key}" in err
    assert "Traceback" not in err
    assert tree(run) == before


def test_two_ranks_refuse_together(ranks: Ranks, run: Path) -> None:
    """What one of them cannot read, none goes on with, and none waits for the other."""
    path = run / "checkpoints" / NEW
    cut(path / "__0_0.distcp")
    seal(path)
    before = tree(run)
    results = ranks.run(2, bodies.command, arguments=["train", str(run.parent / "run.yaml")])
    assert [status for status, _, _ in results] == [2, 2]
    for number, (_, _, err) in enumerate(results):
        assert f"mup-megatron: error (rank {number}): {path}: damaged" in err
        assert "Traceback" not in err
    assert tree(run) == before
