"""What trials were compared by is told by its own name; a record of before, which names nothing, is of losses."""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.tuning.objective import BLEU, LOSS, objective_of, with_name
from mup_megatron.tuning.record import StudyRecord
from mup_megatron.tuning.remarks import remarks
from tests.helpers.records import study_of

VALUES: dict[str, float | str] = {"lr": 0.01}
TRIAL = study_of(VALUES)["trials"][0]
STUDY = study_of(
    VALUES,
    loss=88.5,
    noise=0.25,
    trials=[{**TRIAL, "loss": 88.5}, {**TRIAL, "slot": 1, "state": "diverged", "loss": None}],
    candidates=[{"slot": 0, "losses": [88.0, 89.0], "mean": 88.5, "within_noise": False}],
)


def test_bleu_stands_beside_the_number_that_was_smallest() -> None:
    """100 - 88.5 is 11.5."""
    named = with_name(STUDY, BLEU)
    assert (named["objective"], named["bleu"], named["loss"]) == ("bleu", 11.5, 88.5)
    assert [trial["bleu"] for trial in named["trials"]] == [11.5, None]
    assert [candidate["bleu"] for candidate in named["candidates"]] == [11.5]
    assert objective_of(StudyRecord.model_validate(named).objective) is BLEU
    assert (BLEU.text(88.5), BLEU.axis) == ("11.50", "proxy BLEU (higher is better)")


def test_a_study_of_losses_is_as_before() -> None:
    assert with_name(STUDY, LOSS) == STUDY
    assert objective_of(StudyRecord.model_validate(STUDY).objective) is LOSS
    assert (LOSS.text(88.5), LOSS.axis) == ("88.5000", "proxy loss (nats per token)")


@pytest.mark.parametrize(
    ("study", "said"), [(STUDY, "±0.2500 per run"), (with_name(STUDY, BLEU), "±0.25 BLEU per run")]
)
def test_noise_has_the_unit(study: dict[str, Any], said: str) -> None:
    assert said in " ".join(remarks(StudyRecord.model_validate(study), []))
