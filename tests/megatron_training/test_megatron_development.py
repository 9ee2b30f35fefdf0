"""`mup-megatron run` and the series of patches on Megatron-LM's development tree (0.20), as it stood back then."""

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

import numpy as np
import pytest

from mup_megatron.patches import trees
from tests import native
from tests.commands import environment
from tests.megatron_training.test_megatron_training import seen as observed
from tests.megatron_training.test_megatron_training import start

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


def test_run_and_patched_tree_are_one(tree: Path, tmp_path: Path) -> None:
    """The tree with its series, by itself, is the tree under `mup-megatron run`: values, groups, losses, bit by bit."""
    patched = tmp_path / "patched"
    shutil.copytree(tree, patched)
    assert trees.apply_tree(patched)
    words = [str(native.SCRIPT), *native.words(tmp_path, *EXPERTS.split(), train_iters=3)]
    ways = {"run": f"run:{tree}", "tree": str(patched)}
    started = {name: start(tmp_path, name, how, *words) for name, how in ways.items()}
    run, own = (observed(process, tmp_path, name) for name, process in started.items())
    assert own["file"].startswith(str(patched))
    assert run["file"].startswith(str(tree))
    assert list(run["initial"]) == list(own["initial"])
    assert all(np.array_equal(value, own["initial"][name]) for name, value in run["initial"].items())
    # By hand: twice the base's width halves the rate of a hidden matrix, and leaves a norm's.
    rates = {name.removeprefix("decoder.layers.0."): group[1] for name, group in own["groups"].items()}
    assert (rates["self_attention.linear_proj.weight"], rates["input_layernorm.weight"]) == (0.5, 1.0)
    assert run["groups"] == own["groups"]
    assert len(own["losses"]) == 3
    assert run["losses"] == own["losses"]
