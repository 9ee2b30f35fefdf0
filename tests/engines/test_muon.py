"""Muon under the Megatron engine: its update in float64 by hand, and no layout in the losses.

The layouts are those that matter to Muon: stages, experts and sequences over ranks, and matrices over ranks, which each
rank must put together before it orthogonalises them. Every cell is compared with one process: initial values and groups
exactly, losses and gradient norms at every step.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup.megatron import emerging_missing
from tests.helpers import bodies, muon_bodies
from tests.helpers.comparison import Difference
from tests.helpers.configs import MIXED, MLA, MOE, make
from tests.helpers.distributed import Ranks
from tests.helpers.layouts import STEPS, Split, check
from tests.helpers.parity import Page

pytestmark = pytest.mark.skipif(emerging_missing("muon") is not None, reason=str(emerging_missing("muon")))

_OWN = {"optimizer__name": "muon", "model__num_layers": 4, "hparams__lr": 3e-3, "hparams__weight_decay": 0.1}
_GROUPS = {"model__num_query_groups": 4, "base__num_query_groups": 2}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (MIXED, {**_OWN, **_GROUPS}),
    "moe": (MOE, {**_OWN, "model__moe_layer_freq": [0, 1, 1, 1]}),
    "mla": (MLA, _OWN),
}
DENSE: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"tensor": 2},
    {"tensor": 2, "data": 2, "sequence": True},
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "virtual": 2},
    {"context": 2},
    {"pipeline": 2, "tensor": 2, "sequence": True},
)
EXPERTS: tuple[dict[str, Any], ...] = (
    {"expert": 2, "data": 2},
    {"expert": 4, "data": 4},
    {"tensor": 2, "expert": 2, "expert_tensor": 1, "sequence": True},
    {"tensor": 2, "expert": 2, "expert_tensor": 2, "data": 2, "sequence": True},
    {"pipeline": 2, "expert": 2, "data": 2},
    {"context": 2, "expert": 2},
)
CELLS = [
    *(("llama", Split("plain", **split)) for split in DENSE),
    *(("moe", Split("plain", **split)) for split in EXPERTS),
    ("mla", Split("plain", pipeline=2, tensor=2, sequence=True)),
]


def config_of(model: str, split: Split, **overrides: Any) -> Any:
    growth, own = MODELS[model]
    config = make(growth, "llama", **{**own, **split.overrides, **overrides})
    prepare(config)
    return config


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    """Runs of the models in one process, made when first asked for."""

    @cache
    def run(model: str) -> dict[str, Any]:
        return ranks.run(1, bodies.train, config=config_of(model, Split("plain")), steps=STEPS)[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), [pytest.param(*cell, id=f"{cell[0]}: {cell[1]}") for cell in CELLS])
def test_no_layout_is_in_the_losses(ranks: Ranks, reference: Any, parity: Page, model: str, split: Split) -> None:
    growth = "mixed, query groups x2" if model == "llama" else "mixed"
    with parity.cell(f"{model}, Muon", growth, str(split)) as cell:
        whole = reference(model)
        assert whole["losses"][0] - whole["losses"][-1] > 0.5
        results = ranks.run(split.processes, bodies.train, config=config_of(model, split), steps=STEPS)
        cell.add(results, whole)
        check(results, whole, split)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "model", "split"),
    [
        ("muon_slices", "llama", Split("plain", pipeline=2, tensor=2, sequence=True)),
        (
            *("muon_experts_over_the_dense_ranks", "moe"),
            Split("plain", tensor=2, expert=2, expert_tensor=1, sequence=True),
        ),
    ],
)
def test_without_it_the_losses_differ(ranks: Ranks, reference: Any, broken: str, model: str, split: Split) -> None:
    """The first rate is 0, so that the third loss is the first that has seen an update."""
    whole = reference(model)
    results = ranks.run(split.processes, bodies.train, config=config_of(model, split), steps=STEPS, broken=broken)
    with pytest.raises(Difference, match=re.escape("losses[2] on rank 0")):
        check(results, whole, split)


FC2, PROJECTION, QKV = "mlp.linear_fc2.weight", "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"


def by_hand(gradient: np.ndarray) -> np.ndarray:
    """0.2 sqrt(larger side) times the orthogonalised gradient; the first momentum only scales that."""
    return 0.2 * max(gradient.shape) ** 0.5 * muon_bodies.orthogonalised(gradient)


def off(change: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(change - expected).max() / np.abs(expected).max())


def heads(gradient: np.ndarray, config: Any) -> list[np.ndarray]:
    """Query, key and value rows of the fused matrix: per group its queries, its key, its value."""
    size, groups = config.model.head_size, config.model.query_groups
    queries = config.model.num_attention_heads // groups * size
    rows = gradient.reshape(groups, queries + 2 * size, -1)
    ends = (0, queries, queries + size, queries + 2 * size)
    return [rows[:, start:end].reshape(-1, rows.shape[2]) for start, end in itertools.pairwise(ends)]


def test_the_update_by_hand(ranks: Ranks) -> None:
    """In float64 from the gradient; under TP 2 each rank has its part; of slices, each rank's own orthogonal one."""
    settings = {"hparams__weight_decay": 0.0, "model__num_layers": 1}
    config = config_of("llama", Split("plain"), **settings)
    one = ranks.run(1, muon_bodies.first_step, config=config)[0]
    layer = "decoder.layers.0."
    for name in (FC2, PROJECTION, "mlp.linear_fc1.weight"):
        assert off(one["changes"][layer + name], by_hand(one["gradients"][layer + name])) < 1e-4, name
    split, whole = (heads(one[kind][layer + QKV], config) for kind in ("changes", "gradients"))
    for change, gradient in zip(split, whole, strict=True):
        assert off(change, by_hand(gradient)) < 1e-4
    assert off(one["changes"][layer + QKV], by_hand(one["gradients"][layer + QKV])) > 0.1  # not as one matrix

    two = config_of("llama", Split("plain", tensor=2), **settings)
    parts = np.split(by_hand(one["gradients"][layer + FC2]), 2, axis=1)
    for rank, result in enumerate(ranks.run(2, muon_bodies.first_step, config=two)):
        assert off(result["changes"][layer + FC2], parts[rank]) < 1e-4
    own = np.split(one["gradients"][layer + FC2], 2, axis=1)
    for rank, result in enumerate(ranks.run(2, muon_bodies.first_step, config=two, broken="muon_slices")):
        assert off(result["changes"][layer + FC2], parts[rank]) > 0.1
        assert off(result["changes"][layer + FC2], by_hand(own[rank])) < 1e-4  # which is why


