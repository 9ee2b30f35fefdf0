"""The audit of an engine's first step behind `mup_megatron.deepspeed.initialize`, on two ranks, ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mup_megatron.deepspeed import initialize
from mup_megatron.mup.in_place import split_in_place
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.helpers.distributed import Ranks
from tests.helpers.plain_faults import FAULTS, one_group_each
from tests.helpers.torch_bodies import LR

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW = pytest.mark.slow
TENSORS = 9


def audited(
    rank: Any,
    *,
    stage: int,
    how: str = "optimizer",
    fault: str | None = None,
    action: Any = "warn",
    without: str = "",
    **more: Any,
) -> dict[str, Any]:
    """What is said and found in three steps; what stops them, and behind how many."""
    from mup_megatron import deepspeed as door

    kept: list[Any] = []
    begin = door.first_steps

    def kept_steps(questions: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append(questions.audit)
        return begin(questions, *args, **kwargs)

    door.first_steps = kept_steps
    screen, net = io.StringIO(), bodies.model()
    steps, stopped = 0, ""
    try:
        with contextlib.redirect_stdout(screen):
            arguments = bodies.given(how, net, stage, rank.world_size, more)
            if without:
                held = [parameter for name, parameter in net.named_parameters() if name != without]
                arguments["optimizer"] = torch.optim.AdamW(held, lr=LR)
            if fault is not None:
                split_in_place(net, arguments["optimizer"])
                one_group_each(net, arguments["optimizer"])
            engine, *_ = initialize(model=net, audit=action, **arguments)
            if fault is not None:
                # Behind the guard, which looks before forward passes; what the readout does is looked at in the first.
                plant = functools.partial(FAULTS[fault].plant, engine.module, engine.basic_optimizer)
                plant() if "readout that" in fault or "readout without" in fault else engine.register_forward_hook(
                    _once(plant)
                )
            for batch in bodies.batches(3, rank.rank, rank.world_size):
                engine.backward(bodies.loss_of(engine, batch))
                engine.step()
                steps += 1
    except UserError as error:
        stopped = str(error)
    finally:
        door.first_steps = begin
    said = [line for line in screen.getvalue().splitlines() if "audit" in line]
    wrong = sorted({(finding.tensor, finding.quantity) for audit in kept for finding in audit.wrong})
    return {"said": said, "wrong": wrong, "stopped": stopped, "steps": steps}


def _once(call: Callable[[], None]) -> Callable[..., None]:
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            call()

    return hook


WAYS = ["optimizer", "config", "MuAdamW", "function", "config's MuAdamW"]


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        pytest.param(stage, how, marks=() if number == stage else SLOW)  # each stage once
        for stage in range(4)
        for number, how in enumerate(WAYS)
    ],
)
def test_a_healthy_run_is_right(ranks: Ranks, stage: int, how: str) -> None:
    first, second = ranks.run(2, audited, stage=stage, how=how)
    assert first["said"] == [f"audit: {TENSORS} tensors, {TENSORS} right; 1 multipliers, 1 right"]
    assert second["said"] == []
    assert first["steps"] == second["steps"] == 3


def all_audited(rank: Any, *, stage: int) -> dict[str, list[tuple[str, str]]]:
    """What is found wrong, fault by fault."""
    return {fault: audited(rank, stage=stage, fault=fault)["wrong"] for fault in FAULTS}


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)]
)
def test_planted_faults_are_named(ranks: Ranks, stage: int) -> None:
    """Each by tensor and quantity, and no other tensor, on every rank."""
    for found in ranks.run(2, all_audited, stage=stage):
        for fault, (named, _) in FAULTS.items():
            wrong = set(found[fault])
            assert named <= wrong, fault
            assert {tensor for tensor, _ in wrong} == {tensor for tensor, _ in named}, fault


@pytest.mark.slow
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16(ranks: Ranks, stage: int, masters: bool) -> None:
    """Masters and moments in bfloat16 round each step, though DeepSpeed puts them together in float32."""
    own = {"bf16_master_weights_and_grads": masters, "bf16_optimizer_states": masters}
    first, second = ranks.run(2, audited, stage=stage, how="config", bf16={"enabled": True, **own})
    assert first["wrong"] == second["wrong"] == []
    assert first["said"] == [f"audit: {TENSORS} tensors, {TENSORS} right; 1 multipliers, 1 right"]
    assert first["steps"] == second["steps"] == 3


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
def test_parameters_that_are_not_to_be_stepped(ranks: Ranks, stage: int) -> None:
    """They are right where that is meant, so they are named once, on the first rank."""
    first, second = ranks.run(2, audited, stage=stage, without="fc2.weight")
    named, audit = first["said"]
    assert named.startswith("warning: audit: no group of the optimizer holds fc2.weight, which requires a gradient")
    assert audit == f"audit: {TENSORS - 1} tensors, {TENSORS - 1} right; 1 multipliers, 1 right"
    assert second["said"] == []
    assert second["steps"] == 3


def test_it_stops_before_a_second_step(ranks: Ranks) -> None:
    for result in ranks.run(2, audited, stage=1, fault="fc1.weight: another epsilon", action="stop"):
        assert result["steps"] == 0
        assert "fc1.weight: epsilon 1.33333e-06, expected 3.33333e-07" in result["stopped"]
