"""A run's text: where its documents come from, and the data sets that are made of them.

Public names: `Corpus`, `data_directory`, `pairs_of`, `text_files`, `PLAIN_TEXT`, `cut`.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.config.study import Pairs
from mup_megatron.data.fetched import FETCHED
from mup_megatron.data.pairs import pair_files, read_pairs
from mup_megatron.data.parts import is_left_empty
from mup_megatron.util.encoding import encoding_problem, not_utf8
from mup_megatron.util.errors import UserError, no_such_file, shown
from mup_megatron.util.files import open_regular, read_text

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "ensurepip"}
_JSON_LINES = (".jsonl", ".json")
PLAIN_TEXT = (".txt", ".md")
"""Names of files of plain text end with one of these, where the name decides what a file is."""
_DOCUMENTS = 100
"""That a text is cut into, so that two of a hundred are for validation."""
_SMALLEST_DOCUMENT = 200
"""In characters."""


def data_directory(config: Config) -> Path:
    """Where prepared data lives: `data.dir`, else inside the run's folder."""
    return Path(config.data.dir or Path(config.run.dir) / "data")


def pairs_of(config: Config) -> Pairs:
    """Where the pairs of a config stand whose data are pairs."""
    return Corpus(config).pairs


@dataclass(frozen=True)
class Corpus:
    """The text of a run, as its config says it. What is asked of it is worked out once.

    Args:
        config: the run.
    """

    config: Config

    @cached_property
    def directory(self) -> Path:
        """Where prepared data lives."""
        return data_directory(self.config)

    @cached_property
    def fetched(self) -> Path | None:
        """The file that `prepare` fetches, where the corpus is such a one."""
        found = FETCHED.get(self.config.data.corpus)
        return self.directory / found.file if found else None

    @cached_property
    def files(self) -> list[Path]:
        """Files that the text comes from, in a fixed order.

        Raises:
            UserError: one that is named is missing, or a folder without text.
        """
        data = self.config.data
        if data.corpus == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            return sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
        if self.fetched is not None:
            return [self.fetched]
        if data.pairs.named:
            return pair_files(data.pairs)
        if data.data_path:
            return [Path(f"{prefix}.bin") for prefix in self.blend[0]]
        try:
            return [file for name in data.files for file in text_files(Path(name))]
        except UserError as error:
            raise self.config.error("data.files", str(error)) from None

    @cached_property
    def blend(self) -> tuple[list[str], list[float] | None]:
        """megatron-core's blend of what is trained on: `data.data_path` as prefixes and weights, or what is prepared.

        Raises:
            ConfigError: `data.data_path` is neither prefixes nor alternating weights and prefixes.
        """
        entries = self.config.data.data_path
        if not entries:
            return [str(self.directory / "corpus")], None
        if all(isinstance(entry, str) for entry in entries):
            return [str(entry) for entry in entries], None
        weights, prefixes = entries[0::2], entries[1::2]
        if len(weights) != len(prefixes) or not all(
            isinstance(weight, int | float) and weight > 0 and isinstance(prefix, str)
            for weight, prefix in zip(weights, prefixes, strict=False)
        ):
            problem = "expected prefixes, or alternating positive weights and prefixes"
            raise self.config.error("data.data_path", problem)
        return [str(prefix) for prefix in prefixes], [float(weight) for weight in weights]

    @cached_property
    def pairs(self) -> Pairs:
        """Where the pairs stand, of data that are pairs."""
        if self.config.data.pairs.named:
            return self.config.data.pairs
        return Pairs(jsonl=str(self.files[0]), source_key="de", target_key="en")

    @cached_property
    def cuts(self) -> bool:
        """Whether text files are cut into several documents: where one each would leave a part of data.split empty.

        So a single .txt, or a few, have validation text; of many files each stays one document. Raises UserError.
        """
        data = self.config.data
        if not data.files or any(path.suffix in _JSON_LINES for path in self.files):
            return False
        return is_left_empty(data.split, len(self.files))

    def check_encoding(self) -> None:
        """Refuses text of the user's that is no UTF-8, before anything is made of it. Reads all of it.

        Raises:
            ConfigError: names the file, the byte and what converts it.
        """
        data = self.config.data
        if data.corpus or data.data_path:
            return
        key = "data.pairs" if data.pairs.named else "data.files"
        for path in self.files:
            try:
                problem = encoding_problem(path)
            except OSError as error:
                problem = f"cannot read {path}: {error.strerror}"
            if problem is not None:
                raise self.config.error(key, problem)

    def sequences(self) -> Iterator[tuple[str, ...]]:
        """Texts of each document: one, or of pairs source and target. Pairs with an empty side are left out.

        Raises:
            UserError: as `documents` and `read_pairs`.
        """
        if not self.config.data.of_pairs:
            yield from ((text,) for text in self.documents())
            return
        for _, source, target in read_pairs(self.pairs):
            if source.strip() and target.strip():
                yield source, target

    def documents(self) -> Iterator[str]:
        """Documents: a line of a .jsonl file is one, any other file is one, or several where it `cuts`.

        Raises:
            UserError: a file cannot be read as UTF-8, or a JSONL line has no text.
        """
        config = self.config
        for path in self.files:
            if path.suffix in _JSON_LINES:
                yield from _json_lines(path, "text" if config.data.corpus else config.data.json_key)
                continue
            errors = "replace" if config.data.corpus else "strict"
            try:
                text = read_text(path, errors, most=None)
            except UnicodeDecodeError:
                raise not_utf8(path) from None
            except OSError as error:
                raise config.error("data.files", f"cannot read {path}: {error.strerror}") from None
            yield from (piece for piece in (cut(text) if self.cuts else [text]) if piece.strip())


def text_files(path: Path) -> list[Path]:
    """A file itself; of a folder the files of text in it and in the folders in it, sorted by path.

    What has a name that begins with a dot is left out.

    Raises:
        UserError: it is missing, or a folder without text.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(no_such_file(path))
    found = [
        file
        for file in path.rglob("*")
        if file.suffix in (*PLAIN_TEXT, *_JSON_LINES)
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not found:
        raise UserError(f"{path}: holds no text; expected files that end with .txt, .md, .jsonl or .json")
    return sorted(found)


def cut(text: str) -> list[str]:
    """Cuts a text into documents, 100 to 200 of them unless it is short; joined they are the text.

    A document ends with a paragraph (an empty line) where there is one in its second half, else with a line, else with
    a word, else at the largest size: a hundredth of the text, and 200 characters at least.
    """
    size = max(_SMALLEST_DOCUMENT, -(-len(text) // _DOCUMENTS))
    pieces, start = [], 0
    while len(text) - start > size:
        middle, end = start + size // 2, start + size
        found = ((text.rfind(sign, middle, end), sign) for sign in ("\n\n", "\n", " "))
        end = next((place + len(sign) for place, sign in found if place >= 0), end)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _json_lines(path: Path, key: str) -> Iterator[str]:
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8"))[key]
            except UnicodeDecodeError:
                raise not_utf8(path) from None
            except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: no JSON, or a number without end
                raise UserError(
                    f"{path}, line {number}: expected a JSON object with text under {shown(key)} (data.json_key)"
                ) from None
            if not isinstance(text, str):
                raise UserError(f"{path}, line {number}: {shown(key)} (data.json_key) is not text")
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise UserError(f"{path}, line {number}: {shown(key)} (data.json_key) holds half a character (\\ud800)")
            if text.strip():
                yield text
