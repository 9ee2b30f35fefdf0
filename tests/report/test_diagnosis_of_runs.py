"""`mup-megatron diagnose` on real runs that were spoilt in known ways: the cause is first or second."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.config import derive, load_config
from mup_megatron.report.diagnosis import Suspect, suspects
from tests.helpers.commands import mup
from tests.helpers.configs import pipeline_file
from tests.helpers.distributed import Ranks
from tests.telemetry import alarm_bodies

pytestmark = pytest.mark.slow

STEPS = 24
KEYS: dict[str, Any] = {
    "training__train_steps": STEPS,
    "training__lr_warmup_steps": 3,
    "training__eval_interval": STEPS // 2,
    "parallel__tensor_model_parallel_size": 1,
    "parallel__zero_stage": 0,
    "run__telemetry_interval": 2,
    "tuning__trials": 8,
    "tuning__repeat_best": 0,
    "tuning__search": {"lr": {"log_uniform": [1e-3, 0.3]}},
}


@pytest.fixture(scope="module")
def studied(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A pipeline of one process, by what of its config is another; its run. With controls where nothing is."""
    made: dict[str, Path] = {}

    def of(**changed: Any) -> Path:
        key = repr(changed)
        if key not in made:
            folder = tmp_path_factory.mktemp("study")
            ranks.stop()
            config = pipeline_file(folder, **{**KEYS, **changed})
            result = mup("pipeline", config, "--nproc-per-node", "1", *([] if changed else ["--control"]))
            assert result.returncode == 0, result.stderr
            made[key] = folder / "run"
        return made[key]

    return of


def again(ranks: Ranks, run: Path, folder: Path, changed: dict[str, Any], **planted: Any) -> list[Suspect]:
    """What is said of a target of the same study that is trained otherwise."""
    folder.mkdir()
    shutil.copy(run / "transfer.json", folder)
    shutil.copy(run / "transfer.band.json", folder)
    shutil.copytree(run / "tuning", folder / "tuning")
    config = derive(load_config(str(run / "config.yaml")), {"run.dir": str(folder), **changed})
    ranks.run(1, alarm_bodies.target, config=config, **planted)
    return suspects(folder)


def is_named(cause: str, found: list[Suspect]) -> bool:
    return any(cause in suspect.cause for suspect in found[:2])


SPOILT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "has not trained with the tuned values": ({"hparams.lr": 0.5}, {}),
    "train_steps differs from what was tuned at": ({"training.train_steps": 5 * STEPS}, {}),
    "global_batch_size differs from what was tuned at": ({"training.global_batch_size": 32}, {}),
    "an optimizer group has not had the table's rate": ({}, {"fault": "matrices at twice the rate", "begins": 8}),
    "the target did not look as its proxy did": ({}, {"fault": "a frozen matrix", "begins": 8}),
    "the first step was not the table's": ({"run.audit": "warn"}, {"broken": "hidden_init"}),
}


@pytest.mark.parametrize("cause", SPOILT)
def test_a_target_that_was_spoilt(ranks: Ranks, tmp_path: Path, studied: Any, cause: str) -> None:
    changed, planted = SPOILT[cause]
    found = again(ranks, studied(), tmp_path / "run", changed, **planted)
    assert is_named(cause, found), [(suspect.weight, suspect.cause) for suspect in found]


def test_the_target_itself(studied: Any) -> None:
    """It has but its narrow proxy, and what so short a study says of its range."""
    for suspect in suspects(studied()):
        assert "narrow" in suspect.cause or "may lie beyond" in suspect.cause, suspect


def test_a_control_in_another_parametrization(studied: Any) -> None:
    found = suspects(studied() / "standard")
    assert is_named("the run is not in µP", found), found


STUDIES: dict[str, dict[str, Any]] = {
    "the best lr may lie beyond what was tried": {"tuning__search": {"lr": {"log_uniform": [1e-5, 1e-4]}}},
    "clipping sets the size of updates": {"training__clip_grad": 0.01},
    "epsilon is not small beside gradients": {"optimizer__eps": 1e-2},
}


@pytest.mark.parametrize("cause", STUDIES)
def test_a_study_that_was_spoilt(studied: Any, cause: str) -> None:
    found = suspects(studied(**STUDIES[cause]))
    assert is_named(cause, found), [(suspect.weight, suspect.cause) for suspect in found]


def test_settings_that_changed_on_the_way(studied: Any, tmp_path: Path) -> None:
    """Eight more steps with another decay."""
    run = tmp_path / "run"
    shutil.copytree(studied(), run)
    changed = ["hparams.weight_decay=0.3", f"training.train_steps={STEPS + 8}", f"run.dir={run}"]
    allowed = ["--allow-change", "hparams.weight_decay", "--allow-change", "training.lr_decay_steps"]
    result = mup("train", run / "config.yaml", *changed, *allowed, "--nproc-per-node", "1")
    assert result.returncode == 0, result.stderr
    found = suspects(run)
    assert is_named("settings changed while the target trained", found), found
