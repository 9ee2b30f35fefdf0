"""Records, the guard on resume, writing whole or not at all, and files from strangers."""

from __future__ import annotations

import enum
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata
from pydantic import ValidationError
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.metadata import Metadata

from mup_megatron.checkpoints.checkpoint import SUMS, Checkpoints, hash_files
from mup_megatron.checkpoints.manifest import FORMAT, MANIFEST, CheckpointManifest, check_resume, make_manifest
from mup_megatron.engines.saved_weights import saved_shapes
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, VOCABULARY, make


def manifest(growth: dict[str, Any] = MIXED, processes: int = 1, **overrides: Any) -> CheckpointManifest:
    config = make(growth, "gpt3", **overrides)
    layout = resolve_layout(config, processes)
    return make_manifest(parametrize(config, VOCABULARY), layout, "digest", step=3)


def test_a_manifest_is_readable_and_complete() -> None:
    made = manifest().as_json()
    assert made["format"] == FORMAT
    assert made["base_shapes"]["decoder.layers.0.mlp.linear_fc1.weight"] == [64, 64]
    assert made["multipliers"]["decoder.layers.0.mlp.linear_fc2.weight"] == pytest.approx([0.4, 2 / 3, 2.5])
    assert made["versions"]["torch"] == torch.__version__.split("+")[0] or made["versions"]["torch"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"run__name": "other"},
        {"training__log_interval": 5},
        {"training__checkpoints_kept": 7},
        {"training__async_save": True},
        {"training__train_steps": 30, "training__lr_decay_steps": 20},
        {"slurm__nodes": 4},
        {"parallel__zero_stage": 2},
        {"parallel__engine": "megatron"},
        {"processes": 2},
        {"data__files": ["/elsewhere/of_the_same_text.txt"]},
    ],
)
def test_free_keys_may_change(overrides: dict[str, Any]) -> None:
    check_resume(manifest(), manifest(**overrides), Path("x"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"hparams__lr": 1e-3}, "hparams.lr 0.008 0.001"),
        ({"parametrization__weight_decay": "coupled"}, "parametrization.weight_decay 'independent' 'coupled'"),
        ({"base__ffn_hidden_size": 32}, "base.ffn_hidden_size 64 32"),
        ({"model__ffn_hidden_size": 320}, "model.ffn_hidden_size 160 320"),
        ({"run__seed": 8}, "run.seed 7 8"),
        ({"training__train_steps": 30}, "training.lr_decay_steps 20 30"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_the_guard(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        check_resume(manifest(), manifest(**overrides), Path("runs/x"))
    said, table = str(error.value).split("\n", 1)
    assert "--allow-change" in said
    assert sentence in [" ".join(line.split()) for line in table.splitlines()]


def test_other_text_is_named_by_its_files() -> None:
    other = manifest(data__files=["other.txt"]).replaced(data_digest="other")
    with pytest.raises(UserError, match=r"data.files +\[.*\] +\['other.txt'\]"):
        check_resume(manifest(), other, Path("runs/x"))


def without(made: CheckpointManifest, section: str, key: str) -> CheckpointManifest:
    """As a version wrote it that did not know a key."""
    config = {name: dict(keys) for name, keys in made.config.items()}
    del config[section][key]
    return made.replaced(config=config)


@pytest.mark.parametrize(("section", "key"), [("parametrization", "scaling"), ("training", "clip_norm")])
def test_a_key_of_a_later_version_is_no_difference(section: str, key: str) -> None:
    check_resume(without(manifest(), section, key), manifest(), Path("x"))


def test_a_key_of_a_later_version_that_is_set_is_a_difference() -> None:
    """Negative control: what the run did not have is not taken for what the config asks."""
    before = without(manifest(), "training", "clip_norm")
    with pytest.raises(UserError, match=r"training.clip_norm +null +'invariant'"):
        check_resume(before, manifest(training__clip_norm="invariant"), Path("x"))


def test_a_deliberate_change_is_let_through_by_name() -> None:
    changed = manifest(hparams__lr=1e-3, run__seed=8)
    check_resume(manifest(), changed, Path("x"), allowed=["hparams.lr", "run.seed"])
    with pytest.raises(UserError, match=r"run\.seed"):
        check_resume(manifest(), changed, Path("x"), allowed=["hparams.lr"])
    check_resume(manifest(), changed, Path("x"), allowed=["hparams", "run"])


def write(checkpoints: Checkpoints, number: int, **changes: Any) -> Path:
    folder = checkpoints.begin(number)
    (folder / "weights").write_text(str(number))
    path = checkpoints.commit(manifest().replaced(step=number), hash_files(folder))
    if changes:
        written = json.loads((path / MANIFEST).read_text())
        (path / MANIFEST).write_text(json.dumps({**written, **changes}))
        seal(path)
    return path


@pytest.mark.parametrize("written", [1, FORMAT + 1])
def test_another_format(tmp_path: Path, written: int) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    path = write(checkpoints, 5, format=written)
    with pytest.raises(UserError, match=f"written in format {written}; this version reads format {FORMAT}"):
        CheckpointManifest.read(path)
    assert checkpoints.problem(path) is None


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    assert checkpoints.newest_first() == []
    write(checkpoints, 5)
    (checkpoints.begin(10) / "weights").write_text("half")  # and then the machine goes down
    assert checkpoints.newest_first() == [tmp_path / "step_00000005"]
    again = checkpoints.begin(10)
    assert list(again.iterdir()) == []
    (again / "weights").write_text("10")
    checkpoints.commit(manifest().replaced(step=10), hash_files(again))
    assert checkpoints.newest_first() == [tmp_path / "step_00000010", tmp_path / "step_00000005"]
    assert CheckpointManifest.read(tmp_path / "step_00000010").step == 10
    assert all(checkpoints.problem(path) is None for path in checkpoints.newest_first())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    for step in (1, 2, 3, 100_000_000):
        write(checkpoints, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_100000000"]


def test_damaged_ones_of_later_steps_do_not_count(tmp_path: Path) -> None:
    """A run that went on from step 1, for those of 20 and 30 are damaged, keeps what it saves."""
    checkpoints = Checkpoints(tmp_path, kept=2)
    for step in (30, 20, 1, 5, 9):
        write(checkpoints, step)
    assert [int(path.name[5:]) for path in checkpoints.newest_first()] == [30, 20, 9, 5]
    write(checkpoints, 20)  # made again
    assert [int(path.name[5:]) for path in checkpoints.newest_first()] == [30, 20, 9]


def test_other_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "step_9").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    checkpoints = Checkpoints(tmp_path, kept=1)
    write(checkpoints, 5)
    assert checkpoints.newest_first() == [tmp_path / "step_00000005"]
    assert (tmp_path / "notes.txt").exists()


def seal(path: Path) -> None:
    """Checksums anew, so that they do not stand in the way."""
    names = sorted(entry.name for entry in path.iterdir() if entry.name != SUMS)
    sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    (path / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in names))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["weights", MANIFEST, SUMS])
