"""Files that a user names: pipes, sockets, devices and what is too large are refused, and nothing waits for them."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from mup_megatron import cli
from mup_megatron.config import load_config
from mup_megatron.convert.importing.config_json import read_json
from mup_megatron.data.tokenizer import load_tokenizer
from mup_megatron.deepspeed import initialize
from mup_megatron.engines.saved_weights import SavedWeights, Tensor, write_tensors
from mup_megatron.parallel import upstream
from mup_megatron.report.parts import read_lines
from mup_megatron.rules.base_shapes import load_base_shapes
from mup_megatron.tuning.journal import Journal, mend
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import MOST_BYTES, read_bytes, read_text
from tests.helpers.commands import environment
from tests.helpers.configs import MIXED, make, pipeline_file

SECONDS = 20


class StillReading(BaseException):
    """No reader takes it for damage to its file."""


@pytest.fixture(autouse=True)
def _never_waits() -> Iterator[None]:
    """A reader that blocks is told apart from one that refuses."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StillReading(f"after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def ladder_of(path: Path) -> None:
    from mup_megatron.tuning import fitted

    fitted.ladder_of(make(MIXED, tuning__ladder=str(path)), None)


def tokenizer_of(path: Path) -> None:
    load_tokenizer(make(MIXED, data__tokenizer={"library": "sentencepiece", "path": str(path)}))


READERS: dict[str, Callable[[Path], object]] = {
    "config": load_config,
    "base shapes": load_base_shapes,
    "transfer record": lambda path: TransferRecord.read(path, None),
    "ladder": ladder_of,
    "metrics": read_lines,
    "journal": Journal,
    "DeepSpeed": lambda path: initialize(model=torch.nn.Linear(2, 2), config=str(path)),
    "Hugging Face": read_json,
    "tokenizer": tokenizer_of,
}


def made(folder: Path, kind: str) -> Path:
    path = folder / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    return path


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_regular_file(tmp_path: Path, reader: str, kind: str) -> None:
    upstream.prepare_process()
    path = made(tmp_path, kind)
    with pytest.raises(UserError) as error:
        READERS[reader](path)
    assert str(error.value) == f"{path}: is a {kind}; expected a regular file"


def test_a_socket(tmp_path: Path) -> None:
    path = made(tmp_path, "socket")
    with pytest.raises(UserError, match=r"file: is a socket; expected a regular file$"):
        load_config(path)


def test_a_folder_is_said_as_ever(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the config: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize("reader", [name for name in READERS if name != "metrics"])
def test_too_large(tmp_path: Path, reader: str) -> None:
    """A sparse file, which takes no room: of a terabyte, which no memory holds."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"file: has 1,099,511,627,776 bytes; expected at most [\d,]+$"):
        READERS[reader](path)


def test_no_more_than_the_bound_is_read(tmp_path: Path) -> None:
    """Of what tells no size of its own: /proc."""
    with pytest.raises(UserError, match=r"/proc/self/maps: has 11 bytes; expected at most 10$"):
        read_bytes("/proc/self/maps", 10)
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, 10) == b"0123456789"
    with pytest.raises(UserError, match="has 10 bytes; expected at most 9"):
        read_bytes(path, 9)
    assert MOST_BYTES == 268_435_456


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("\N{GREEK SMALL LETTER MU}\r\na\rb".encode())
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "\N{GREEK SMALL LETTER MU}\na\nb"  # as Path.read_text


def test_the_command_on_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain", str(made(tmp_path, "pipe"))]) == 2
    assert capfd.readouterr().err == f"mup-megatron: error: {tmp_path}/file: is a pipe; expected a regular file\n"


def test_process_substitution(tmp_path: Path) -> None:
    path = pipeline_file(tmp_path)
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m mup_megatron config --help >/dev/null; "
         f"{sys.executable} -m mup_megatron explain <(cat {path})"],
        capture_output=True, text=True, timeout=SECONDS * 6, env=environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "is a pipe; expected a regular file" in result.stderr


def test_joining_a_study_whose_journal_is_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pipeline_file(tmp_path)
    journal = tmp_path / "run" / "tuning" / "journal.log"
    journal.parent.mkdir(parents=True)
    os.mkfifo(journal)
    mend(journal)
    assert cli.run(["tune", str(path), "--join"]) == 2
    assert f"{journal}: is a pipe; expected a regular file" in capfd.readouterr().err


def test_weights_that_torch_opens(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"weight.a": Tensor(shape=(2,), make=lambda: torch.tensor([1.0, 2.0]))})
    assert SavedWeights(tmp_path).read("a").tolist() == [1.0, 2.0]
    file = next(tmp_path.glob("*.distcp"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError) as error:
        SavedWeights(tmp_path).read("a")
    assert str(error.value) == f"{file}: is a pipe; expected a regular file"


def test_a_tokenizer_in_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"vocab\.json: is a pipe; expected a regular file$"):
        load_tokenizer(make(MIXED, data__tokenizer={"library": "huggingface", "path": str(tmp_path)}))


# Files of this project's own making, in a folder that it made, and of packages of the system.
OWN = {
    "util/files.py",
    "tuning/megatron.py",
    "megatron_training/watched.py",
    "megatron_training/forked.py",
    "convert/importing/check.py",
    "slurm/submit.py",
    "data/english.py",
    "data/pages.py",
}


def reads(node: ast.AST) -> bool:
    """Whether it reads a file by its name: open(path), path.open(), both with "r" or "rb" too, path.read_text()."""
    if not isinstance(node, ast.Call):
        return False
    words = [
        each.value for each in (*node.args, *(word.value for word in node.keywords)) if isinstance(each, ast.Constant)
    ]
    writes = any(isinstance(word, str) and set(word) & set("wax+") for word in words)
    if isinstance(node.func, ast.Name):
        return node.func.id == "open" and not writes
    if not isinstance(node.func, ast.Attribute) or ast.unparse(node.func.value) in ("files", "os"):
        return False
    return node.func.attr in ("read_text", "read_bytes") or (node.func.attr == "open" and not writes)


def test_every_reader_goes_through_one_place(repository: Path) -> None:
    package = repository / "mup_megatron"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(reads(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == OWN
