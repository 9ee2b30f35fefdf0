"""A fault that every trial would share ends the study at once, and one that only some have does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mup_megatron import cli
from mup_megatron.config import load_config
from mup_megatron.tuning.lead import check_failures
from mup_megatron.tuning.study import Study, Trial
from mup_megatron.util.errors import UserError
from tests.helpers.commands import mup
from tests.helpers.configs import pipeline_file


def trial(slot: int, state: Any, reason: str | None = None, reports: dict[int, float] | None = None) -> Trial:
    return Trial(
        id=slot,
        slot=slot,
        values={"lr": 0.01},
        seed=7,
        repeats=False,
        state=state,
        loss=None,
        reports=reports or {},
        seconds=1.0,
        reason=reason,
        attempts=1,
    )


def test_three_alike_end_a_study() -> None:
    trials = [*(trial(slot, "failed", "no driver") for slot in range(3)), trial(3, "running"), trial(4, "waiting")]
    with pytest.raises(UserError, match="tuning: the first 3 trials all failed with: no driver; worker-"):
        check_failures(trials, Path("tuning"))


def test_numbers_of_their_own_make_no_difference() -> None:
    """As in a reason that names the trial's value."""
    trials = [trial(slot, "failed", f"rates ×{0.4 + slot} for the query, {slot}e-05 elsewhere") for slot in range(3)]
    with pytest.raises(UserError, match=r"the first 3 trials all failed with: rates ×0\.4 for the query, 0e-05 else"):
        check_failures(trials, Path("tuning"))


def test_a_value_that_no_proxy_takes_is_said_before_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Query, key and value are one tensor, and a rate for one of them is refused; a rate of ×1 would not be."""
    path = pipeline_file(tmp_path, tuning__search={"per_tensor.attention_q.lr": {"log_uniform": [0.25, 4.0]}})
    assert cli.run(["tune", str(path)]) == 2
    said = capfd.readouterr().err
    assert "×0.25 for the query" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run" / "tuning").exists()


@pytest.mark.parametrize(
    "third",
    [
        trial(2, "failed", "another reason"),
        trial(2, "failed", "no driver", {4: 3.0}),
        trial(2, "complete", None, {4: 3.0}),
        trial(2, "diverged", "loss is nan"),
        trial(2, "running"),
    ],
    ids=["another reason", "after an evaluation", "complete", "diverged", "running"],
)
def test_a_study_goes_on(third: Trial) -> None:
    check_failures([trial(0, "failed", "no driver"), trial(1, "failed", "no driver"), third], Path("tuning"))


@pytest.mark.slow
def test_a_network_that_no_trial_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study's own process needs no network, and each trial's gloo does."""
    path = pipeline_file(tmp_path, tuning__trials=8)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    result = mup("tune", path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "the first 3 trials all failed with: " in result.stderr
    assert "none0" in result.stderr
    assert "Traceback" not in result.stderr
    states = [trial.state for trial in Study(load_config(path)).trials()]
    assert states.count("failed") == 3
    assert set(states) == {"failed", "waiting"}
