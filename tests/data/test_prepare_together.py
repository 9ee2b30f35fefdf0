"""Runs that share one `data.dir`: one prepares, the others wait; whoever dies leaves nothing that looks whole."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mup_megatron.config import load_config
from mup_megatron.data.batches import build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.util.errors import UserError
from mup_megatron.util.locks import hold
from tests.helpers.commands import environment, until
from tests.helpers.configs import MIXED, make

DOCUMENTS, LENGTH, VOCABULARY = 4000, 250, 200


class Preparing:
    """`mup-megatron prepare`, a process of its own whose words can be read while it runs."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "mup_megatron", "prepare", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
        self.said = ""

    def hear(self) -> str:
        """All that it has said so far."""
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0)[0]:
            if not (words := os.read(self.process.stdout.fileno(), 1 << 16)):
                break
            self.said += words.decode()
        return self.said

    def stop_while_it_writes(self, data: Path) -> None:
        """SIGSTOP once tokens are on the disk, before all of them are."""
        whole = DOCUMENTS * (LENGTH + 1) * 2

        def writes() -> bool:
            assert self.process.poll() is None, self.hear()
            return any(0 < path.stat().st_size < whole for path in data.glob("*corpus*bin*partial*"))

        until(writes, every=0)
        os.kill(self.process.pid, signal.SIGSTOP)

    def end(self, seconds: float = 60) -> int:
        status = self.process.wait(seconds)
        self.hear()
        return status


@pytest.fixture
def start() -> Iterator[Callable[[Path], Preparing]]:
    started: list[Preparing] = []

    def begin(path: Path) -> Preparing:
        started.append(Preparing(path))
        return started[-1]

    yield begin
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A corpus of numbers, and the tokens that it is: every document's numbers, then the end-of-document token."""
    drawn = np.random.default_rng(3).integers(1, VOCABULARY - 1, (DOCUMENTS, LENGTH))
    path = tmp_path_factory.mktemp("corpus") / "numbers.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in drawn))
    ends = np.full((DOCUMENTS, 1), VOCABULARY - 1)
    return path, np.concatenate([drawn, ends], axis=1).astype(np.uint16).reshape(-1)


def config_file(folder: Path, corpus: Path, **overrides: Any) -> Path:
    settings = make(
        MIXED,
        "gpt3",
        run__dir=str(folder / "run"),
        data__dir=str(folder / "data"),
        data__files=[str(corpus)],
        data__tokenizer={"library": "null", "vocab_size": VOCABULARY},
        **overrides,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings.model_dump()))
    return path


def tokens(folder: Path) -> np.ndarray:
    return np.fromfile(folder / "data" / "corpus.bin", dtype=np.uint16)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data").iterdir() if not path.name.startswith("."))


WHOLE = ["corpus.bin", "corpus.idx", "prepared.json"]


@pytest.mark.slow
def test_the_second_waits_and_says_for_whom(
    numbers: tuple[Path, np.ndarray], start: Callable[[Path], Preparing], tmp_path: Path
) -> None:
    """Both end well, with the corpus's own tokens; a third that is killed while it waits costs nothing."""
    path = config_file(tmp_path, numbers[0])
    first = start(path)
    first.stop_while_it_writes(tmp_path / "data")
    second, third = start(path), start(path)
    words = f"waiting for process {first.process.pid} on {socket.gethostname()}"
    until(lambda: words in second.hear() and words in third.hear(), 60)
    third.process.kill()
    os.kill(first.process.pid, signal.SIGCONT)
    assert (first.end(), second.end()) == (0, 0), first.said + second.said
    assert np.array_equal(tokens(tmp_path), numbers[1])
    assert left(tmp_path) == WHOLE
    assert "prepared: 1,004,000 tokens" in second.said


@pytest.mark.slow
def test_killed_while_it_writes(
    numbers: tuple[Path, np.ndarray], start: Callable[[Path], Preparing], tmp_path: Path
) -> None:
    """Another one that waits takes over from the beginning; what the dead one wrote is gone."""
    path = config_file(tmp_path, numbers[0])
    first = start(path)
    first.stop_while_it_writes(tmp_path / "data")
    assert not set(WHOLE) & set(left(tmp_path))
    second = start(path)
    until(lambda: "waiting for process" in second.hear(), 60)
    first.process.kill()
    assert second.end() == 0, second.said
    assert np.array_equal(tokens(tmp_path), numbers[1])
    assert left(tmp_path) == WHOLE


def flip(path: Path) -> None:
    """Damages a file; its size stays."""
    with path.open("rb+") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("name", ["corpus.bin", pytest.param("corpus.idx", marks=pytest.mark.slow)])
