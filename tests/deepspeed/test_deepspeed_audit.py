"""The audit of an engine's first step behind `mup_megatron.deepspeed.initialize`, on two ranks, ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mup_megatron.deepspeed import initialize
from mup_megatron.util.errors import UserError
from tests.helpers import torch_bodies as bodies
from tests.helpers.distributed import Ranks
from tests.helpers.torch_bodies import LR

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW = pytest.mark.slow
TENSORS = 9


def rate_of_its_own(engine: Any) -> None:
    """The inner optimizer steps with the base's rate, whatever its groups say."""
    optimizer = engine.basic_optimizer
    step = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = LR
        result = step(*args, **kwargs)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return result

    optimizer.step = stepped


def changed(**factors: float) -> Callable[[Any], None]:
    """The group of fc1.weight, which alone has a quarter of the base's rate, holds other values."""

    def plant(engine: Any) -> None:
        (group,) = [group for group in engine.basic_optimizer.param_groups if group["lr_multiplier"] == 1 / 4]
        for key, factor in factors.items():
            group[key] *= factor

    return plant


PLANTED: dict[str, tuple[Callable[[Any], None], set[tuple[str, str]]]] = {
    "twice the rate": (changed(lr=2.0), {("fc1.weight", "learning rate")}),
    "another epsilon": (changed(eps=3.0), {("fc1.weight", "epsilon")}),
    "a quarter of the decay": (changed(weight_decay=1 / 4), {("fc1.weight", "weight decay")}),
    "a step that has a rate of its own": (
        rate_of_its_own,
        {("fc1.weight", "update over the table's"), ("fc2.weight", "update over the table's")},
    ),
}


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
            engine, *_ = initialize(model=net, audit=action, **arguments)
            if fault is not None:
                # Behind the guard, which looks before forward passes.
                engine.register_forward_hook(_once(lambda: PLANTED[fault][0](engine)))
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


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), 2, 3])
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(ranks: Ranks, stage: int, fault: str) -> None:
    for result in ranks.run(2, audited, stage=stage, fault=fault):
        assert set(result["wrong"]) >= PLANTED[fault][1], result
        blamed = {tensor for tensor, _ in result["wrong"]}
        assert blamed == {tensor for tensor, _ in PLANTED[fault][1]}


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
    first, second = ranks.run(2, audited, stage=stage, without="fc2.weight")
    assert first["said"] == [f"audit: {TENSORS - 1} tensors, {TENSORS - 1} right; 1 multipliers, 1 right"]
    assert second["steps"] == 3


def test_it_stops_before_a_second_step(ranks: Ranks) -> None:
    for result in ranks.run(2, audited, stage=1, fault="another epsilon", action="stop"):
        assert result["steps"] == 0
        assert "fc1.weight: epsilon 1e-06, expected 3.33333e-07" in result["stopped"]
