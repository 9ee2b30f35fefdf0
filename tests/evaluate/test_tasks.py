"""Task files: their forms, and one sentence with line and key where a line has another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.evaluate.tasks import KINDS, Example, read_examples
from mup_megatron.util.errors import UserError

CHOICE = {"context": "a b", "endings": ["c", "d e"], "label": 1}
CLOZE = {"text": "a ___ c", "options": ["b", "x y"], "label": 0}


def read(tmp_path: Path, kind: str, *lines: Any) -> list[Example]:
    path = tmp_path / "task.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return read_examples(kind, path)


def test_forms(tmp_path: Path) -> None:
    assert read(tmp_path, "perplexity", {"text": "a b"}, "", {"text": "", "title": "more"}) == [
        Example(line=1, pairs=[("", "a b")]),
        Example(line=3, pairs=[("", "")]),
    ]
    assert read(tmp_path, "last_word", {"text": "the end \nis near.\n"}) == [
        Example(line=1, pairs=[("the end \nis", " near.")], answers=["near."])
    ]
    assert read(tmp_path, "choice", CHOICE) == [
        Example(line=1, pairs=[("a b", " c"), ("a b", " d e")], answers=["c", "d e"], label=1)
    ]
    assert read(tmp_path, "cloze", CLOZE) == [
        Example(line=1, pairs=[("a ", "b c"), ("a ", "x y c")], answers=["b", "x y"], label=0)
    ]


def test_hellaswags_own_keys(tmp_path: Path) -> None:
    line = {"ind": 24, "ctx": "A man", "ctx_a": "x", "endings": ["a.", " b."], "label": "1", "split": "val"}
    assert read(tmp_path, "choice", line) == [
        Example(line=1, pairs=[("A man", " a."), ("A man", " b.")], answers=["a.", " b."], label=1)
    ]
    assert read(tmp_path, "choice", {**line, "ctx": "A man "})[0].pairs == [("A man ", "a."), ("A man ", " b.")]
    assert read(tmp_path, "choice", {**line, "ctx": ""})[0].pairs == [("", "a."), ("", " b.")]


BAD: list[tuple[str, Any, str]] = [
    ("perplexity", "{", "expected a JSON object, found no JSON (Expecting property name enclosed in double quotes)"),
    ("perplexity", "[1]", "expected a JSON object, found [1]"),
    ("perplexity", "[" * 100_000, "expected a JSON object, found no JSON (a value without end)"),
    ("perplexity", {"txt": "a"}, "text is missing; found ['txt']"),
    ("perplexity", {"text": 3}, "text: expected text, found 3"),
    ("perplexity", '{"text": "\\ud800"}', "text: holds half a character (\\ud800)"),
    ("last_word", {"text": "word"}, "text: expected two words or more, of which the last is asked for"),
    ("last_word", {"text": " word"}, "text: expected two words or more, of which the last is asked for"),
    ("choice", {**CHOICE, "context": None}, "context: expected text, found null"),
    ("choice", {"endings": [], "label": 0}, "context is missing; found ['endings', 'label']"),
    ("choice", {**CHOICE, "endings": "c"}, "endings: expected a list of texts, none of them empty, found 'c'"),
    ("choice", {**CHOICE, "endings": ["c", " "]}, "endings: expected a list of texts, none of them empty"),
    ("choice", {**CHOICE, "endings": ["c"]}, "endings: expected two or more to choose among, found 1"),
    ("choice", {**CHOICE, "label": 2}, "label: expected the number of the right one, 0 to 1, found 2"),
    ("choice", {**CHOICE, "label": -1}, "label: expected the number of the right one, 0 to 1, found -1"),
    ("choice", {**CHOICE, "label": True}, "label: expected the number of the right one, 0 to 1, found true"),
    ("choice", {**CHOICE, "label": ""}, "label: expected the number of the right one, 0 to 1, found ''"),
    ("choice", {**CHOICE, "label": "1" * 5000}, "label: expected the number of the right one, 0 to 1, found '111"),
    ("cloze", {**CLOZE, "text": "a b"}, "text: expected one blank (three underscores or more), found 0"),
    ("cloze", {**CLOZE, "text": "___ ____"}, "text: expected one blank (three underscores or more), found 2"),
    ("cloze", {**CLOZE, "options": None}, "options: expected a list of texts, none of them empty, found null"),
]


@pytest.mark.parametrize(("kind", "line", "problem"), BAD, ids=lambda value: str(value)[:30])
def test_a_line_of_another_form(tmp_path: Path, kind: str, line: Any, problem: str) -> None:
    with pytest.raises(UserError) as raised:
        read(tmp_path, kind, "", line)
    assert str(raised.value).startswith(f"{tmp_path}/task.jsonl, line 2: {problem}")


@pytest.mark.parametrize("kind", KINDS)
def test_files_without_examples(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"task\.jsonl: empty; expected JSON lines, one example each"):
        read(tmp_path, kind, "", " ")
    with pytest.raises(UserError, match=rf"--{kind.replace('_', '-')}: no such file: .*none\.jsonl"):
        read_examples(kind, tmp_path / "none.jsonl")
    (tmp_path / "task.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"task\.jsonl, line 1: not UTF-8 text: byte 13 is 0xe9"):
        read_examples(kind, tmp_path / "task.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_plain_text_is_a_document_of_perplexity(tmp_path: Path, name: str) -> None:
    """Whatever it holds, JSON too; other kinds have no plain text."""
    path, text = tmp_path / name, 'A line.\n\n{"text": "another"}\n'
    path.write_text(text)
    (example,) = read_examples("perplexity", path)
    assert example == Example(line=1, pairs=[("", text)])
    with pytest.raises(UserError, match=rf"{name}, line 1: expected a JSON object, found no JSON"):
        read_examples("last_word", path)
    path.write_text(" \n")
    with pytest.raises(UserError, match=rf"{name}: empty; expected text$"):
        read_examples("perplexity", path)
    path.write_bytes("é".encode("latin1"))
    with pytest.raises(UserError, match=rf"{name}, line 1: not UTF-8 text: byte 0 is 0xe9"):
        read_examples("perplexity", path)


def test_a_corpus_of_blanks_is_empty(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="empty"):
        read(tmp_path, "perplexity", {"text": " \n"})
