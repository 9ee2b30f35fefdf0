"""`mup-megatron run` on the development tree of Megatron-LM (0.20), as it stood when this was written."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.commands import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None or "MEGATRON_LM" not in os.environ,
        reason="needs megatron-core 0.19 or later, and MEGATRON_LM, which names a git repository of Megatron-LM",
    ),
]
COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"  # 2026-08-22
EXPERTS = "--num-experts 4 --disable-bias-linear --swiglu --position-embedding-type rope"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its `megatron/`, with the compiled helpers of the wheel, which `make` would build there."""
    folder = tmp_path_factory.mktemp("tree")
    command = ["git", "-C", os.environ["MEGATRON_LM"], "archive", COMMIT, "megatron"]
    with tarfile.open(fileobj=io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)) as archive:
        archive.extractall(folder, filter="data")
    helpers = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    assert helpers is not None
    shutil.copy(str(helpers.origin), folder / "megatron" / "core" / "datasets")
    return folder


def seen(tree: Path, folder: Path, *extra: str) -> dict[str, Any]:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "tests.development_tree", str(tree), str(folder), *extra]
    environ = {**environment(), "PYTHONPATH": root, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    found = subprocess.run(command, cwd=root, env={**environ, **ranks}, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize("options", ["", EXPERTS])
def test_at_the_base_it_is_the_plain_run(options: str, tree: Path, tmp_path: Path) -> None:
    """To the last bit."""
    found = seen(tree, tmp_path, *options.split())
    ours, plain = found["runs"]
    assert found["version"] == "0.20.0"
    assert len(ours["steps"]) == 3, ours["said"]
    assert plain["steps"] == ours["steps"], plain["said"]


def test_what_no_table_knows_is_refused(tree: Path, tmp_path: Path) -> None:
    """An option that this tree has added, by its name."""
    found = seen(tree, tmp_path, "--mtp-num-layers", "1", "--mtp-hsm", "--position-embedding-type", "rope")
    assert "--mtp-hsm: not under µP here (mup-megatron does not know what it does" in found["runs"][0]["said"]
