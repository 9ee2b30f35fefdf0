"""Faults planted into runs that `mup_megatron.bridge` made µP: the audit names each by tensor and quantity."""

from __future__ import annotations

import importlib.util

import pytest

from tests.bridge import bodies
from tests.helpers.audit_bodies import FAULTS
from tests.helpers.audit_faults import FIRST_STEPS, GROUPS, INITIAL, MULTIPLIERS, WHOLE_GROUPS, apart
from tests.helpers.distributed import Ranks
from tests.helpers.megatron_faults import ONE_RATE

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="megatron.training ships with megatron-core 0.19 and later, which need Python 3.12",
)
TENSOR = {"tensor_model_parallel_size": 2}
PACKS = [faults for kinds in (INITIAL, GROUPS, MULTIPLIERS, WHOLE_GROUPS, FIRST_STEPS) for faults in apart(kinds)]


def test_a_healthy_run(ranks: Ranks) -> None:
    for found in ranks.run(2, bodies.audited, faults=(), **TENSOR):
        assert (found["status"], found["wrong"], found["unseen"]) == (0, [], []), found["said"]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(pack, id=pack[0], marks=() if number % 6 == 0 else pytest.mark.slow)
        for number, pack in enumerate(PACKS)
    ],
)
def test_a_planted_fault_is_named(ranks: Ranks, faults: tuple[str, ...]) -> None:
    for found in ranks.run(2, bodies.audited, faults=faults, **TENSOR):
        for fault in map(FAULTS.__getitem__, faults):
            said = [line for line in found["wrong"] if line.startswith(f"{fault.tensor}: ") and fault.said in line]
            assert said, (fault, found["wrong"], found["said"])


def test_a_scheduler_that_resets_rates(ranks: Ranks) -> None:
    (found,) = ranks.run(1, bodies.audited, faults=(ONE_RATE,))
    assert any("mlp.linear_fc1.weight: learning rate 0.001" in line for line in found["wrong"]), found