LAYER_WISE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"data": 2}),
    ("llama", {"tensor": 2, "data": 2, "sequence": True}),
    ("llama", {"pipeline": 2, "data": 2}),
    ("llama", {"context": 2}),
    ("moe", {"expert": 2, "data": 2}),
    ("moe", {"expert": 2, "data": 4}),
    ("moe", {"pipeline": 2, "expert": 2, "data": 2}),
)


def each_and_shared(model: str, split: dict[str, Any]) -> list[Any]:
    """In bf16, every rank stepping every matrix, and each matrix stepped by one rank for all.

    Not clipped, since the norm is summed in another order.
    """
    keys = {"training__precision": "bf16", "training__clip_grad": 0.0}
    return [config_of(model, Split(state, **split), **keys) for state in ("plain", "distributed")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "split"), LAYER_WISE, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_ranks_that_share_the_steps_train_as_those_that_do_not(ranks: Ranks, model: str, split: dict[str, Any]) -> None:
    """Upstream's layer-wise optimizer: losses to the last bit, groups too."""
    each, shared = each_and_shared(model, split)
    count = Split("plain", **split).processes
    whole = ranks.run(count, bodies.train, config=each, steps=STEPS)
    assert whole[0]["losses"][0] - whole[0]["losses"][-1] > 0.5
    for one, other in zip(whole, ranks.run(count, bodies.train, config=shared, steps=STEPS), strict=True):
        assert one["losses"] == other["losses"]


@pytest.mark.slow
def test_a_step_that_is_not_shared_is_seen(ranks: Ranks) -> None:
    """Quick, and its negative control: nobody hears of the others' steps. The first rate is 0."""
    each, shared = each_and_shared("llama", {"data": 2})
    whole, same = (ranks.run(2, bodies.train, config=config, steps=4)[0]["losses"] for config in (each, shared))
    assert same == whole
    alone = ranks.run(2, bodies.train, config=shared, steps=4, broken="layer_wise_steps_stay")[0]["losses"]
    assert [one == other for one, other in zip(alone, whole, strict=True)] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "split"),
    [("llama", {"tensor": 2, "data": 2}), ("llama", {"pipeline": 2, "data": 2}), ("moe", {"expert": 2, "data": 4})],
)
def test_shared_steps_stop_and_go(ranks: Ranks, tmp_path: Path, model: str, split: dict[str, Any]) -> None:
    """Saved at step 5 and loaded: every loss to the last bit; by ranks that step every matrix themselves too.

    Negative control: without what the ranks that step a matrix hold of it, the ninth loss is another.
    """
    each, shared = each_and_shared(model, split)
    count = Split("plain", **split).processes
    whole = ranks.run(count, bodies.leg, config=shared, start_at=0, stop_at=9)[0]["losses"]
    first = ranks.run(count, bodies.leg, config=shared, start_at=0, stop_at=5, save=str(tmp_path))[0]["losses"]
    for config in (shared, each):
        again = ranks.run(count, bodies.leg, config=config, start_at=5, stop_at=9, load=str(tmp_path))[0]["losses"]
        assert [*first, *again] == whole
    lost = ranks.run(
        count, bodies.leg, config=shared, start_at=5, stop_at=9, load=str(tmp_path), broken="load_weights_alone"
    )[0]["losses"]
    assert lost[0] == whole[5]
    assert lost[3] != whole[8]
