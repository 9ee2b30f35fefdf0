"""benchmarks.limit and what its page says: numbers by hand, and a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence import limit as told
from benchmarks.limit import apart, compared
from tests.helpers.commands import environment


def test_how_far_kernels_are_apart() -> None:
    """Features of two directions by hand: (1, -1) and (1, 1) of two positions, rotated, scaled, shifted."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    line = torch.tensor([[1.0], [-1.0], [0.0], [0.0]])
    kernel = x @ x.T
    assert apart(kernel, 3 * kernel) == pytest.approx(0)
    assert apart((x + 5) @ (x + 5).T, kernel) == pytest.approx(0)  # what all positions have in common
    # <K, L> = 4, |K| = sqrt(8), |L| = 2
    assert apart(kernel, line @ line.T) == pytest.approx(1 - 4 / (8**0.5 * 2))
    other = torch.tensor([[0.0], [0.0], [1.0], [-1.0]])
    assert apart(line @ line.T, other @ other.T) == pytest.approx(1)


def test_widths_are_compared_with_their_neighbors() -> None:
    kernel, other = torch.diag(torch.tensor([2.0, 0, 0])), torch.diag(torch.tensor([0, 2.0, 0]))
    runs = {
        8: [{"losses": [3.0, 1.0], "before": kernel, "after": kernel}],
        16: [{"losses": [4.0, 3.0], "before": kernel, "after": other}],
    }
    found = compared(runs)
    assert found["loss"] == [2.0, 3.5]
    assert found["curves"] == [1.5]
    # Centered, diag(2, 0, 0) has the norm 4/3, and diag(0, 2, 0) the product 4/9 with it.
    assert found["moved"] == pytest.approx([0, 1 - 1 / 4])
    assert found["kernels"] == pytest.approx([1 - 1 / 4])


def record(**lines: Any) -> dict[str, Any]:
    return {"sizes": [{"size": 8}, {"size": 16}, {"size": 32}], "kernels": lines}


def line(moved: list[float], kernels: list[float], curves: list[float]) -> dict[str, Any]:
    return {"moved": moved, "kernels": kernels, "curves": curves, "loss": [4.0] * 3}


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenth of an octave per doubling is where features stop; each way to fail is seen."""
    moves, stops = [0.8, 0.75, 0.8 * 2**-0.18], [0.8, 0.6, 0.8 * 2**-0.22]
    closer, away = ([0.4, 0.3], [0.2, 0.1]), ([0.4, 0.5], [0.2, 0.1])
    mup, fan_in, ntk = line(moves, *closer), line(moves, *away), line(stops, *closer)
    for found, said in (
        (record(mup=mup, fan_in=fan_in, ntk=ntk), "**passed**"),
        (record(mup=line(stops, *closer), fan_in=fan_in, ntk=ntk), "converge: none"),
        (record(mup=line(moves, *away), fan_in=fan_in, ntk=ntk), "converge: none"),
        (record(mup=mup, fan_in=fan_in, ntk=line(moves, *closer)), "converge: µP and neural tangent"),
        (record(mup=mup, fan_in=line(moves, *closer), ntk=ntk), "converge: µP and 1/sqrt(fan-in)"),
    ):
        monkeypatch.setattr(told, "record", lambda _, found=found: found)
        assert told.only_mup().endswith(said)


@pytest.mark.slow
def test_it_runs_and_goes_on(tmp_path: Path, repository: Path) -> None:
    """At the base the three are one model; a second start trains nothing."""
    keys = ["training.train_steps=4", "training.lr_warmup_steps=1", f"run.dir={tmp_path / 'run'}"]
    keys.append(f"data.dir={tmp_path / 'data'}")  # the standard library's source is another under another Python
    command = [sys.executable, "-m", "benchmarks.limit", str(repository / "configs/proof/gpt3.yaml"), *keys]
    command += ["--sizes", "1,2", "--seeds", "1", "--output", str(tmp_path)]
    ran = [
        subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True, env=environment())
        for _ in range(2)
    ]
    assert [each.stdout.count("loss") for each in ran] == [6, 0]
    found = json.loads((tmp_path / "limit.json").read_text(encoding="utf-8"))
    at_base = [{key: values[0] for key, values in each.items()} for each in found["kernels"].values()]
    assert at_base[0]["loss"] == at_base[1]["loss"] == at_base[2]["loss"]
    assert at_base[0]["moved"] == at_base[1]["moved"] > 0
    assert (tmp_path / "limit.png").stat().st_size > 10000
