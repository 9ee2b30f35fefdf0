"""Options that no table has: taken, told and recorded, for the audit judges what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mup_megatron.megatron_training.elsewhere import show
from mup_megatron.megatron_training.telemetry import unread_names
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_elsewhere import elsewhere

pytestmark = needs_training
BEHIND = "; the audit judges what they do at the first step, and not what they do later"


def test_the_sentence() -> None:
    assert unread_names([]) == ""
    assert unread_names(["--a 1", "--b"]) == f"not read here: --a 1, --b{BEHIND}"
    assert (
        unread_names(["--a"] * 14)
        == f"not read here: {', '.join(['--a'] * 12)} and 2 more (mup.json of a checkpoint){BEHIND}"
    )


def test_explain_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that cannot run the command line."""
    words = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --log-throughput"
    common = "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 64 "
    common += "--train-iters 20 --lr 1e-3 --mock-data --vocab-size 1000"
    found, settings = elsewhere(words, tmp_path, common=common, settled=True)
    show(*found, settings=settings)
    assert "--log-throughput" in settings.unread
    assert "--log-throughput" in capsys.readouterr().out.replace("\n", "").partition("not read here: ")[2]


def test_a_run_records_them(ranks: Ranks, tmp_path: Path) -> None:
    """In mup.json of the checkpoint, and on stderr."""
    words = megatron_runs.words(tmp_path, "--log-throughput", "--save", str(tmp_path / "saved"), save_interval=2)
    (taken,) = ranks.run(1, megatron_runs.train, words=words)
    assert taken["status"] == 0, taken["said"]
    assert "mup-megatron: not read here: " in taken["said"]
    record = json.loads((tmp_path / "saved" / "iter_0000002" / "mup.json").read_text())
    assert {"--log-throughput", "--save-interval 2", "--distributed-backend gloo"} <= set(record["unread"])
    assert not {"--hidden-size 64", "--lr 0.01"} & set(record["unread"])
