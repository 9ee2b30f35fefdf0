"""The benchmarks run; what they measure is never tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_gpu_checks_run_on_a_cpu_too(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--quick"]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert len(result["checks"]) == 5
    assert all(check["passed"] for check in result["checks"].values())


@pytest.mark.slow
def test_benchmarks_run(repository: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"], cwd=repository, check=True, capture_output=True, text=True
    )
    assert '"ours_over_plain"' in result.stdout


def test_committed_results_say_where_they_come_from(repository: Path) -> None:
    for path in (repository / "benchmarks" / "results").glob("*.json"):
        assert {"date", "cores", "versions"} <= set(json.loads(path.read_text())["machine"]), path
