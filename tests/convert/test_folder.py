"""The folder of an export: whole or not there, one at a time, and what is refused before it is begun."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mup_megatron import cli
from mup_megatron.convert.export.folder import Part, new_folder, size_of
from mup_megatron.convert.export.unfinished import LIST
from mup_megatron.util.errors import DiskFull, UserError
from tests.engines.test_full_disk import Disk


def quiet(_line: str) -> None: ...


def parts(count: int, numbers: int = 10) -> list[Part]:
    """Tensors that hold their own number."""

    def part(number: int) -> Part:
        return Part(name=f"t{number}", shape=(numbers,), make=lambda: torch.full((numbers,), float(number)))

    return [part(number) for number in range(count)]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("200mb", 2 * 10**8), ("1GiB", 2**30), ("77", 77), (" 3KB ", 3000)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_of(text, "--max-shard-size") == size


@pytest.mark.parametrize("text", ["", "0", "0GB", "GB", "-5GB", "5 GB", "1e9", "5XB", "٣GB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match="--max-shard-size: expected a size such as 5GB or 200MB, found"):
        size_of(text, "--max-shard-size")


def test_shards(tmp_path: Path) -> None:
    """Three tensors of 40 bytes fit into 120; a tensor that is larger has a file of its own."""
    with new_folder(tmp_path / "out", 0, quiet) as folder:
        folder.write_tensors(
            [*parts(4), Part(name="big", shape=(5, 8), make=lambda: torch.ones(5, 8))],
            torch.float32,
            120,
        )
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert [set(load_file(tmp_path / "out" / file)) for file in files] == [{"t0", "t1", "t2"}, {"t3"}, {"big"}]
    assert torch.equal(load_file(tmp_path / "out" / files[1])["t3"], torch.full((10,), 3.0))


def test_tensors_are_made_one_by_one(tmp_path: Path) -> None:
    """None is made before the one before it is written and gone."""
    most = 0
    living: list[weakref.ref[torch.Tensor]] = []

    def make() -> torch.Tensor:
        nonlocal most
        tensor = torch.ones(1000)
        living.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in living))
        return tensor

    with new_folder(tmp_path / "out", 0, quiet) as folder:
        folder.write_tensors([Part(name=str(n), shape=(1000,), make=make) for n in range(9)], torch.bfloat16, 10**6)
    assert most <= 2  # the last one, until the next has taken its name


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    def fails() -> torch.Tensor:
        assert (tmp_path / "out.partial" / "config.json").is_file()
        raise RuntimeError("the machine goes down")

    def write() -> None:
        with new_folder(tmp_path / "out", 0, quiet) as folder:
            folder.write("config.json", {})
            folder.write_tensors([Part(name="a", shape=(1,), make=fails)], torch.float32, 100)

    with pytest.raises(RuntimeError, match="goes down"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "out.partial"
    (left / "folder").mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    with new_folder(tmp_path / "out", 0, quiet) as folder:
        folder.write("config.json", {"a": 1})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["SHA256SUMS", "config.json"]
    assert not left.exists()


# --- one that was killed goes on ---


def interrupted(folder: Path, at: int) -> None:
    """Five shards of 40 bytes each, of which the one at a place is not finished: Ctrl-C while its tensor is made."""

    def stop() -> torch.Tensor:
        raise KeyboardInterrupt

    tensors = parts(5)
    tensors[at] = dataclasses.replace(tensors[at], make=stop)
    with pytest.raises(KeyboardInterrupt), new_folder(folder, 0, quiet, identity="this one") as written:
        written.write_tensors(tensors, torch.float32, 40)


def finished(folder: Path, said: list[str], identity: str | None = "this one") -> dict[str, bytes]:
    with new_folder(folder, 0, said.append, identity=identity) as written:
        written.write_tensors(parts(5), torch.float32, 40)
        written.write("config.json", {"a": 1})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_interrupted_export_goes_on(tmp_path: Path, at: int) -> None:
    """With the files that it had finished, which are not made again; it has the bytes of one undisturbed."""
    undisturbed = finished(tmp_path / "whole", [])
    assert len(undisturbed) == 5 + 3  # shards, their index, config.json, checksums
    interrupted(tmp_path / "out", at)
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists()
    assert not (partial / "config.json").exists()
    names = [f"model-{number:05d}-of-00005.safetensors" for number in range(1, at + 1)]
    before = {name: (partial / name).stat().st_ino for name in names}
    said: list[str] = []
    assert finished(tmp_path / "out", said) == undisturbed
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in names} == before
    assert said == ([f"{at} files (0.0 GB) of the unfinished export are taken as they are"] if at else [])
    assert not partial.exists()


def damage(partial: Path, what: str) -> None:
    first = partial / "model-00001-of-00005.safetensors"
    if what == "a byte":
        first.write_bytes(first.read_bytes()[:-1] + b"x")
    elif what == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif what == "a link":
        first.rename(partial.parent / "elsewhere")
        first.symlink_to(partial.parent / "elsewhere")
    elif what == "the list":
        lines = (partial / LIST).read_bytes()
        (partial / LIST).write_bytes(lines[: -len(lines.rpartition(b"\n")[2]) // 2])
    elif what == "no list":
        (partial / LIST).write_bytes(b"\xff[\n3\n")
    (partial / "stranger").write_text("x")


@pytest.mark.parametrize(
    ("what", "kept"), [("a byte", 2), ("cut", 2), ("a link", 2), ("the list", 2), ("no list", 0), ("strangers", 3)]
)
def test_only_what_is_whole_is_taken(tmp_path: Path, what: str, kept: int) -> None:
    undisturbed = finished(tmp_path / "whole", [])
    interrupted(tmp_path / "out", 3)
    damage(tmp_path / "out.partial", what)
    said: list[str] = []
    assert finished(tmp_path / "out", said) == undisturbed
    assert said == ([f"{kept} files (0.0 GB) of the unfinished export are taken as they are"] if kept else [])


@pytest.mark.parametrize("identity", ["another", None])
def test_another_export_begins_anew(tmp_path: Path, identity: str | None) -> None:
    interrupted(tmp_path / "out", 3)
    said: list[str] = []
    assert finished(tmp_path / "out", said, identity) == finished(tmp_path / "whole", [])
    assert not said


def test_two_at_once(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_text("theirs")
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(UserError, match=r"out\.partial: another process is writing this export"),
            new_folder(tmp_path / "out", 0, quiet),
        ):
            raise AssertionError("both write into it")
    finally:
        os.close(handle)
    assert (partial / "model.safetensors").read_text() == "theirs"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_existing_target(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Refused before the checkpoint is looked at; nothing of it is touched."""
    target = tmp_path / "out"
    if kind == "folder":
        target.mkdir()
        (target / "mine").write_text("x")
    elif kind == "file":
        target.write_text("x")
    else:
        target.symlink_to(tmp_path / "nowhere")
    assert cli.run(["export", str(tmp_path / "none"), str(target)]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert said == [
        f"mup-megatron: error: {target} is there already; expected the name of a folder that is not there yet"
    ]
    assert os.path.lexists(target)
    assert not (tmp_path / "out.partial").exists()


def test_a_target_that_came_meanwhile(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out", 0, quiet):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("x")

    with pytest.raises(UserError, match="came to be while the export was written"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_full_disk(tmp_path: Path) -> None:
    """One that fills up meanwhile; what was written is removed, and then there is room again."""

    def write() -> None:
        with new_folder(disk.path / "out", 400_000, quiet) as folder:
            Path(disk.path, "other").write_bytes(b"0" * 300_000)
            folder.write_tensors(parts(10, 10_000), torch.float32, 10**9)

    disk = Disk(tmp_path / "disk", 500)
    try:
        with pytest.raises(
            DiskFull, match=r"out\.partial: no space left on device while writing the export \(400\.0 kB"
        ):
            write()
        assert [path.name for path in disk.path.iterdir()] == ["other"]
    finally:
        subprocess.run(["umount", "-l", str(disk.path)], check=True)


def test_no_room(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFull, match=r"out\.partial: no space left on device while writing the export \(1e?\S+ \w+"),
        new_folder(tmp_path / "out", 10**18, quiet),
    ):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write to .*out\.partial: "),
        new_folder(tmp_path / "file" / "out", 0, quiet),
    ):
        raise AssertionError


def test_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out")
    for arguments, sentence in (
        ([str(tmp_path / "none"), out], "none: no such folder"),
        ([str(tmp_path), out], "no checkpoint is here"),
        ([str(tmp_path), out, "--max-shard-size", "much"], "--max-shard-size: expected a size"),
        ([str(tmp_path), out, "--dtype", "fp16"], "fp16"),
        ([str(tmp_path), out, "--to", "onnx"], "onnx"),
        ([str(tmp_path)], "Missing argument 'DIR'"),
        ([str(tmp_path), str(tmp_path / "none" / "..")], ": expected the name of a folder"),
    ):
        assert cli.run(["export", *arguments]) == 2
        said = capfd.readouterr()
        assert sentence in said.err
        assert len(said.err.strip().splitlines()) == 1, said.err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["export", str(tmp_path), out]) == 2
    assert "export runs in one process" in capfd.readouterr().err
    assert not Path(out).exists()
