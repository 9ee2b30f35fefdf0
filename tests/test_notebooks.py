"""Notebooks of docs/examples run as they are, from a folder of their own, and were run as they were committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = ("break-a-rule.ipynb",)
CLIENT = "the notebooks' client (notebook) is not installed"


def read(repository: Path, name: str) -> Any:
    nbformat: Any = pytest.importorskip("nbformat", reason=CLIENT)
    return nbformat.read(repository / "docs" / "examples" / name, as_version=4)


def test_every_notebook_was_run(repository: Path) -> None:
    """From top to bottom, without an error, and shows a picture."""
    paths = sorted((repository / "docs" / "examples").glob("*.ipynb"))
    assert [path.name for path in paths] == sorted(NOTEBOOKS)
    for path in paths:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert "error" not in {output["output_type"] for output in outputs}
        assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(repository: Path, tmp_path: Path, name: str) -> None:
    """It asserts its own verdicts; what it prints has as many lines as in the committed one, and it shows as much."""
    nbclient: Any = pytest.importorskip("nbclient", reason=CLIENT)
    committed, fresh = read(repository, name), read(repository, name)
    nbclient.NotebookClient(fresh, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, now in zip(committed.cells, fresh.cells, strict=True):
        assert kinds(before) == kinds(now), before.source


def kinds(cell: Any) -> list[tuple[str, ...]]:
    """What a cell showed: which kinds of data, and the first word of each printed line that has no number in it."""
    return [
        (output.output_type, *sorted(output.get("data", ())), *verdicts(output.get("text", "")))
        for output in cell.get("outputs", ())
    ]


def verdicts(text: str) -> list[str]:
    return [line.partition(":")[0] for line in text.splitlines() if line.startswith(("passed", "failed", "undecided"))]
