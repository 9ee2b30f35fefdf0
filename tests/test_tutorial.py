"""docs/tutorial.md shows what its commands printed (`python -m benchmarks.tutorial`), and all of them run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tutorial

TEXT = tutorial.PAGE.read_text(encoding="utf-8")


@pytest.fixture
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tutorial.RECORD.read_text(encoding="utf-8"))
    return found


def test_the_page_is_what_was_printed(record: dict[str, Any]) -> None:
    assert tutorial.page(TEXT, record) == TEXT, "run python -m benchmarks.tutorial"


def test_another_output_changes_the_page(record: dict[str, Any]) -> None:
    """Negative control: one printed number, and one that a sentence tells."""
    command = next(command for command in record["outputs"] if command.startswith("mup-megatron pipeline"))
    other = copy.deepcopy(record)
    lines = other["outputs"][command]["lines"]
    place = next(at for at, line in enumerate(lines) if line.startswith("step 100: evaluation loss"))
    lines[place] = "step 100: evaluation loss 9.8765, perplexity 19466"
    other["facts"]["tokens"] = 12_345
    changed = set(tutorial.page(TEXT, other).splitlines()) - set(TEXT.splitlines())
    assert "step 100: evaluation loss 9.8765, perplexity 19466" in changed
    assert any("only 12,345 tokens" in line for line in changed)
    assert len(changed) == 2


def test_a_line_takes_the_printed_one_that_begins_alike() -> None:
    printed = ["step 10: loss 5.1", "step 100: loss 4.2", "trial-000 (1/4): loss 6.1", "trial-001 (2/4): loss 6.2"]
    shown = ["step 100: loss 9.9", "...", "trial-001 (2/8): stopped at step 25, loss 7.7"]
    assert tutorial._chosen(shown, printed) == ["step 100: loss 4.2", "...", "trial-001 (2/4): loss 6.2"]


def test_a_sentence_keeps_its_lines() -> None:
    text = "A run. It has only 7\ntokens here."
    assert tutorial._replaced(text, r"only \d+\stokens", "only 12 tokens") == "A run. It has only 12\ntokens here."
    with pytest.raises(RuntimeError, match="no words like only"):
        tutorial._replaced("A run.", r"only \d+", "only 12")


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    """The page word by word, with fewer steps and trials."""
    found = tutorial.run(tmp_path, shrunk={"100": "12", "tuning.trials=8": "tuning.trials=4"})
    assert [command.split()[1] for command in found] == [
        *("new", "plan", "explain", "tune", "transfer", "pipeline", "generate", "report")
    ]
    facts = tutorial.facts(tmp_path, found)
    assert 3.0 < facts["target_loss"] < 7.0
    assert facts["complete"] <= 4
    assert facts["epochs"] == round(12 * 16 * 128 / facts["tokens"])
    assert (tmp_path / "notes" / "runs" / "run" / "report.html").is_file()


def test_a_command_that_fails_says_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)explain nothing\.yaml: exit status 2\n.*nothing\.yaml"):
        tutorial._type(["mup-megatron", "explain", "nothing.yaml"], tmp_path)
