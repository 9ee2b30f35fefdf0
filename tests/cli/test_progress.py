"""What a terminal and a log show of a run's pace, by hand."""

from __future__ import annotations

import io
import sys

import pytest

from mup_megatron.util.progress import Progress, time_left


@pytest.mark.parametrize(
    ("done", "seconds", "remaining", "text"),
    [
        (10, 20, 5, ", about 10 s left"),
        (3, 1, 1, ", about 1 s left"),
        (1, 89, 1, ", about 89 s left"),
        (1, 90, 1, ", about 1.5 min left"),
        (2, 1200, 3, ", about 30 min left"),
        (1, 5400, 1, ", about 1.5 h left"),
        (4, 86400, 100, ", about 25 days left"),
        (0, 20, 5, ""),
        (5, 20, 0, ""),
    ],
)
def test_time_left(done: float, seconds: float, remaining: float, text: str) -> None:
    assert time_left(done, seconds, remaining) == text


def test_a_run_that_goes_on_counts_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed at step 90 of 110: two seconds a step, and not what the steps of an earlier process would make of it."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = Progress(True)
    for step in (91, 92, 93):
        now += 2
        progress.step(step, 110, 5.0, 1e4, 1)
    assert capsys.readouterr().out.splitlines() == [
        "step 91/110  loss 5.0000  10,000 tokens/s  2 s",
        "step 92/110  loss 5.0000  10,000 tokens/s  4 s, about 36 s left",
        "step 93/110  loss 5.0000  10,000 tokens/s  6 s, about 34 s left",
    ]


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its end: between two pieces another thread's line could come."""
    pieces: list[str] = []

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    Progress(True).say("trial 3 done")
    assert [piece for piece in pieces if piece] == ["trial 3 done\n"]
