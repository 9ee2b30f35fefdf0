"""`coord-check --megatron` and `stability --megatron`: the proofs in the user's own script, at several widths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import megatron_runs
from tests.helpers.installed import needs_training


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The folder of the config that the first command writes, and the command line."""
    folder = tmp_path_factory.mktemp("script")
    sizes: dict[str, Any] = {
        "train_iters": 8,
        "eval_iters": 2,
        "weight_decay": 0,
        "kv_channels": None,
        "ffn_hidden_size": None,
    }
    base = "hidden_size: 32\nnum_attention_heads: 2\n"
    return [
        str(folder),
        str(megatron_runs.SCRIPT),
        *megatron_runs.words(folder, "--recompute-activations", base=base, **sizes),
    ]


def check(folder: Path, command: list[str], *options: str) -> tuple[int, dict[str, Any]]:
    asked = ("--widths", "1,2,4", "--steps", "2", "--json")
    found = megatron_runs.proof("coord-check", command, folder, *asked, *options)
    assert found.returncode in (0, 1, 3), found.stdout[-2000:] + found.stderr[-3000:]
    assert (folder / "run" / "coord-check").is_dir()
    return found.returncode, json.loads(found.stdout)


@pytest.mark.slow
@needs_training
def test_mup_in_the_users_script(command: list[str], tmp_path: Path) -> None:
    """Nothing is out of bounds; every step took one batch, and Adam's first update is each tensor's own rate."""
    status, result = check(tmp_path, command)
    assert result["out_of_bounds"] == [], {name: result["verdicts"][name] for name in result["out_of_bounds"]}
    assert status in (0, 3)
    assert [size["size"] for size in result["sizes"]] == [32, 64, 128]
    assert result["silent"] == []
    cell = next(cell for cell in result["cells"] if cell["factor"] == 4)["coordinates"]
    # By hand: a hidden matrix of a model four times as wide has a quarter of the rate; the head's and embedding's own.
    rate = result["lr"]
    assert cell["updates"]["decoder.layers.0.mlp.linear_fc1.weight"][0] == pytest.approx(rate / 4, rel=1e-2)
    assert cell["updates"]["decoder.final_layernorm.weight"][0] == pytest.approx(rate, rel=1e-2)
    assert cell["losses"][2] < cell["losses"][0]


@pytest.mark.slow
@needs_training
def test_the_time_is_said(command: list[str], tmp_path: Path) -> None:
    """Before most of it has passed: what a run takes, and how long the others will."""
    found = megatron_runs.proof("coord-check", command, tmp_path, "--widths", "1,2,4", "--steps", "1")
    assert found.returncode in (0, 1, 3), found.stdout[-2000:] + found.stderr[-3000:]
    lines = found.stdout.splitlines()
    (said,) = [number for number, line in enumerate(lines) if re.match(r"3 runs, about \d+\.\d s each at ", line)]
    assert lines[said - 1].startswith("mup: 2 x base")
    assert lines[said + 1].startswith("mup: 4 x base")


@pytest.mark.slow
@needs_training
@pytest.mark.parametrize(
    ("options", "named", "quantity"),
    [
        (["--parametrization", "standard"], "decoder.layers.0.mlp.linear_fc1.weight", "update"),
        (["--break", "hidden_rate"], "decoder.layers.0.mlp.linear_fc1.weight", "rate"),
    ],
)
def test_a_wrong_rate_is_named(
    options: list[str], named: str, quantity: str, command: list[str], tmp_path: Path
) -> None:
    """Negative controls: the standard parametrization, and µP with one rate as at the base."""
    status, result = check(tmp_path, command, *options)
    assert (status, result["verdict"]) == (1, "failed")
    assert named in result["out_of_bounds"]
    assert "embedding.word_embeddings.weight" not in result["out_of_bounds"] or quantity == "update"
    slopes = next(iter(result["slopes"].values()))
    (found,) = [s for s in slopes if (s["name"], s["quantity"], s["step"]) == (named, "update", 0)]
    assert found["slope"] == pytest.approx(0.0, abs=0.02)  # -1 in µP
    assert found["expected"] == -1.0


@pytest.mark.slow
@needs_training
def test_stability_in_the_users_script(command: list[str], tmp_path: Path) -> None:
    """Every run is the user's script at its size and value; a second command finds all of them there."""
    asked = ("stability", command, tmp_path, "--sizes", "1,2", "--values", "1e-3,2e-3,4e-3")
    found = megatron_runs.proof(*asked)
    assert found.returncode in (0, 1, 3), found.stdout[-2000:] + found.stderr[-3000:]
    runs = tmp_path / "run" / "stability" / "runs"
    outcomes = {path.stem: json.loads(path.read_text()) for path in runs.glob("*.json")}
    assert {name: outcome["state"] for name, outcome in outcomes.items()} == dict.fromkeys(
        (f"mup-width-{size}-lr-{rate}-seed-7" for size in (1, 2) for rate in ("0.001", "0.002", "0.004")), "complete"
    )
    logs = {path.parent.name: path.read_text() for path in runs.glob("*/log.txt")}
    assert "learning rate: 4.000000E-03" in logs["mup-width-2-lr-0.004-seed-7"]
    assert "mup-megatron: mup applied" in logs["mup-width-2-lr-0.004-seed-7"]
    assert "(rates 0.002 to 0.004)" in logs["mup-width-2-lr-0.004-seed-7"]
    assert "(rates 0.004)" in logs["mup-width-1-lr-0.004-seed-7"]
    again = megatron_runs.proof(*asked)
    assert "6 of 6 runs are there already" in again.stdout
