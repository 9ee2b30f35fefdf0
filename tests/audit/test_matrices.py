"""Steps of Muon and SOAP, audited on megatron-core's: healthy ones are right, planted faults are named by tensor."""

from __future__ import annotations

from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup.megatron import emerging_missing
from tests.helpers import audit_bodies
from tests.helpers.configs import MIXED, MOE, make
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import Split

pytestmark = pytest.mark.skipif(emerging_missing("muon") is not None, reason=str(emerging_missing("muon")))

LAYER = "decoder.layers.0."
FC2, QKV, PROJECTION = (
    f"{LAYER}{name}.weight" for name in ("mlp.linear_fc2", "self_attention.linear_qkv", "self_attention.linear_proj")
)
GROUPS = {"model__num_query_groups": 4, "base__num_query_groups": 2}
BF16 = {"training__precision": "bf16"}
SLOW = pytest.mark.slow


def audited(ranks: Ranks, optimizer: str, split: Split, *faults: str, model: str = "llama", **more: Any) -> Any:
    growth, own = (MIXED, GROUPS) if model == "llama" else (MOE, {})
    config = make(
        growth, "llama", optimizer__name=optimizer, hparams__weight_decay=0.1, **own, **split.overrides, **more
    )
    prepare(config)
    return ranks.run(split.processes, audit_bodies.audited, config=config, faults=faults)


@pytest.mark.parametrize(
    ("optimizer", "model", "split", "more"),
    [
        ("muon", "llama", Split("plain", tensor=2), {}),
        pytest.param("muon", "llama", Split("plain", pipeline=2, tensor=2, sequence=True), {}, marks=SLOW),
        pytest.param("muon", "llama", Split("plain", data=2), BF16, marks=SLOW),
        ("muon", "llama", Split("distributed", data=2), BF16),
        pytest.param("muon", "llama", Split("distributed", tensor=2, data=2), BF16, marks=SLOW),
        pytest.param("muon", "moe", Split("plain", tensor=2, expert=2, expert_tensor=1, sequence=True), {}, marks=SLOW),
        pytest.param(
            "muon", "moe", Split("plain", tensor=2, expert=2, expert_tensor=2, data=2, sequence=True), {}, marks=SLOW
        ),
        ("soap", "llama", Split("plain", data=2), {}),
        pytest.param("soap", "llama", Split("plain", pipeline=2), {}, marks=SLOW),
        pytest.param("soap", "llama", Split("distributed", data=2), BF16, marks=SLOW),
        pytest.param("soap", "moe", Split("plain", expert=2, data=2), {}, marks=SLOW),
    ],
    ids=str,
)
def test_no_false_alarm(ranks: Ranks, optimizer: str, model: str, split: Split, more: dict[str, Any]) -> None:
    for found in audited(ranks, optimizer, split, model=model, **more):
        assert (found["wrong"], found["unseen"]) == ([], [])
        assert found["updates"] >= {FC2, QKV, PROJECTION}


@pytest.mark.parametrize(
    ("optimizer", "fault", "split"),
    [
        ("muon", "slices", Split("plain", tensor=2)),
        pytest.param("muon", "query, key and value as one", Split("plain", tensor=2), marks=pytest.mark.slow),
        ("muon", "of half the size", Split("plain", data=2)),
        pytest.param("muon", "another momentum", Split("plain", data=2), marks=pytest.mark.slow),
        ("muon", "undone", Split("distributed", data=2)),
        ("soap", "Nesterov's in the bases", Split("plain", data=2)),
        pytest.param("soap", "undone", Split("plain", data=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_planted_fault_is_named(ranks: Ranks, optimizer: str, fault: str, split: Split) -> None:
    expected = audit_bodies.FAULTS[fault]
    more = BF16 if split.state == "distributed" else {}
    for found in audited(ranks, optimizer, split, fault, **more):
        assert any(line.startswith(f"{expected.tensor}: {expected.said}") for line in found["wrong"]), found["wrong"]
