"""Records, the guard on resume, writing whole or not at all, and files from strangers."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from mup_megatron.checkpoint import RECORD, Checkpoints, check_resume, make_record
from mup_megatron.engines.deepspeed_checkpoint import SafeCheckpointEngine
from mup_megatron.errors import UserError
from mup_megatron.layout import resolve_layout
from mup_megatron.model import parametrize
from tests.configs import MIXED, VOCABULARY, make


def record(growth: dict[str, Any] = MIXED, processes: int = 1, **overrides: Any) -> dict[str, Any]:
    config = make(growth, "gpt3", **overrides)
    layout = resolve_layout(config, processes)
    made = make_record(config, parametrize(config, VOCABULARY), layout, "digest", step=3)
    return json.loads(json.dumps(made))  # as it comes back from disk


def test_a_record_is_readable_and_complete() -> None:
    made = record()
    assert made["format"] == 1
    assert made["base_shapes"]["decoder.layers.0.mlp.linear_fc1.weight"] == [64, 64]
    assert made["multipliers"]["decoder.layers.0.mlp.linear_fc2.weight"] == pytest.approx([0.4, 2 / 3, 2.5])
    assert made["versions"]["torch"] == torch.__version__.split("+")[0] or made["versions"]["torch"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"run__name": "other"},
        {"training__log_interval": 5},
        {"training__checkpoints_kept": 7},
        {"training__train_steps": 30, "training__lr_decay_steps": 20},
        {"slurm__nodes": 4},
    ],
)
def test_free_keys_may_change(overrides: dict[str, Any]) -> None:
    check_resume(record(), record(**overrides), Path("x"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"hparams__lr": 1e-3}, "hparams.lr: 0.008 in the checkpoint, 0.001 now"),
        ({"parametrization__weight_decay": "coupled"}, "parametrization.weight_decay: 'independent' in the checkpoint"),
        ({"base__ffn_hidden_size": 32}, "base.ffn_hidden_size: 64 in the checkpoint, 32 now"),
        ({"model__ffn_hidden_size": 320}, "model.ffn_hidden_size: 160"),
        ({"run__seed": 8}, "run.seed: 7"),
        ({"training__train_steps": 30}, "training.lr_decay_steps: 20 in the checkpoint, 30 now"),
        ({"parallel__zero_stage": 2}, "parallel.zero_stage: 1"),
        ({"processes": 2}, "layout.tensor: 1 in the checkpoint, 2 now"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_the_guard(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        check_resume(record(), record(**overrides), Path("runs/x"))
    assert sentence in str(error.value)
    assert "--allow-change" in str(error.value)


def test_a_deliberate_change_is_let_through_by_name() -> None:
    changed = record(hparams__lr=1e-3, run__seed=8)
    check_resume(record(), changed, Path("x"), allowed=["hparams.lr", "run.seed"])
    with pytest.raises(UserError, match=r"run\.seed"):
        check_resume(record(), changed, Path("x"), allowed=["hparams.lr"])
    check_resume(record(), changed, Path("x"), allowed=["hparams", "run"])


def test_a_newer_format() -> None:
    newer = {**copy.deepcopy(record()), "format": 2}
    with pytest.raises(UserError, match="written in format 2; this version reads format 1"):
        check_resume(newer, record(), Path("x"))


def write(checkpoints: Checkpoints, step: int) -> Path:
    (checkpoints.begin(step) / "weights").write_text(str(step))
    return checkpoints.commit(step, {"step": step})


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    assert checkpoints.latest() is None
    write(checkpoints, 5)
    (checkpoints.begin(10) / "weights").write_text("half")  # and then the machine goes down
    assert checkpoints.latest() == tmp_path / "step_00000005"
    again = checkpoints.begin(10)
    assert list(again.iterdir()) == []
    (again / "weights").write_text("10")
    checkpoints.commit(10, {"step": 10})
    assert checkpoints.latest() == tmp_path / "step_00000010"
    assert checkpoints.read(tmp_path / "step_00000010") == {"step": 10}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    for step in (1, 2, 3, 100_000_000):
        write(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_100000000"]


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "step_00000009").mkdir()  # no record: never finished
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(tmp_path, kept=1)
    write(checkpoints, 5)
    assert checkpoints.latest() == tmp_path / "step_00000005"
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_damaged_records(tmp_path: Path, content: bytes) -> None:
    checkpoints = Checkpoints(tmp_path, kept=1)
    path = write(checkpoints, 5)
    (path / RECORD).write_bytes(content)
    with pytest.raises(UserError, match=r"mup\.json"):
        checkpoints.read(path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"run\.dir: cannot write a checkpoint"):
        Checkpoints(tmp_path / "checkpoints", kept=1).begin(1)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pwned",))


def test_pickles_of_unknown_origin_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = SafeCheckpointEngine(None)
    torch.save({"optimizer": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil\.pt: not a checkpoint that can be loaded safely"):
        engine.load(str(tmp_path / "evil.pt"))
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="loaded safely"):
        engine.load(str(tmp_path / "raw.pt"))
    assert not (tmp_path / "pwned").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)  # negative control: this file does run code
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04cut", b"not a checkpoint"])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(UserError, match="loaded safely"):
        SafeCheckpointEngine(None).load(str(tmp_path / "bad.pt"))
    with pytest.raises(UserError, match="loaded safely"):
        SafeCheckpointEngine(None).load(str(tmp_path / "none.pt"))


def test_tensors_and_plain_values_load(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "b": {"c": [1, "x", None]}}, tmp_path / "good.pt")
    loaded = SafeCheckpointEngine(None).load(str(tmp_path / "good.pt"))
    assert torch.equal(loaded["a"], torch.ones(3))
    assert loaded["b"] == {"c": [1, "x", None]}
