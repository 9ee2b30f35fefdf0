"""data.corpus: libreoffice-help: paragraphs aligned by id, from packages of a local archive and from the mirror."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.data.libreoffice_help import paragraphs
from mup_megatron.data.prepare import prepare
from mup_megatron.util.errors import UserError
from tests.data.test_english import archive, needs_apt
from tests.helpers.configs import make_t5

PAGE = """<div id="DisplayArea"><p>no id</p><h1 id="hd_id1" dir="auto"><a name="x"></a>{title}</h1>
<ul><li><p id="par_id2" class="listitem">{choose} <span class="emph">{edit}</span>&nbsp;&amp;
<span><span hidden="true" class="MAC">Mac</span><span>Other</span></span>.<br>{more}</p></li></ul>
<p id="par_id3">{alone}</p><p id="par_id4">=SUM(A1)</p><p id="par_id5"></p><p>after</p></div>"""
GERMAN = PAGE.format(title="Öffnen", choose="Wählen Sie", edit="Bearbeiten", more="Fertig", alone="Nur hier")
ENGLISH = PAGE.format(title="Opening", choose="Choose", edit="Edit", more="Done", alone="Only here")
ENGLISH = ENGLISH.replace("par_id3", "par_id33")
FOLDER = "usr/share/libreoffice/help/{}/text/shared/a.html"
PACKAGES = {
    "libreoffice-help-de": (FOLDER.format("de"), GERMAN.encode()),
    "libreoffice-help-en-us": (FOLDER.format("en-US"), ENGLISH.encode()),
}
PAIRS = [
    {"de": "Öffnen", "en": "Opening"},
    {"de": "Wählen Sie Bearbeiten & Other. Fertig", "en": "Choose Edit & Other. Done"},
]


def help_config(folder: Path, **overrides: Any) -> Config:
    data = {"corpus": "libreoffice-help", "tokenizer": {"library": "byte-level"}, "dir": str(folder / "data")}
    return make_t5(data=data, run__dir=str(folder / "run"), **overrides)


@needs_apt
def test_paragraphs_are_aligned_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one language lacks, what is the same in both and what is empty is left out."""
    archive(tmp_path, monkeypatch, PACKAGES)
    said: list[str] = []
    prepared = prepare(help_config(tmp_path), said.append)
    lines = (tmp_path / "data" / "libreoffice-help.jsonl").read_text().splitlines()
    assert sorted((json.loads(line) for line in lines), key=str) == sorted(PAIRS, key=str)
    assert lines == sorted(lines, key=lambda line: hashlib.sha256(line.encode()).hexdigest())
    assert prepared.documents == 2
    assert [line for line in said if "fetching" in line] == [f"fetching {p} (apt-get download)" for p in PACKAGES]
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing is fetched again
    assert prepare(help_config(tmp_path)) == prepared
    assert {entry.name for entry in (tmp_path / "data").iterdir()} == {
        *(".prepare.lock", "corpus.bin", "corpus.idx", "libreoffice-help.jsonl", "prepared.json")
    }


@needs_apt
@pytest.mark.parametrize("lacking", ["libreoffice-help-de", "its text", "a shared paragraph"])
def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    there = dict(PACKAGES)
    there.pop(lacking, None)
    if lacking == "its text":
        there["libreoffice-help-de"] = ("usr/share/other", b"x")
    elif lacking == "a shared paragraph":
        there["libreoffice-help-de"] = (FOLDER.format("de").replace("a.html", "b.html"), GERMAN.encode())
    problems = {"its text": "this version of it holds no text", "a shared paragraph": "these versions of them share no"}
    archive(tmp_path, monkeypatch, there)
    with pytest.raises(
        UserError,
        match=r"^test: data\.corpus: libreoffice-help needs the Debian package libreoffice-help-de.*, which could not "
        rf"be fetched \({problems.get(lacking, 'apt-get: ')}.*; expected a network .*data\.pairs, with files of your",
    ):
        prepare(help_config(tmp_path))
    assert {entry.name for entry in (tmp_path / "data").iterdir()} == {".prepare.lock"}


def test_a_machine_without_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"libreoffice-help-de, libreoffice-help-en-us.* has no apt-get\).*data\.pairs"):
        prepare(help_config(tmp_path))


def test_elements_that_are_left_open(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="par_1">one <b>two<p id="par_2">three</p> no <p id="par_1">again</p>')
    assert paragraphs(tmp_path) == {"a.html#par_1": "one two", "a.html#par_2": "three"}


@pytest.mark.slow
@needs_apt
def test_the_packages_of_the_mirror(tmp_path: Path) -> None:
    """35,464 pairs of LibreOffice 7.4; other versions hold about as many."""
    package = "libreoffice-help-de"
    if subprocess.run(["apt-get", "download", package], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("no mirror can be reached")
    assert prepare(help_config(tmp_path)).documents > 30_000
