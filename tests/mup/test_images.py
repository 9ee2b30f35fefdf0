"""docs/examples/images.py: the base is one model in both parametrizations, processes share batches, runs are kept."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mup_megatron.parallel.ranks import Rank
from tests.helpers.commands import BIN, environment
from tests.helpers.distributed import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def script() -> ModuleType:
    """The script as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        for name in ("digits", "mlp", "resnet"):
            sys.modules.pop(name, None)  # other tests import them from copies
        return importlib.import_module("images")
    finally:
        sys.path.remove(str(EXAMPLES))


def random_pictures() -> Any:
    torch.manual_seed(1)
    return torch.randn(256, 1, 8, 8), torch.randint(10, (256,))


def trained(kind: str, width: int, base: int, parametrization: str, lr: float = 0.005, steps: int = 8) -> float:
    return script().train(kind, width, base, parametrization, lr, 0, random_pictures(), steps)


@pytest.mark.parametrize(("kind", "width", "lr"), [("mlp", 32, 0.005), ("resnet", 2, 0.01)])
def test_both_are_one_model_at_the_base(kind: str, width: int, lr: float) -> None:
    """And two off it, where every rate of the standard parametrization stays."""
    assert trained(kind, width, width, "mup", lr) == trained(kind, width, width, "standard", lr)
    assert trained(kind, 2 * width, width, "mup", lr) != trained(kind, 2 * width, width, "standard", lr)


def test_rates_by_hand() -> None:
    """SGD, width 4 times the base: 4 for input weights, 1 for hidden ones, 4 for the readout's; the standard has 1."""
    images = script()
    for parametrization, expected in (("mup", (4, 1, 4)), ("standard", (1, 1, 1))):
        model = images.build("mlp", 128, 32, parametrization, 64, 0)
        optimizer = images.MuSGD(model.parameters(), lr=1.0)
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
        assert found == dict(zip(("fc1.weight", "fc2.weight", "readout.weight"), expected, strict=True))


def split(rank: Rank) -> float:
    return trained("mlp", 64, 32, "mup")


def test_two_processes_train_as_one(ranks: Ranks) -> None:
    alone = trained("mlp", 64, 32, "mup")
    assert ranks.run(2, split) == pytest.approx([alone, alone], abs=2e-5)
    assert abs(trained("mlp", 64, 32, "mup", lr=0.006) - alone) > 1e-3  # the comparison sees a rate that is another


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "images.py"), *words, "--output", str(folder)]
    names = {**environment(), "PYTHONPATH": str(EXAMPLES.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=names, check=False)


QUICK = ("--widths", "16", "32", "--rates", "0.005", "0.01", "0.02", "4e4", "--steps", "30", "--seeds", "1")


@pytest.mark.slow
def test_the_command_goes_on_where_it_was(tmp_path: Path) -> None:
    """Runs that are there are not trained again: one that is changed by hand shows in the result."""
    assert run(tmp_path, "mlp", *QUICK).returncode in (0, 1, 3)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert len(runs["losses"]) == 16
    assert None in runs["losses"].values()  # a rate of 40,000 diverges
    name = "mup, width 16 over 16, rate 0.01, seed 0"
    runs["losses"][name] = 0.001
    del runs["losses"]["mup, width 32 over 16, rate 0.005, seed 0"]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    assert run(tmp_path, "mlp", *QUICK).returncode in (0, 1, 3)
    result = json.loads((tmp_path / "mlp.json").read_text())
    rows = result["lines"]["mup"]["rows"]
    assert rows[0]["minimum"]["loss"] == 0.001
    assert math.isfinite(rows[1]["losses"][0][0])
    assert (tmp_path / "mlp.png").stat().st_size > 10_000


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    words = [
        str(BIN / "torchrun"),
        "--nproc-per-node",
        "2",
        "--master-port",
        "29617",
        str(EXAMPLES / "images.py"),
        "mlp",
    ]
    names = {**environment(), "PYTHONPATH": str(EXAMPLES.parents[1])}
    both = subprocess.run(
        [*words, *QUICK[:-1], "1", "--output", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env=names,
        check=False,
    )
    assert (tmp_path / "two" / "mlp.json").exists(), both.stderr
    run(tmp_path / "one", "mlp", *QUICK)
    two, one = (json.loads((tmp_path / name / "runs.json").read_text())["losses"] for name in ("two", "one"))
    assert two.keys() == one.keys()
    finite = [key for key, loss in one.items() if loss is not None and loss < 2.3]
    assert len(finite) >= 8
    assert [two[key] for key in finite] == pytest.approx([one[key] for key in finite], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rates", "0.1", "0.05", "0.2"], "--rates: expected three or more positive numbers, ascending"),
        (["--widths", "8"], "--widths: expected two or more positive numbers, ascending"),
        (["--data", "cifar"], "--data: cifar; expected digits or fashion-mnist=FOLDER"),
        (["--data", "fashion-mnist=nowhere"], "nowhere/train-images-idx3-ubyte.gz: cannot be read (No such file"),
    ],
)
def test_bad_input(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main(["mlp", *words, "--output", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, said in ((b"no gzip", "cannot be read"), (b"\x1f\x8b", "cannot be read")):
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
        assert script().main(["mlp", "--data", f"fashion-mnist={tmp_path}", "--output", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "runs.json").write_text("[1]")
    assert script().main(["mlp", "--output", str(tmp_path)]) == 2
    assert "no runs of this script" in capsys.readouterr().err
