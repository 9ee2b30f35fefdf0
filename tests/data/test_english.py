"""data.corpus: english: packages of a local archive by the real apt-get and dpkg-deb, and what is said without them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import Config
from mup_megatron.data.english import PACKAGES, _entries
from mup_megatron.data.prepare import prepare
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, make

needs_apt = pytest.mark.skipif(
    not (shutil.which("apt-get") and shutil.which("dpkg-deb")), reason="apt-get and dpkg-deb are Debian's"
)
PROSE = "A sentence of prose, with a <b>bold</b> word &amp; an entity. " * 5
HANDBOOK = f"""<html><head><title>left out</title></head><body><p id="title">left out</p><div class="chapter">
<h2>Rights</h2><div class="para">{PROSE}<br/>after a break</div><script>left out</script>
<ul><li>one</li><li>two</li></ul></div>
<p class="footer">left out</p></body></html>"""
HELP = f"""<div id="Other">left out</div>
<div id="DisplayArea"><meta itemprop="x"><h1>Help</h1><p>{PROSE}</p></div><p>left out</p>"""
ENTRY = "Lark \\Lark\\, n.\n   A frolic; a jolly time.\n   [1913 Webster]\n\n   A second sense.\n\n"
DICTIONARY = "00-database-info\n   left out\n\n" + ENTRY + "Larch \\Larch\\, n.\n   A tree.\n        [WordNet 1.5]\n"
FILES = {
    "debian-handbook": ("usr/share/doc/debian-handbook/html/en-US/sect.html", HANDBOOK.encode()),
    "dict-gcide": ("usr/share/dictd/gcide.dict.dz", gzip.compress(DICTIONARY.encode())),
    "libreoffice-help-en-us": ("usr/share/libreoffice/help/en-US/text/a/b.html", HELP.encode()),
}
SENTENCE = "A sentence of prose, with a bold word & an entity."


def archive(folder: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, tuple[str, bytes]]) -> None:
    """An archive in a folder, which is all that apt-get knows."""
    entries = []
    for package, (name, content) in packages.items():
        tree = folder / "trees" / package
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_bytes(content)
        (tree / "DEBIAN").mkdir()
        about = f"Package: {package}\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: x\n"
        (tree / "DEBIAN" / "control").write_text(about)
        target = folder / "archive" / f"{package}.deb"
        target.parent.mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "--build", str(tree), str(target)], check=True, capture_output=True)
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        entries.append(f"{about}Filename: ./{target.name}\nSize: {target.stat().st_size}\nSHA256: {digest}\n")
    (folder / "archive").mkdir(exist_ok=True)
    (folder / "archive" / "Packages").write_text("\n".join(entries))
    (folder / "sources.list").write_text(f"deb [trusted=yes] file:{folder}/archive ./\n")
    for part in ("state/lists/partial", "cache/archives/partial", "log"):
        (folder / part).mkdir(parents=True)
    settings = f"""Dir::State "{folder}/state"; Dir::Cache "{folder}/cache"; Dir::Etc::sourceparts "-";
        Dir::Log "{folder}/log";
        Dir::Etc::sourcelist "{folder}/sources.list"; Dir::State::status "{folder}/status"; APT::Sandbox::User "";
        Dir::Etc::trustedparts "{folder}"; APT::Update::Post-Invoke ""; APT::Update::Post-Invoke-Success "";"""
    (folder / "status").touch()
    (folder / "apt.conf").write_text(settings)
    monkeypatch.setenv("APT_CONFIG", str(folder / "apt.conf"))
    subprocess.run(["apt-get", "update"], check=True, capture_output=True)


def english(folder: Path, **overrides: Any) -> Config:
    return make(
        MIXED,
        "gpt3",
        **{
            "data": {"corpus": "english", "tokenizer": {"library": "byte-level"}, "dir": str(folder / "data")},
            "run__dir": str(folder / "run"),
            **overrides,
        },
    )


@needs_apt
def test_it_is_fetched_once_and_holds_the_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(tmp_path, monkeypatch, FILES)
    said: list[str] = []
    monkeypatch.chdir(tmp_path)
    relative = prepare(english(Path("relative")), said.append)
    prepared = prepare(english(tmp_path))
    assert (prepared.digest, prepared.tokens) == (relative.digest, relative.tokens)
    assert [line for line in said if "fetching" in line] == [f"fetching {p} (apt-get download)" for p in PACKAGES]
    texts = [json.loads(line)["text"] for line in (tmp_path / "data" / "english.jsonl").read_text().splitlines()]
    assert prepared.documents == len(texts) == 3
    assert sorted(texts) == [
        "\n\n".join(["Help", " ".join([SENTENCE] * 5)]),
        "Lark \\Lark\\, n.\n   A frolic; a jolly time.\n\n   A second sense.\n\nLarch \\Larch\\, n.\n   A tree.",
        "\n\n".join(["Rights", " ".join([SENTENCE] * 5), "after a break", "one", "two"]),
    ]
    assert [hashlib.sha256(text.encode()).hexdigest() for text in texts] == sorted(
        hashlib.sha256(text.encode()).hexdigest() for text in texts
    )
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing is fetched again
    assert prepare(english(tmp_path)) == prepared
    # A copy of the folder is the same data; other text is not.
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    assert prepare(english(tmp_path, data__dir=str(tmp_path / "copy"))).digest == prepared.digest
    with (tmp_path / "data" / "english.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError, match="holds data that were prepared with other settings"):
        prepare(english(tmp_path))
    assert [entry.name for entry in (tmp_path / "data").iterdir() if entry.name.startswith(".english")] == []


@needs_apt
@pytest.mark.parametrize("lacking", ["dict-gcide", "its text"])
def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    """One sentence that names the package and what needs no network; nothing is left behind."""
    there = {**FILES, "dict-gcide": ("usr/share/other", b"x")} if lacking == "its text" else dict(FILES)
    there.pop(lacking, None)
    archive(tmp_path, monkeypatch, there)
    problem = "this version of it holds" if lacking == "its text" else "apt-get: '(Unable to locate|Can't find)"
    with pytest.raises(
        UserError,
        match=r"^test: data\.corpus: english needs the Debian package dict-gcide, which could not be fetched "
        rf"\({problem}.*corpus: stdlib, or files$",
    ):
        prepare(english(tmp_path))
    assert {entry.name for entry in (tmp_path / "data").iterdir()} == {".prepare.lock"}


def test_a_machine_without_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"debian-handbook, dict-gcide, libreoffice-help-en-us.* has no apt-get\).*stdlib"
    ):
        prepare(english(tmp_path))


def test_the_preface_of_the_dictionary_is_left_out() -> None:
    """Headwords begin at the margin; what the file says of itself is under names that begin with 00-database."""
    lines = [
        "00-database-url",
        "   ftp://x",
        "Word",
        "   [PJC]",
        "   (a)  a sense [see {Other}]",
        "00-database-info",
        "   y",
    ]
    assert list(_entries(lines)) == ["Word", "   (a)  a sense [see {Other}]"]


@pytest.mark.slow
@needs_apt
def test_the_packages_of_the_mirror(tmp_path: Path) -> None:
    """More than ten million bytes of three kinds of text, in which validation text is of every kind."""
    if subprocess.run(["apt-get", "download", "dict-gcide"], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("no mirror can be reached")
    prepared = prepare(english(tmp_path, data__split="98,2,0"))
    assert prepared.tokens > 10_000_000
    assert os.environ.get("APT_CONFIG") is None
    texts = [json.loads(line)["text"] for line in (tmp_path / "data" / "english.jsonl").read_text().splitlines()]
    last = texts[-len(texts) // 50 :]
    assert sum("LibreOffice" in text for text in last) > 2
    assert sum("\\" in text for text in last) > 2
