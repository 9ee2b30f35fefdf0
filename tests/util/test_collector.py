"""Python's collector of cycles: seldom while a command begins, as usual while it trains (train/test_loop.py)."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from mup_megatron.util import collector
from tests.helpers.commands import mup
from tests.helpers.installed import needs_training

WHOLE = (
    "import gc, sys\nfrom mup_megatron import cli\ntry:\n    {}\nfinally:\n    print(gc.get_stats()[2]['collections'])"
)


def whole_collections(repository: Path, call: str) -> int:
    """How often a process that explains a config looks through all of its objects."""
    command = [sys.executable, "-c", WHOLE.format(call), "explain", "configs/demo.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=True)
    return int(result.stdout.split()[-1])


@pytest.mark.slow
def test_a_command_looks_through_its_imports_less(repository: Path) -> None:
    assert whole_collections(repository, "cli.main()") <= 1


@pytest.mark.slow
def test_without_it_they_are_looked_through_often(repository: Path) -> None:
    """Control: `run` is `main` without `rarely`."""
    assert whole_collections(repository, "cli.run(sys.argv[1:])") > 4


@pytest.mark.slow
@needs_training
def test_a_script_of_somebody_else_s_trains_as_usual(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text("import gc, sys\nprint(gc.get_threshold())\nsys.exit()\nfrom megatron.training import pretrain\n")
    (tmp_path / "base.yaml").write_text("hidden_size: 64\n")
    result = mup("run", script, "--mup-base", tmp_path / "base.yaml")
    assert result.stdout.splitlines()[-1] == str(collector.USUAL), result.stderr


def test_what_was_there_is_kept_out() -> None:
    """Only where it had been rare: a process of somebody else's keeps its own thresholds."""
    before = gc.get_threshold()
    try:
        gc.unfreeze()
        gc.set_threshold(5000, 5, 5)
        collector.as_usual()
        assert (gc.get_threshold()[0], gc.get_freeze_count()) == (5000, 0)
        collector.rarely()
        collector.as_usual()
        assert gc.get_threshold() == collector.USUAL
        assert gc.get_freeze_count() > 1000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
