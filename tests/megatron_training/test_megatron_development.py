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
from tests.helpers import functional_recipes, megatron_runs
from tests.helpers.commands import environment
from tests.helpers.installed import HAS_TRAINING
from tests.megatron_training.test_megatron_training import seen as observed
from tests.megatron_training.test_megatron_training import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not HAS_TRAINING or "MEGATRON_LM" not in os.environ,
        reason="needs megatron-core 0.19 or later, and MEGATRON_LM, which names a git repository of Megatron-LM",
    ),
]
COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"  # 2026-08-22
COUNT = 184
"""Recipes there with different options."""
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
    return told("tests.helpers.development_tree", folder, str(tree), str(folder), *extra)


def told(module: str, folder: Path, *arguments: str, seconds: int = 240) -> dict[str, Any]:
    """What a module of these tests leaves in a folder."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", module, *arguments]
    environ = {**environment(), "PYTHONPATH": root, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    found = subprocess.run(command, cwd=root, env={**environ, **ranks}, capture_output=True, text=True, timeout=seconds)
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


def test_an_option_that_no_table_has(tree: Path, tmp_path: Path) -> None:
    """One that this tree has added: the run trains, and tells it."""
    ours = seen(tree, tmp_path, *["--mtp-num-layers", "1", "--position-embedding-type", "rope", "--mtp-hsm"])["runs"][0]
    assert len(ours["steps"]) == 3, ours["said"]
    assert "--mtp-hsm" in ours["said"].partition("not read here: ")[2]


def test_run_and_patched_tree_are_one(tree: Path, tmp_path: Path) -> None:
    """The tree with its series, by itself, is the tree under `mup-megatron run`: values, groups, losses, bit by bit."""
    patched = tmp_path / "patched"
    shutil.copytree(tree, patched)
    assert trees.apply_tree(patched)
    words = [str(megatron_runs.SCRIPT), *megatron_runs.words(tmp_path, *EXPERTS.split(), train_iters=3)]
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


@pytest.mark.parametrize("options", ["", EXPERTS])
def test_multi_token_prediction_without_transformer_engine(options: str, tree: Path, tmp_path: Path) -> None:
    """At the base it is the plain run; upstream alone ends in a TypeError, for which the patch is."""
    words = ["--mtp-num-layers", "1", "--position-embedding-type", "rope", *options.split()]
    found = seen(tree, tmp_path, *words)
    ours, plain = found["runs"]
    assert len(ours["steps"]) == 3, ours["said"]
    assert plain["steps"] == ours["steps"], plain["said"]


# What no table of µP can be made of, by a part of the recipe's name, with what the sentence says.
REFUSED = {
    "_gdn": "--experimental-attention-variant gdn: such a model is parametrised as it is built",
    "_dsa": "--experimental-attention-variant dsa: such a model is parametrised as it is built",
    "hybrid/hybrid_mr": "--spec: such a model is parametrised as it is built",
    "tp1_pp1_mup": "--use-mup: megatron-core's native MuP cannot be combined with this project's; remove --use-mup",
    "nemotron/": "--spec: such a model is parametrised as it is built",
    # Megatron itself refuses these, here or everywhere.
    "fim_dataset": "Mock dataset is not supported with FIM dataset",
    "fsdp2_resume_torch_dist_te": "--use-torch-fsdp2 requires --untie-embeddings-and-output-weights",
    "native_fp8_tp_pp_sp_tp_overlap": "--deterministic-mode requires: tp_comm_overlap=False",
    "fsdp2_ep_overlap": "overlap_grad_reduce is only supported with TE",
}
# Options that another program than megatron.training's parser adds.
OTHERS = ("modelopt", "flextron", "QAD")


def test_every_recipe_is_explained_or_refused(tree: Path, tmp_path: Path) -> None:
    """All functional tests of the tree that train such models: a table with the rule's rates, or one sentence."""
    listed = functional_recipes.recipes(os.environ["MEGATRON_LM"], COMMIT)
    (tmp_path / "recipes.json").write_text(json.dumps(listed))
    places = (str(tree), str(tmp_path / "recipes.json"), str(tmp_path))
    found = told("tests.helpers.functional_recipes", tmp_path, *places, seconds=1800)
    assert {name: said["traceback"] for name, said in found.items() if "traceback" in said} == {}
    wrong = {}
    for name, said in found.items():
        sentence = next((sentence for part, sentence in REFUSED.items() if part in name), None)
        if any(part in name for part in OTHERS):
            right = "error: unrecognized arguments" in said.get("parser", "")
        elif sentence is not None:
            right = sentence in said.get("refused", "") and "\n" not in said["refused"]
        else:
            # Under Muon rows and columns double, and sqrt(larger side) with them.
            right = said.get("rates") == [2**-0.5 if "muon" in name else 0.5]
        if not right:
            wrong[name] = said
    assert wrong == {}
    assert len(found) == COUNT
