"""A data folder belongs to the settings that its record names, from whatever working directory a command runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron import cli
from mup_megatron.checkpoints.checkpoint import Checkpoints
from mup_megatron.checkpoints.manifest import make_manifest
from mup_megatron.config import Config, load_config
from mup_megatron.convert.saved_run import open_run
from mup_megatron.data import prepare as module
from mup_megatron.data.batches import build_datasets
from mup_megatron.data.corpus import Corpus
from mup_megatron.data.prepare import prepare
from mup_megatron.data.tokenizer import HUGGING_FACE_FILES
from mup_megatron.model.build import parametrize
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import UserError
from tests.data.test_english import english
from tests.helpers.configs import MIXED, make

OTHER = r"data\.dir: .* holds data that were prepared with other settings of data: or from source files that have"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder.mkdir(exist_ok=True)
        patch.chdir(folder)
        yield


def config_file(name: str, up: str, vocabulary: int) -> Path:
    """In the working directory, from which `up` leads to the folder that text and data lie in."""
    tokenizer = {"library": "sentencepiece", "vocab_size": vocabulary}
    data = {"files": [f"{up}text.jsonl"], "dir": f"{up}shared/corpus", "tokenizer": tokenizer}
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(make(MIXED, "gpt3", data=data, run__dir=f"{up}runs/{name}").model_dump()))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draws = np.random.default_rng(5)
    words = ["".join(draws.choice(list("abcdefghijklmnopqrstuvwxyz"), 6)) for _ in range(900)]
    lines = [json.dumps({"text": " ".join(draws.choice(words, 80))}) for _ in range(60)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.usefixtures("text")
def test_other_settings_from_another_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Vocabulary 500, then 400 from elsewhere: refused by the command, and the first run goes on, from there too."""
    with inside(tmp_path):
        assert cli.run(["prepare", str(config_file("first", "", 500))]) == 0
    before = content(tmp_path / "shared")
    with inside(tmp_path / "elsewhere"):
        capfd.readouterr()
        assert cli.run(["prepare", str(config_file("second", "../", 400))]) == 2
        (said,) = capfd.readouterr().err.splitlines()
        with pytest.raises(UserError, match=OTHER):
            raise UserError(said)
        assert content(tmp_path / "shared") == before
        assert cli.run(["prepare", str(config_file("first", "../", 500))]) == 0
        assert "vocabulary 500, ../shared/corpus" in capfd.readouterr().out
        found = prepare(load_config(config_file("first", "../", 500)))
        assert (found.blend, found.tokenizer) == (
            (["../shared/corpus/corpus"], None),
            "../shared/corpus/tokenizer.model",
        )
        build_datasets(load_config(config_file("first", "../", 500)), found)
    kept = {name: each for name, each in before.items() if name != "corpus/.prepare.lock"}  # which names its holder
    assert content(tmp_path / "shared").items() >= kept.items()
    assert str(tmp_path) not in (tmp_path / "shared" / "corpus" / "prepared.json").read_text()


def of_numbers(tmp_path: Path, **overrides: Any) -> Config:
    path = tmp_path / "numbers.jsonl"
    if not path.exists():
        path.write_text('{"text": "1 2 3"}\n' * 4)
    tokenizer = {"library": "null", "vocab_size": 10}
    given = {"data__files": [str(path)], "data__tokenizer": tokenizer, "data__dir": str(tmp_path / "data")}
    return make(MIXED, "gpt3", **{**given, **overrides})


@pytest.mark.parametrize("name", ["corpus.bin", "notes.txt", "downloaded.partial", "english.jsonl"])
def test_what_prepare_did_not_make_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    (tmp_path / "data" / name).write_text("somebody's")
    sentence = rf"^data\.dir: .*data holds {name}, and no prepared\.json says that it is this run's; expected another"
    with pytest.raises(UserError, match=sentence):
        prepare(of_numbers(tmp_path))
    assert {each: text for each, text in content(tmp_path / "data").items() if each != ".prepare.lock"} == {
        name: b"somebody's"
    }
    (tmp_path / "data" / name).unlink()
    assert prepare(of_numbers(tmp_path)).documents == 4


