"""A run is resolved once: how often a whole pipeline asks, and what a setup made from another is."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from mup_megatron import cli
from mup_megatron.engines import setup
from mup_megatron.engines.setup import deepspeed, resolve
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.util.errors import ConfigError
from tests.helpers.configs import MIXED, make, pipeline_file


@contextmanager
def counted(*functions: Callable[..., Any]) -> Iterator[collections.Counter[str]]:
    """Counts the calls of functions, under whatever name they were imported."""
    codes: dict[CodeType, str] = {function.__code__: function.__name__ for function in functions}
    calls: collections.Counter[str] = collections.Counter()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            calls[codes[frame.f_code]] += 1

    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.slow
def test_a_pipeline_resolves_each_run_once(tmp_path: Path, repository: Path) -> None:
    """One process tunes one trial, trains the target, and trains it again in two other parametrizations.

    Runs: the target as the config has it, the proxy, the target with what was chosen, the two controls. A trial
    resolves its own, in its own process; every rank of a launch does what this one does.
    """
    json = repository / "configs" / "deepspeed" / "zero1.json"
    path = pipeline_file(
        tmp_path,
        tuning__trials=1,
        tuning__repeat_best=0,
        tuning__pruner="none",
        tuning__train_steps=2,
        training__train_steps=2,
        training__lr_warmup_steps=0,
        training__eval_interval=2,
        training__checkpoint_interval=2,
        parallel__deepspeed_config=str(json),
        parallel__tensor_model_parallel_size=1,
    )
    asked = (setup.resolve_auto, resolve_layout, setup.refuse, deepspeed._folders)
    with counted(*asked) as calls:
        assert cli.run(["pipeline", str(path), "--control", "--nproc-per-node", "1"]) == 0
    runs = 5
    # The proxy takes no DeepSpeed JSON; _folders is called where one is read.
    assert calls == {"resolve_auto": runs, "resolve_layout": runs, "refuse": runs, "_folders": runs - 1}


def test_a_setup_is_made_again_only_where_a_value_differs() -> None:
    made = resolve(make(MIXED, "gpt3"), 2)
    assert made.derive({}) is made
    assert made.derive({"hparams.lr": made.config.hparams.lr}) is made
    other = made.derive({"parallel.zero_stage": 2})
    assert (other.layout.zero_stage, made.layout.zero_stage) == (2, 1)
    assert other.deepspeed is not None
    assert other.deepspeed["zero_optimization"]["stage"] == 2
    with pytest.raises(ConfigError, match=r"parallel.zero_stage: DeepSpeed's bf16 without ZeRO"):
        made.derive({"parallel.zero_stage": 0, "training.precision": "bf16"})


def test_the_parametrization_is_worked_out_once() -> None:
    made = resolve(make(MIXED, "gpt3"), 1)
    assert made.parametrization(375) is made.parametrization(375)
    assert made.parametrization(375).config == made.config
    assert made.parametrization(500) is not made.parametrization(375)


def test_a_run_that_is_only_shown_may_need_what_is_not_here() -> None:
    """Its engine's settings are not read: the file is on another machine."""
    config = make(MIXED, "gpt3", parallel__deepspeed_config="elsewhere.json")
    assert resolve(config, 1, trains=False).deepspeed is None
    with pytest.raises(ConfigError, match=r"parallel.deepspeed_config: no such file: elsewhere.json"):
        resolve(config, 1)
