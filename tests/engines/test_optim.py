"""Groups and schedules: ratios between groups never move."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mup_megatron.config import Training, derive
from mup_megatron.engines.optim import LearningRateSchedule, build_optimizer, parameter_groups, set_learning_rates
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.build import parametrize
from mup_megatron.util.errors import UserError
from tests.helpers.configs import MIXED, VOCABULARY, make


def training(**keys: Any) -> Training:
    return Training(global_batch_size=1, micro_batch_size=1, seq_length=1, train_steps=100, **keys)


def groups(**overrides: Any) -> tuple[Any, list[dict[str, Any]]]:
    config = resolve_auto(make(MIXED, "gpt3", **overrides))
    parametrization = parametrize(config, VOCABULARY)
    parameters = [(name, torch.nn.Parameter(torch.zeros(2))) for name in parametrization.tensors]
    return config, parameter_groups(parameters, parametrization)


def test_a_build_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's builder would wait for its lock for ever, without a word."""
    config, made = groups(parallel__offload_optimizer=True)
    assert config.optimizer.implementation == "deepspeed_cpu_adam"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, time.time() - 3600))
    with pytest.raises(UserError, match=r"cpu_adam/lock: 60 minutes old, left by a build of DeepSpeed's cpu_adam that"):
        build_optimizer(config, made)


def test_groups() -> None:
    """Distinct (lr, eps, decay): by hand from test_parametrization's numbers for mixed growth."""
    _, result = groups()
    found = {(round(g["lr_multiplier"], 4), round(g["eps"] * 1e8, 4), round(g["weight_decay"], 4)) for g in result}
    assert found == {
        (1.0, 0.6667, 0.1),  # embeddings
        (1.0, 0.6667, 0.0),  # gains and biases of width hidden
        (1.0, 0.4, 0.0),  # fc1's bias
        (1.0, 0.25, 0.0),  # QKV's bias
        (0.5, 0.6667, 0.2),  # attention output
        (0.6667, 0.25, 0.15),  # QKV
        (0.6667, 0.4, 0.15),  # fc1
        (0.4, 0.6667, 0.25),  # fc2
    }
    assert sum(len(group["params"]) for group in result) == 28
    assert len({group["rule"] for group in result}) == len(result)


def test_frozen_gains_have_no_group() -> None:
    """Of 28 parameters, five norms' gains and biases are frozen: no optimizer keeps moments of them."""
    _, result = groups(model__norm_gains="frozen")
    names = [name for group in result for name in group["names"]]
    assert not [name for name in names if "norm" in name]
    assert len(names) == 28 - 2 * 5


def test_a_name_without_a_builder_is_not_taken_for_adam() -> None:
    """Muon has no torch optimizer here; a name that the config learns before `build_optimizer` does stops alike."""
    config, result = groups()
    config = derive(config, {"optimizer.name": "muon", "parallel.engine": "megatron"})
    with pytest.raises(KeyError, match="muon"):
        build_optimizer(config, result)


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimizers(name: str, kind: type) -> None:
    growth = {"model__num_query_groups": 4, "base__num_query_groups": 2} if name == "sgd" else {}
    config, result = groups(optimizer__name=name, **growth)
    optimizer = build_optimizer(config, result)
    assert type(optimizer) is kind
    if name == "adamw":
        assert sorted({group["eps"] for group in optimizer.param_groups}) == pytest.approx([2.5e-9, 4e-9, 2e-8 / 3])
        assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.9, 0.95)}


def test_adam_is_not_adamw() -> None:
    config, result = groups(optimizer__name="adam", hparams__weight_decay=0.0)
    assert type(build_optimizer(config, result)) is torch.optim.Adam


def test_fused_by_config() -> None:
    config, result = groups(optimizer__implementation="torch_fused")
    assert all(group["fused"] for group in build_optimizer(config, result).param_groups)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_schedule": "constant"}, {0: 1.0, 50: 1.0, 99: 1.0}),
        ({"lr_schedule": "linear"}, {0: 1.0, 50: 0.5, 99: 0.01}),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, {0: 1.0, 50: 0.6}),
        ({"lr_schedule": "cosine"}, {0: 1.0, 25: 0.5 * (1 + math.cos(math.pi / 4)), 50: 0.5}),
        ({"lr_schedule": "cosine", "lr_warmup_steps": 10}, {0: 0.0, 5: 0.5, 10: 1.0, 55: 0.5}),
        ({"lr_schedule": "inverse-square-root", "lr_warmup_steps": 4}, {2: 0.5, 4: 1.0, 16: 0.5, 64: 0.25}),
        (
            {"lr_schedule": "WSD", "lr_wsd_decay_steps": 20, "lr_wsd_decay_style": "linear"},
            {0: 1.0, 80: 1.0, 90: 0.5},
        ),
        (
            {"lr_schedule": "multi-step", "lr_milestones": [50, 80], "lr_gamma": 0.1},
            {0: 1.0, 49: 1.0, 50: 0.1, 79: 0.1, 80: 0.01},
        ),
        ({"lr_schedule": "linear", "lr_decay_steps": 50}, {25: 0.5, 60: 0.0}),
    ],
    ids=lambda value: value.get("lr_schedule", "") if isinstance(value, dict) else "",
)
def test_schedules(keys: dict[str, Any], expected: dict[int, float]) -> None:
    schedule = LearningRateSchedule(training(**keys), lr=2e-3)
    for step, factor in expected.items():
        assert schedule(step) == pytest.approx(2e-3 * factor, abs=1e-12), step


def test_a_schedule_has_no_memory() -> None:
    schedule = LearningRateSchedule(training(lr_schedule="cosine", lr_warmup_steps=10), lr=1.0)
    forwards = [schedule(step) for step in range(100)]
    assert [schedule(step) for step in reversed(range(100))] == forwards[::-1]


@pytest.mark.parametrize("kind", ["cosine", "linear", "inverse-square-root", "constant", "multi-step", "WSD"])
def test_ratios_never_move(kind: str) -> None:
    config, result = groups(training__lr_schedule=kind, training__lr_milestones=[5, 9], training__lr_wsd_decay_steps=5)
    optimizer = build_optimizer(config, result)
    schedule = LearningRateSchedule(config.training, config.hparams.lr)
    expected = [group["lr_multiplier"] for group in result]
    for step in range(1, 20):
        set_learning_rates(optimizer, schedule(step))
        rates = [group["lr"] for group in optimizer.param_groups]
        assert [rate / schedule(step) for rate in rates] == pytest.approx(expected, rel=1e-12)


def test_one_rate_for_all_breaks_them() -> None:
    """Negative control: what a DeepSpeed scheduler would do."""
    config, result = groups()
    optimizer = build_optimizer(config, result)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    assert [group["lr"] / 1e-3 for group in optimizer.param_groups] != [group["lr_multiplier"] for group in result]
