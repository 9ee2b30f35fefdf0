"""What a record tells of where it comes from, by git's and importlib's own word."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from mup_megatron.util import provenance


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def test_it_tells_all_that_a_record_must(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    told = provenance.provenance("f00d")
    assert set(provenance.KEYS) < set(told)
    assert told["text"] == "f00d"
    assert told["versions"]["megatron-core"] == importlib.metadata.version("megatron-core")
    assert told["python"] == sys.version.split()[0]
    if not (repository / ".git").exists():  # a source archive
        assert told["commit"] is None
        return
    dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no") else ""
    assert told["commit"] == _git("rev-parse", "HEAD") + dirty


def test_a_command_keeps_its_words_and_loses_secrets(tmp_path: Path) -> None:
    """`python -m` and a script are told as they are typed; nothing says where Python lies."""
    words = ["run.name=a b", "tuning.storage=postgresql://me:hunter2@host/db"]
    (tmp_path / "tool.py").write_text(
        "from mup_megatron.util.provenance import provenance\nprint(provenance(None)['command'])\n"
    )
    for typed in (["tool.py"], ["-m", "tool"]):
        ran = subprocess.run(
            [sys.executable, *typed, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()
        assert ran.startswith(f"python {' '.join(typed)} 'run.name=a b' ")
        assert "hunter2" not in ran


def test_a_library_that_is_no_checkout_knows_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed into an environment inside somebody's checkout, it must not tell that one's commit."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(provenance, "_ROOT", tmp_path / "venv")
    assert provenance.provenance(None)["commit"] is None
