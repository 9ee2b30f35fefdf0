"""`stability --megatron` of a script that trains a HybridModel; `coord-check --megatron` refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import megatron_runs
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_hybrid import SCRIPT, STACK

pytestmark = [pytest.mark.slow, needs_training]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The folder of the config that the first command writes, and the command line."""
    folder = tmp_path_factory.mktemp("hybrid")
    sizes: dict[str, Any] = {"train_iters": 8, "eval_iters": 2, "weight_decay": 0, "num_layers": None}
    sizes |= {"kv_channels": None, "ffn_hidden_size": None}
    words = megatron_runs.words(
        folder, *STACK, "--hybrid-layer-pattern", "*-*-", base="hidden_size: 32\nnum_attention_heads: 2\n", **sizes
    )
    return [str(folder), str(SCRIPT), *words]


def test_coordinates_are_refused(command: list[str], tmp_path: Path) -> None:
    """What is expected of each tensor comes from a table that only the run itself can make."""
    found = megatron_runs.proof("coord-check", command, tmp_path, "--widths", "1,2", "--steps", "2")
    assert found.returncode == 2
    assert "model.as_built: the layers of this model are a script's own" in found.stderr
    assert "Traceback" not in found.stderr


def test_stability(command: list[str], tmp_path: Path) -> None:
    """Every run is the script at its size and rate, the pattern's layers of that width."""
    found = megatron_runs.proof("stability", command, tmp_path, "--sizes", "1,2", "--values", "1e-3,2e-3,4e-3")
    assert found.returncode in (0, 1, 3), found.stdout[-2000:] + found.stderr[-3000:]
    runs = tmp_path / "run" / "stability" / "runs"
    outcomes = {path.stem: json.loads(path.read_text())["state"] for path in runs.glob("*.json")}
    assert outcomes == dict.fromkeys(
        (f"mup-width-{size}-lr-{rate}-seed-7" for size in (1, 2) for rate in ("0.001", "0.002", "0.004")), "complete"
    )
