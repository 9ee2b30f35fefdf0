"""A study's journal after a writer was killed, or its disk was full."""

from __future__ import annotations

from pathlib import Path

import pytest

from mup_megatron.tuning.lease import Leases
from mup_megatron.tuning.study import Study
from tests.helpers.studies import joined, study_config


def test_a_lock_that_a_killed_writer_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a relative folder, where Optuna's link would dangle and never be taken for stale."""
    monkeypatch.chdir(tmp_path)
    Study.create(study_config(Path("run")))
    (tmp_path / "run" / "tuning" / "journal.log.lock").symlink_to("run/tuning/journal.log")
    assert len(Study.create(study_config(Path("run"))).trials()) == 8


def test_a_line_that_a_full_disk_left_unfinished(tmp_path: Path) -> None:
    """The next line would be glued to it, and the journal damaged for ever; who writes next cuts it off."""
    config = study_config(tmp_path)
    worker = Study.create(config, Leases(tmp_path / "tuning", 1.0))
    journal, lost = tmp_path / "tuning" / "journal.log", b'{"op_code":7,"worker_id":"7e'
    with journal.open("ab") as file:
        file.write(lost)
    trial = worker.claim()
    assert trial is not None
    worker.report(trial, 4, 5.0)
    assert lost + b"{" not in journal.read_bytes()
    assert joined(config, tmp_path).trials()[0].reports == {4: 5.0}
    assert len(Study.create(config, Leases(tmp_path / "tuning", 1.0)).trials()) == 8
