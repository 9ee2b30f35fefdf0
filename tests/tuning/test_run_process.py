"""What a run in a process of its own and the one that started it say to each other."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from mup_megatron.parallel.ranks import Rank
from mup_megatron.tuning.process import Answer, End, Evaluation, Ready, RunProcess, Said, Start, Step, receive
from tests.helpers.configs import MIXED, make


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (Ready(), '{"event": "ready"}'),
        (Step(step=3, loss=5.25), '{"event": "step", "step": 3, "loss": 5.25, "memory": 0.0}'),
        (Evaluation(step=4, loss=math.inf), '{"event": "evaluation", "step": 4, "loss": Infinity}'),
        (End(state="complete", loss=0.1), '{"event": "end", "state": "complete", "loss": 0.1, "reason": ""}'),
        (End(state="failed", reason="x"), '{"event": "end", "state": "failed", "loss": null, "reason": "x"}'),
    ],
)
def test_a_message_is_one_line(message: Said, line: str) -> None:
    assert message.line() == line + "\n"
    assert receive(line) == message


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "done"}',
        '{"event": "step", "step": 3}',
        '{"event": "step", "step": "3", "loss": 1.0}',
        '{"event": "end", "state": "finished"}',
        '{"event": "ready", "again": true}',
    ],
)
def test_what_is_no_message_is_refused(line: str) -> None:
    with pytest.raises(ValidationError):
        receive(line)


def test_a_config_is_sent_whole() -> None:
    config = make(MIXED, "gpt3", hparams__lr=0.1 + 0.2)
    told = Start.model_validate(json.loads(Start.of(config).line()))
    assert told.config["hparams"]["lr"] == 0.1 + 0.2
    assert told.config == json.loads(json.dumps(config.model_dump()))
    assert Answer.model_validate(json.loads('{"go_on": false}')) == Answer(go_on=False)


PYTHON = sys.executable
SCRIPT = """
import json, sys
sys.stdin.readline()
print('{"event": "ready"}', flush=True)
print('{"event": "evaluation", "step": 2, "loss": 1.5}', flush=True)
answer = json.loads(sys.stdin.readline())
print(json.dumps({"event": "end", "state": STATE, "reason": f"told {answer}"}), flush=True)
sys.stdin.read()
"""


def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[End, list[Evaluation]]:
    """What is heard of a process whose program says what a test wants."""
    python = tmp_path / "python"
    python.write_text(f"#!{PYTHON}\n{program}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    evaluations: list[Evaluation] = []

    def evaluated(evaluation: Evaluation) -> bool:
        evaluations.append(evaluation)
        return False

    process = RunProcess(Rank(), tmp_path / "log")
    process.start(make(MIXED, "gpt3"))
    while (ended := process.listen(0.2, 30, evaluated=evaluated)) is None:
        pass
    process.stop()
    return ended, evaluations


@pytest.mark.parametrize("state", ["stopped", "diverged", "failed", "died", "busy"])
def test_an_evaluation_is_answered_and_the_end_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    ended, evaluations = heard(tmp_path, monkeypatch, SCRIPT.replace("STATE", repr(state)))
    assert evaluations == [Evaluation(step=2, loss=1.5)]
    assert ended == End(state=state, reason="told {'go_on': False}")  # type: ignore[arg-type]


def test_a_process_that_dies_is_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, evaluations = heard(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert (ended, evaluations) == (End(state="died", reason="its process died (SIGKILL)"), [])
    terminated = """import sys; print('{"event": "end", "state": "terminated"}', flush=True); sys.exit(0)"""
    ended, _ = heard(tmp_path, monkeypatch, terminated)  # another one can go on from what it saved
    assert ended == End(state="died", reason="its process died (exit status 0)")


def test_the_protocol_is_light() -> None:
    """Whoever only shares a study, or asks for help, imports no torch through it."""
    script = "import sys, mup_megatron.tuning.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=dict(os.environ), check=False).returncode == 0