def test_foreign_files_are_found_before_text_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where no apt-get is
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"data holds notes\.txt, and no prepared\.json"):
        prepare(english(tmp_path))
    (tmp_path / "data" / "notes.txt").unlink()
    (tmp_path / "data" / "english.jsonl.partial").touch()  # of a fetch that was killed
    with pytest.raises(UserError, match=r"this machine has no apt-get"):
        prepare(english(tmp_path))
    (tmp_path / "data" / "english.jsonl").write_text('{"text": "prose"}\n')
    assert prepare(english(tmp_path)).documents == 1


@pytest.mark.usefixtures("text")
def test_a_checkpoint_is_opened_from_another_folder(tmp_path: Path) -> None:
    """With its run's folder and the data that lie beside it, here or in a copy of both."""
    with inside(tmp_path):
        config = load_config(config_file("first", "", 500))
        found = prepare(config)
        manifest = make_manifest(parametrize(config, 500), resolve_layout(config, 1), found.digest, 1)
        checkpoints = Checkpoints(Path("runs/first/checkpoints"), 1)
        checkpoints.begin(1)
        checkpoints.commit(manifest, {})
        assert open_run(Path("runs/first")).tokenizer.vocab_size == 500
    shutil.copytree(tmp_path / "shared", tmp_path / "copy" / "shared")
    shutil.copytree(tmp_path / "runs", tmp_path / "copy" / "runs")
    for there in (tmp_path, tmp_path / "copy"):
        with inside(tmp_path / "elsewhere"):
            assert open_run(there / "runs" / "first").tokenizer.vocab_size == 500
        shutil.rmtree(tmp_path / "shared", ignore_errors=True)


class Killed(BaseException):
    """What no handler of errors sees."""


@pytest.mark.parametrize("after", ["begin_record", "put_in_place"])
def test_killed_between_the_data_and_their_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """The same settings go on; others still find a folder that is not theirs."""
    whole = prepare(of_numbers(tmp_path, data__dir=str(tmp_path / "alone")))

    def killed(*arguments: Any) -> None:
        done(*arguments)
        raise Killed

    done = getattr(module, after)
    with monkeypatch.context() as patch:
        patch.setattr(module, after, killed)
        with pytest.raises(Killed):
            prepare(of_numbers(tmp_path))
    before = content(tmp_path / "data")
    assert ("corpus.bin" in before) == (after == "put_in_place")
    with pytest.raises(UserError, match=OTHER):
        prepare(of_numbers(tmp_path, data__json_key="other"))
    assert content(tmp_path / "data") == before
    found = prepare(of_numbers(tmp_path))
    assert (found.files, found.digest) == (whole.files, whole.digest)
    assert (tmp_path / "data" / "corpus.bin").read_bytes() == (tmp_path / "alone" / "corpus.bin").read_bytes()


def test_what_tells_data_apart_wherever_they_lie(tmp_path: Path) -> None:
    """A tree that is moved holds the same data. Other text of the same size, weights and tokenizers make others."""
    (tmp_path / "a").mkdir()
    first = of_numbers(tmp_path / "a", data__dir="data")
    with inside(tmp_path / "a"):
        digests = {prepare(first).digest}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    moved = of_numbers(tmp_path / "b", data__dir=str(tmp_path / "b" / "data"))
    assert {prepare(moved).digest} == digests
    prefix = str(tmp_path / "a" / "data" / "corpus")
    for number, blend in enumerate([[prefix], [0.5, prefix, 0.5, prefix], [0.25, prefix, 0.75, prefix]]):
        keys = {"data__files": [], "data__data_path": blend, "data__dir": str(tmp_path / f"{number}")}
        digests.add(prepare(of_numbers(tmp_path, **keys)).digest)
    for folder in (tmp_path / "c" / "tok", tmp_path / "d" / "tok"):
        folder.mkdir(parents=True)
        (folder / HUGGING_FACE_FILES[0]).write_text(folder.parent.name)
        keys = {"data__tokenizer": {"library": "huggingface", "path": str(folder)}}
        digests.add(module._digest(Corpus(of_numbers(tmp_path, **keys))))
    (tmp_path / "b" / "numbers.jsonl").write_text('{"text": "1 2 3"}\n' * 3 + '{"text": "1 2 4"}\n')
    digests.add(module._digest(Corpus(moved)))
    assert len(digests) == 1 + 3 + 2 + 1