def test_a_run_verifies_once(numbers: tuple[Path, np.ndarray], tmp_path: Path, name: str) -> None:
    """What does not match its checksum is prepared anew; what was read before and did not change is not read again."""
    settings, memory = load_config(config_file(tmp_path, numbers[0])), tmp_path / "verified.json"
    prepare(settings)
    flip(tmp_path / "data" / name)
    said: list[str] = []
    assert prepare(settings, said.append).tokens == DOCUMENTS * (LENGTH + 1)
    assert not said  # the size is right, which is all that is looked at here
    prepare(settings, said.append, verified=memory)
    assert said[0] == f"warning: {tmp_path / 'data'}: {name} does not match its checksum; the data is prepared anew"
    assert np.array_equal(tokens(tmp_path), numbers[1])
    said.clear()
    prepare(settings, said.append, verified=memory)
    assert not said
    assert {Path(path).name for path in json.loads(memory.read_text())} == {"corpus.bin", "corpus.idx"}
    # Negative control of the memory: the same damage under the same time of change is what it cannot see.
    stat = (tmp_path / "data" / name).stat()
    flip(tmp_path / "data" / name)
    os.utime(tmp_path / "data" / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prepare(settings, said.append, verified=memory)
    assert not said
    os.utime(tmp_path / "data" / name)
    prepare(settings, said.append, verified=memory)
    assert "does not match its checksum" in said[0]


def test_a_file_that_is_cut_short_is_made_again(numbers: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    settings = load_config(config_file(tmp_path, numbers[0]))
    prepare(settings)
    os.truncate(tmp_path / "data" / "corpus.bin", 1000)
    said: list[str] = []
    prepare(settings, said.append)
    assert "corpus.bin has 1000 bytes instead of 2008000" in said[0]
    assert np.array_equal(tokens(tmp_path), numbers[1])


def test_prepared_anew_while_a_run_starts(numbers: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """Between what a run found and what it opened, another run has put other tokens there."""
    settings = load_config(config_file(tmp_path, numbers[0]))
    found = prepare(settings)
    prepare(load_config(config_file(tmp_path, numbers[0], data__json_key="text", data__split="90,10,0")))
    build_datasets(settings, found)  # the same tokens: nothing was replaced
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": " ".join(["1 2 3"] * 1000)}) + "\n")
    shutil.rmtree(tmp_path / "data")  # or the folder is refused
    prepare(load_config(config_file(tmp_path, other)))
    with pytest.raises(UserError, match="was prepared for other settings while this run started"):
        build_datasets(settings, found)


def first_samples(path: Path) -> list[list[int]]:
    settings = load_config(path)
    train, _ = build_datasets(settings, prepare(settings))
    return [train[number]["tokens"].tolist() for number in range(5)]


def test_an_index_that_a_killed_builder_left(numbers: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """megatron-core takes it for whole where its files exist; ours is looked for in the list of what is whole."""
    path = config_file(tmp_path, numbers[0])
    expected = first_samples(path)
    (cache,) = (tmp_path / "data" / "cache").iterdir()
    index = next(cache.glob("*shuffle_index.npy"))
    os.truncate(index, index.stat().st_size // 2)
    listed = (cache / "whole.json").read_text()
    assert first_samples(path) == expected  # its size is another than the list's
    (cache / "whole.json").unlink()
    os.truncate(index, index.stat().st_size // 2)
    assert first_samples(path) == expected
    assert (cache / "whole.json").read_text() == listed


def test_the_index_is_built_by_one_at_a_time(numbers: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    path = config_file(tmp_path, numbers[0])
    settings = load_config(path)
    found = prepare(settings)
    cache = tmp_path / "data" / "cache" / found.digest[:16]
    cache.mkdir(parents=True)
    said: list[str] = []
    builder = threading.Thread(target=build_datasets, args=(settings, found, said.append))
    with hold(cache / ".cache.lock", print, ""):
        builder.start()
        until(lambda: said)
        assert not list(cache.glob("*.npy"))
    builder.join()
    assert said == [
        f"waiting for process {os.getpid()} on {socket.gethostname()}, which builds the index of samples in {cache}"
    ]
    assert list(cache.glob("*.npy"))


def test_other_tokens_have_another_index(tmp_path: Path) -> None:
    """megatron-core names an index by everything but the tokens: over a changed corpus it would read the old one."""
    corpus = tmp_path / "numbers.jsonl"
    lines = [[word] * length for word, length in ((1, 30), (2, 60), (3, 90), (4, 120))]
    for order in (lines, [lines[number] for number in (3, 1, 0, 2)]):
        corpus.write_text("".join(json.dumps({"text": " ".join(map(str, line))}) + "\n" for line in order))
        path = config_file(tmp_path, corpus)
        for name in WHOLE:  # or the folder is refused
            (tmp_path / "data" / name).unlink(missing_ok=True)
        there = first_samples(path)
        alone = config_file(tmp_path, corpus, data__cache_dir=str(tmp_path / f"alone-{order[0][0]}"))
        assert there == first_samples(alone)
