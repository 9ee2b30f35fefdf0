"""Where documents come from.

Public names: `documents`, `sequences`, `pairs_of`, `source_files`, `blend_of`, `data_directory`, `cuts_files`, `cut`.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mup_megatron.config import Config
from mup_megatron.config.study import Pairs
from mup_megatron.data.fetched import FETCHED
from mup_megatron.data.pairs import pair_files, read_pairs
from mup_megatron.data.parts import is_left_empty
from mup_megatron.util.errors import UserError, no_such_file, shown
from mup_megatron.util.files import open_regular, read_text

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "ensurepip"}
_JSON_LINES = (".jsonl", ".json")
_DOCUMENTS = 100
"""That a text is cut into, so that two of a hundred are for validation."""
_SMALLEST_DOCUMENT = 200
"""In characters."""


def data_directory(config: Config) -> Path:
    """Where prepared data lives: `data.dir`, else inside the run's folder."""
    return Path(config.data.dir or Path(config.run.dir) / "data")


def source_files(config: Config) -> list[Path]:
    """Files that the config's documents come from, in a fixed order.

    Raises:
        UserError: a file is missing, or there is none.
    """
    if config.data.corpus == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)]
        return sorted(files)
    if config.data.corpus in FETCHED:
        return [data_directory(config) / FETCHED[config.data.corpus][0]]  # which `prepare` fetches
    if config.data.pairs.named:
        return pair_files(config.data.pairs)
    files = [Path(name) for name in config.data.files]
    for path in files:
        if not path.is_file():
            raise config.error("data.files", no_such_file(path))
    return files


def pairs_of(config: Config) -> Pairs:
    """Where the pairs of a config stand whose data are pairs."""
    if config.data.pairs.named:
        return config.data.pairs
    return Pairs(jsonl=str(source_files(config)[0]), source_key="de", target_key="en")


def sequences(config: Config) -> Iterator[tuple[str, ...]]:
    """Texts of each document: one, or of pairs source and target. Pairs with an empty side are left out.

    Raises:
        UserError: as `documents` and `read_pairs`.
    """
    if not config.data.of_pairs:
        yield from ((text,) for text in documents(config))
        return
    for _, source, target in read_pairs(pairs_of(config)):
        if source.strip() and target.strip():
            yield source, target


def documents(config: Config) -> Iterator[str]:
    """Documents of the corpus: a line of a .jsonl file is one, any other file is one, or several where `cuts_files`.

    Raises:
        UserError: a file cannot be read as UTF-8, or a JSONL line has no text.
    """
    cuts = cuts_files(config)
    for path in source_files(config):
        if path.suffix in _JSON_LINES:
            yield from _json_lines(path, "text" if config.data.corpus else config.data.json_key)
            continue
        errors = "replace" if config.data.corpus else "strict"
        try:
            text = read_text(path, errors, most=None)
        except UnicodeDecodeError:
            raise config.error("data.files", f"{path} is not UTF-8 text") from None
        except OSError as error:
            raise config.error("data.files", f"cannot read {path}: {error.strerror}") from None
        yield from (piece for piece in (cut(text) if cuts else [text]) if piece.strip())


def cuts_files(config: Config) -> bool:
    """Whether text files are cut into several documents: where one each would leave a part of data.split empty.

    So a single .txt, or a few, have validation text; of many files each stays one document. Raises UserError.
    """
    if not config.data.files or any(path.suffix in _JSON_LINES for path in map(Path, config.data.files)):
        return False
    return is_left_empty(config.data.split, len(source_files(config)))


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
                raise UserError(f"{path}, line {number}: not UTF-8 text") from None
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


def blend_of(config: Config) -> tuple[list[str], list[float] | None]:
    """`data.data_path` as megatron-core's blend: prefixes, or alternating weights and prefixes.

    Raises:
        ConfigError: neither of the two.
    """
    entries = config.data.data_path
    if all(isinstance(entry, str) for entry in entries):
        return [str(entry) for entry in entries], None
    weights, prefixes = entries[0::2], entries[1::2]
    if len(weights) != len(prefixes) or not all(
        isinstance(weight, int | float) and weight > 0 and isinstance(prefix, str)
        for weight, prefix in zip(weights, prefixes, strict=False)
    ):
        raise config.error("data.data_path", "expected prefixes, or alternating positive weights and prefixes")
    return [str(prefix) for prefix in prefixes], [float(weight) for weight in weights]