@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:-3]), Path.unlink])
def test_damage_is_recognised(tmp_path: Path, name: str, damage: Any) -> None:
    """A flipped bit, a cut, a missing file: in what is saved, in the record, in the checksums."""
    checkpoints = Checkpoints(tmp_path, kept=2)
    path = write(checkpoints, 5)
    assert checkpoints.problem(path) is None
    damage(path / name)
    assert checkpoints.problem(path)
    shares = [checkpoints.problem(path, (i, 2)) for i in range(2)]
    assert any(shares)


def test_every_file_is_listed(tmp_path: Path) -> None:
    """Each line of the checksums taken out in turn, with its file and without; then a file that nothing lists."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", kept=2)
    folder = checkpoints.begin(5)
    for name in ("weights", "common.pt", ".metadata"):
        (folder / name).write_text(name)
    path = checkpoints.commit(manifest().replaced(step=5), hash_files(folder))
    assert CheckpointManifest.read(path).files == [".metadata", "common.pt", "weights"]
    assert checkpoints.problem(path) is None
    lines = (path / SUMS).read_text().splitlines(keepends=True)
    assert len(lines) == 4
    for line in lines:
        name = line.split()[1]
        without = shutil.copytree(path, tmp_path / "without")
        (without / SUMS).write_text("".join(other for other in lines if other != line))
        expected = f"{SUMS} is cut short" if name == MANIFEST else f"{name} is not in {SUMS}"
        for share in ((0, 1), (0, 4), (3, 4)):
            assert checkpoints.problem(without, share) == expected
        (without / name).unlink()
        expected = f"{SUMS} is cut short" if name == MANIFEST else f"{name}, which {MANIFEST} lists, is not in {SUMS}"
        assert checkpoints.problem(without) == expected
        shutil.rmtree(without)
    (path / "__1_0.distcp").write_text("planted")
    assert checkpoints.problem(path) == f"__1_0.distcp is not in {SUMS}"
    (path / "__1_0.distcp").unlink()
    (path / "folder").mkdir()
    assert checkpoints.problem(path) == f"folder is not in {SUMS}"


def test_checksums_are_sha256sum_s(tmp_path: Path) -> None:
    path = write(Checkpoints(tmp_path, kept=1), 5)
    result = subprocess.run(["sha256sum", "-c", SUMS], cwd=path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("OK") == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"format": 2, "step": "x"}', b"[" * 100000])
def test_damaged_manifests(tmp_path: Path, content: bytes) -> None:
    path = write(Checkpoints(tmp_path, kept=1), 5)
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=r"mup\.json"):
        CheckpointManifest.read(path)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"config": None}, "config is missing or no JSON object"),
        ({"config": ["x"]}, "config is missing or no JSON object"),
        ({"base_shapes": {"a.weight": "64"}}, "base_shapes.a.weight is missing or no list"),
        ({"base_shapes": {"a.weight": [64, 6.5]}}, "base_shapes.a.weight.1 is missing or no integer"),
        ({"data_digest": 5}, "data_digest is missing or no text"),
        ({"step": True}, "step is missing or no integer"),
        ({"layout": "tensor 2"}, "layout is missing or no JSON object"),
        ({"versions": {"torch": 2}}, "versions.torch is missing or no text"),
        ({"changes": 3}, "changes is missing or no list"),
        ({"changes": [{"step": 3}]}, "changes.0.key is missing"),
        ({"changes": [{"step": "x", "key": "a", "before": 1, "now": 2}]}, "changes.0.step is missing or no integer"),
        ({"vocabulary": "many"}, "vocabulary is missing or no integer"),
        ({"files": [["weights"]]}, "files.0 is missing or no text"),
    ],
    ids=str,
)
def test_manifests_whose_parts_are_of_another_kind(tmp_path: Path, part: dict[str, Any], said: str) -> None:
    """What was never written by this project, though its checksums agree."""
    path = write(Checkpoints(tmp_path, kept=1), 5, **part)
    with pytest.raises(UserError) as error:
        CheckpointManifest.read(path)
    assert str(error.value) == f"{path / MANIFEST}: {said}"


@pytest.mark.parametrize("files", [5, "weights", {"weights": 1}, [["weights"]], [None]], ids=str)
def test_a_list_of_files_that_is_none(tmp_path: Path, files: Any) -> None:
    checkpoints = Checkpoints(tmp_path, kept=1)
    assert checkpoints.problem(write(checkpoints, 5, files=files)) == f"{MANIFEST} cannot be read"


EARLIER = (
    '{"format": 2, "step": 5, "config": {"hparams": {"lr": 0.01}}, "data_digest": "d", "base_shapes": {"a": [64, null]}'
)


def test_manifests_that_were_written_before(tmp_path: Path) -> None:
    """Without the parts that came later, and with one that nobody knows; what is written again says the same."""
    path = tmp_path / "step_00000005"
    path.mkdir()
    (path / MANIFEST).write_text(EARLIER + "}")
    found = CheckpointManifest.read(path)
    assert (found.step, found.config["hparams"], found.base_shapes) == (5, {"lr": 0.01}, {"a": [64, None]})
    assert (found.changes, found.vocabulary, found.key_prefix, found.files) == (None, None, None, None)
    (path / MANIFEST).write_text(EARLIER + ', "changes": [], "key_prefix": "x.", "of another time": 1}')
    again = CheckpointManifest.read(path)
    assert again == found.replaced(changes=[], key_prefix="x.")


def test_what_a_manifest_writes(tmp_path: Path) -> None:
    """Its parts in their order; one that is not there is not written, and one that is empty is."""
    parts = "format step config layout data_digest tokenizer samples base_head_size base_shapes multipliers versions"
    made = manifest().replaced(tokenizer_sha256=None)  # which is there where the tokenizer's file is
    assert list(made.as_json()) == parts.split()
    change = {"step": 3, "key": "hparams.lr", "before": 0.01, "now": None}
    resumed = made.replaced(changes=[change], files=[])
    assert list(resumed.as_json()) == [*parts.split(), "changes", "files"]
    assert resumed.as_json()["changes"] == [change]
    assert list(made.replaced(vocabulary=384, key_prefix="x.").as_json()) == [
        *parts.split(),
        "vocabulary",
        "key_prefix",
    ]
    began = made.replaced(tokenizer_sha256="0", initialised_from={"step": 3})
    assert list(began.as_json()) == [*parts.split(), "tokenizer_sha256", "initialised_from"]
    with pytest.raises(ValidationError, match="frozen"):
        made.step = 4


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match=r"run\.dir: cannot write a checkpoint"):
        Checkpoints(tmp_path / "checkpoints", kept=1).begin(1)


class ByName(pickle.Pickler):
    """Pickles members of an Enum as the first releases of Python 3.11 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_of_an_early_python_3_11(tmp_path: Path) -> None:
    """Debian 12's among them."""
    save({"weights.w": torch.ones(3, 2)}, checkpoint_id=str(tmp_path), no_dist=True)
    path = tmp_path / ".metadata"
    index, written = pickle.loads(path.read_bytes()), io.BytesIO()  # noqa: S301
    ByName(written).dump(index)
    assert b"getattr" in written.getvalue()
    path.write_bytes(written.getvalue())
    assert saved_shapes(tmp_path) == {"weights.w": (3, 2)}


