"""Task files: JSON lines that somebody wrote, read into examples. Public names: `KINDS`, `Example`, `read_examples`.

A plain text (.txt, .md) is one document of `perplexity`. A line of any other file is one example:

    perplexity    {"text": "a document"}
    last_word     {"text": "a passage whose last word is asked for"}
    choice        {"context": "what came before", "endings": ["one", "another"], "label": 0}
    cloze         {"text": "a sentence with a ___ in it", "options": ["gap", "hole"], "label": 0}

`last_word` is LAMBADA's form (arXiv 1606.06031), `choice` HellaSwag's (arXiv 1905.07830), whose own keys are read too:
`ctx` for the context, and a label that is a number written as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mup_megatron.data.corpus import PLAIN_TEXT
from mup_megatron.util.encoding import not_utf8
from mup_megatron.util.errors import UserError, no_such_file, shown
from mup_megatron.util.files import open_regular, read_text

_BLANK = re.compile("_{3,}")


@dataclass(frozen=True, kw_only=True)
class Example:
    """What is asked: how likely each continuation is, after what comes before it.

    Args:
        line: of the file, from 1.
        pairs: (context, continuation), one for each answer; of `perplexity` the text alone, after nothing.
        answers: text of each answer, without what follows it.
        label: which of them is right.
    """

    line: int
    pairs: Sequence[tuple[str, str]]
    answers: Sequence[str] = ()
    label: int = 0


def read_examples(kind: str, path: Path) -> list[Example]:
    """The examples of a file; empty lines of JSON lines are passed over.

    Args:
        kind: of KINDS.
        path: of the file.

    Raises:
        UserError: the file is missing, empty or no UTF-8 text, or a line has another form; names line and key.
    """
    if not path.is_file():
        raise UserError(f"{_option(kind)}: {no_such_file(path)}")
    plain = kind == "perplexity" and path.suffix in PLAIN_TEXT
    examples = [_plain(path)] if plain else [KINDS[kind](_Line(path, number, found)) for number, found in _lines(path)]
    if not any(continuation.strip() for example in examples for _, continuation in example.pairs):
        raise UserError(f"{path}: empty; expected {'text' if plain else 'JSON lines, one example each'}")
    return examples


def _plain(path: Path) -> Example:
    """A whole file as a document."""
    try:
        return Example(line=1, pairs=[("", read_text(path, most=None))])
    except UnicodeDecodeError:
        raise not_utf8(path) from None


def _option(kind: str) -> str:
    return f"--{kind.replace('_', '-')}"


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file with their line numbers."""
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                raise not_utf8(path) from None
            except (ValueError, RecursionError) as error:
                said = error.msg if isinstance(error, json.JSONDecodeError) else "a value without end"
                raise UserError(f"{path}, line {number}: expected a JSON object, found no JSON ({said})") from None
            if not isinstance(found, dict):
                raise UserError(f"{path}, line {number}: expected a JSON object, found {shown(found)}")
            yield number, found


@dataclass(frozen=True)
class _Line:
    """One line, whose keys are asked for by kind of value."""

    path: Path
    number: int
    found: Mapping[str, Any]

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.path}, line {self.number}: {problem}")

    def text(self, *keys: str) -> str:
        """Text under the first of some keys that is there."""
        value = self._value(*keys)
        if not isinstance(value, str):
            raise self.error(f"{keys[0]}: expected text, found {shown(value)}")
        return self._whole(value, keys[0])

    def texts(self, key: str) -> list[str]:
        """Two texts or more, none of them empty."""
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(one, str) and one.strip() for one in value):
            raise self.error(f"{key}: expected a list of texts, none of them empty, found {shown(value)}")
        if len(value) < 2:
            raise self.error(f"{key}: expected two or more to choose among, found {len(value)}")
        return [self._whole(one, key) for one in value]

    def label(self, count: int) -> int:
        """A number from 0, which may be written as text."""
        value = self._value("label")
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:  # int refuses 4,301
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            raise self.error(f"label: expected the number of the right one, 0 to {count - 1}, found {shown(value)}")
        return value

    def _value(self, *keys: str) -> Any:
        for key in keys:
            if key in self.found:
                return self.found[key]
        raise self.error(f"{keys[0]} is missing; found {shown(sorted(self.found))}")

    def _whole(self, value: str, key: str) -> str:
        if any("\ud800" <= sign <= "\udfff" for sign in value):
            raise self.error(f"{key}: holds half a character (\\ud800)")
        return value


def _document(line: _Line) -> Example:
    return Example(line=line.number, pairs=[("", line.text("text"))])


def _last_word(line: _Line) -> Example:
    text = line.text("text").rstrip()
    found = re.fullmatch(r"(.*\S)(\s+\S+)", text, re.DOTALL)
    if found is None:
        raise line.error("text: expected two words or more, of which the last is asked for")
    return Example(line=line.number, pairs=[(found[1], found[2])], answers=[found[2].strip()])


def _choice(line: _Line) -> Example:
    context, endings = line.text("context", "ctx"), line.texts("endings")
    apart = "" if not context or context[-1].isspace() else " "
    pairs = [(context, ending if ending[0].isspace() else apart + ending) for ending in endings]
    return Example(line=line.number, pairs=pairs, answers=endings, label=line.label(len(endings)))


def _cloze(line: _Line) -> Example:
    text, options = line.text("text"), line.texts("options")
    parts = _BLANK.split(text)
    if len(parts) != 2:
        raise line.error(f"text: expected one blank (three underscores or more), found {len(parts) - 1}")
    pairs = [(parts[0], option + parts[1]) for option in options]
    return Example(line=line.number, pairs=pairs, answers=options, label=line.label(len(options)))


KINDS: dict[str, Callable[[_Line], Example]] = {
    "perplexity": _document,
    "last_word": _last_word,
    "choice": _choice,
    "cloze": _cloze,
}
"""What can be asked, with how a line of its file is read."""
