"""How fast a machine is said to be: by hand, on a machine whose cores are taken, and what a plan makes of it."""

from __future__ import annotations

import os

import pytest

from mup_megatron.tuning import budget, speed
from mup_megatron.tuning.speed import Speed, process_speed, speed_of
from tests.helpers.configs import MIXED, make


def test_speeds_by_hand() -> None:
    """Ten products of 12 FLOPs in 1 to 10 s: nine of them within 9 s, half of them within 5.5 s."""
    assert speed_of(12.0, [3, 1, 2, 10, 4, 5, 9, 8, 7, 6]) == Speed(12 / 9, 12 / 5.5, 12.0)
    assert speed_of(12.0, [4.0]) == Speed(3.0, 3.0, 3.0)


@pytest.mark.parametrize(("together", "alone"), [(0.25e9, 94e9), (80e9, 47e9)])
def test_the_better_number_of_threads_counts(together: float, alone: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others keep the cores busy two threads wait for each other; the two numbers are of such a machine."""
    asked = []

    def timed(_rows: int, _hidden: int, _ffn: int, _device: str, threads: int) -> Speed:
        asked.append(threads)
        typical = alone if threads == 1 else together
        return Speed(typical / 2, typical, typical * 2)

    monkeypatch.setattr(speed, "_timed", timed)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert process_speed(make(MIXED), 2).typical == max(together, alone)
    assert asked == [1, 4]
    assert process_speed(make(MIXED), 8).typical == alone
    assert asked[2:] == [1]


def test_a_plan_shows_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 2 GFLOP/s reached: the target's FLOPs over 1e9 seconds; where the speed varies, both ends of it."""
    config = make(MIXED, training__train_steps=20000)
    for measured, shown in ((Speed(1e9, 2e9, 4e9), True), (Speed(1.9e9, 2e9, 2.1e9), False)):
        monkeypatch.setattr(budget, "process_speed", lambda _config, _workers, measured=measured: measured)
        plan = budget.plan(config, 375, 1, measure=True)
        target = plan.target
        assert target.hours == pytest.approx(target.flops / 1e9 / 3600)
        assert target.least == pytest.approx(target.flops / (measured.most / 2) / 3600)
        assert target.most == pytest.approx(target.flops / (measured.least / 2) / 3600)
        said = next(line for line in budget.lines(config, plan) if line.startswith("target "))
        assert (" to " in said) == shown
    assert budget.plan(config, 375, 1).target.hours is None


def test_this_machine_is_measured() -> None:
    found = process_speed(make(MIXED), 1)
    assert 0 < found.least <= found.typical <= found.most