class Attribute:
    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (Metadata, "__init__"))


def test_no_other_attribute_is_read(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(UserError, match=r"loaded safely \(it reads an attribute of what is no Enum\)"):
        saved_shapes(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("pwned",))


@pytest.mark.parametrize(
    "content",
    [b"", b"cut", pickle.dumps({"a": 1}), pickle.dumps(torch.distributed.checkpoint.metadata.Metadata({}))[:-9]],
)
def test_an_index_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata: "):
        saved_shapes(tmp_path)


def test_pickles_of_unknown_origin_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"not an index that can be loaded safely \(it names posix\.mkdir\)"):
        saved_shapes(tmp_path)
    assert not (tmp_path / "pwned").exists()
    pickle.loads((tmp_path / ".metadata").read_bytes())  # noqa: S301  negative control: this file does run code
    assert (tmp_path / "pwned").exists()


def test_an_index_of_anything_but_tensors_is_refused(tmp_path: Path) -> None:
    """What an index calls bytes, upstream would unpickle."""
    metadata = torch.distributed.checkpoint.metadata
    index = metadata.Metadata({"weight.x": metadata.BytesStorageMetadata()})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    try:
        said = str(saved_shapes(tmp_path))
    except Exception as error:  # whatever comes of going on with it
        said = f"{type(error).__name__}: {error}"
    assert said.startswith("UserError: ")
    assert "weight.x is not a tensor; it will not be loaded" in said
