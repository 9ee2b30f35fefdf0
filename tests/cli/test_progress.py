"""What a terminal and a log show of a run's pace, by hand."""

from __future__ import annotations

import io
import sys

import pytest

from mup_megatron.config.training import Training
from mup_megatron.train.hooks import Step
from mup_megatron.train.screen import Screen
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


def test_a_line_tells_the_mean_speed_since_the_last_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Each step has 1,000 tokens. The first takes 10 s, every fifth 3 s, the others 0.5 s: five steps take 5 s."""
    training = Training(global_batch_size=1, micro_batch_size=1, seq_length=1000, train_steps=15, log_interval=5)
    screen = Screen(training, Progress(True))
    for number in range(1, 16):
        seconds = 10.0 if number == 1 else 3.0 if number % 5 == 0 else 0.5
        speed = 1000 / seconds
        of_step = {"loss": 5.0, "grad_norm": 1.0, "lr": 0.1, "seconds": seconds, "tokens_per_second": speed}
        screen.after_step(Step(number=number, tokens=1000 * number, **of_step))
    told = [line.split("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told == ["100 tokens/s", "889 tokens/s", "1,000 tokens/s", "1,000 tokens/s"]
