"""Save in one layout, go on in another: the curve is the one of a run that never stopped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.state import _shards
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.patches import ALL_PATCHES
from mup_megatron.rules.shapes import Init, TensorSpec
from tests.helpers import bodies
from tests.helpers.comparison import TOLERANCE
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import Split
from tests.helpers.matrix import config_of

STEPS, STOP = 9, 5

ONE = Split(0)
ZERO1, ZERO2, ZERO3 = (Split(stage, data=2) for stage in (1, 2, 3))
TP2 = Split(1, tensor=2, data=2, sequence=True)
TP4 = Split(0, tensor=4)
MEGATRON = Split("distributed", data=2)
MEGATRON_PLAIN = Split("plain", tensor=2)
FSDP2 = Split("fsdp2", data=2)
FSDP2_TP2 = Split("fsdp2", tensor=2, data=2, sequence=True)
PP2 = Split("distributed", pipeline=2, data=2)
VPP2 = Split("plain", pipeline=2, virtual=2, tensor=2, sequence=True)
PP4 = Split("plain", pipeline=4)
EP2, EP4 = Split("distributed", expert=2, data=2), Split("plain", expert=4, data=4)
EP2_ZERO = Split(1, expert=2, data=2)
EP2_TP2 = Split("distributed", tensor=2, expert=2, expert_tensor=1, sequence=True)
EP2_PP2 = Split("plain", pipeline=2, expert=2, data=2)

PAIRS = [
    ("gpt3", ONE, TP2),
    ("gpt3", TP2, ONE),
    ("gpt3", ZERO1, ZERO3),
    ("gpt3", ZERO3, ZERO2),
    ("gpt3", TP4, PP4),
    ("gpt3", PP4, ZERO3),
    ("gpt3", ZERO1, MEGATRON),
    ("gpt3", MEGATRON, Split("distributed", data=4)),
    ("gpt3", MEGATRON, Split("distributed", context=2, data=2)),
    ("gpt3", MEGATRON_PLAIN, MEGATRON),
    ("llama tied", TP2, VPP2),
    ("llama tied", VPP2, PP2),
    ("llama tied", PP2, TP4),
    ("moe", EP2, EP4),
    ("moe", EP4, EP2_ZERO),
    ("moe", EP2_ZERO, EP2_TP2),
    ("moe bias", EP2_TP2, EP2_PP2),
    ("moe bias", EP2_PP2, ONE),
    ("moe", Split("distributed", pipeline=4), Split("plain", pipeline=4)),
    ("mla moe", ZERO3, EP2_PP2),
    ("mla", TP2, PP2),
    ("mtp", PP2, ZERO2),
    ("gpt3", FSDP2, MEGATRON_PLAIN),
    ("gpt3", ZERO3, FSDP2),
    ("gpt3", FSDP2_TP2, Split("fsdp2", data=4)),
    ("llama tied", PP2, FSDP2_TP2),
    ("moe", FSDP2, EP2),
    ("moe", EP4, FSDP2),
    ("mtp", FSDP2, PP2),
    ("t5", ZERO1, TP4),
    ("t5", ZERO3, MEGATRON),
    ("t5", MEGATRON_PLAIN, TP2),
    # No optimizer has the gains, and DeepSpeed's own accessors know nothing of a parameter without one.
    ("llama, frozen-gains", ZERO1, ZERO3),
    ("llama, frozen-gains", ZERO3, MEGATRON),
    ("llama, frozen-gains", MEGATRON, FSDP2),
]
QUICK = [("gpt3", ZERO1, MEGATRON), ("llama, frozen-gains", ZERO1, ZERO3)]


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    @cache
    def run(model: str) -> list[float]:
        config = config_of(model)
        prepare(config)
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]["losses"]

    return run


def go(ranks: Ranks, folder: Path, model: str, before: Split, after: Split, **settings: Any) -> list[list[float]]:
    first, second = config_of(model, before), config_of(model, after, **settings.pop("overrides", {}))
    saved = ranks.run(before.processes, bodies.leg, config=first, start_at=0, stop_at=STOP, save=str(folder))
    gone_on = ranks.run(
        after.processes, bodies.leg, config=second, start_at=STOP, stop_at=STEPS, load=str(folder), **settings
    )
    return [saved[0]["losses"] + result["losses"] for result in gone_on]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param(*pair, id=f"{pair[0]}: {pair[1]} to {pair[2]}", marks=() if pair in QUICK else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_another_layout_goes_on(
    ranks: Ranks, reference: Any, tmp_path: Path, model: str, before: Split, after: Split
) -> None:
    expected = reference(model)
    for losses in go(ranks, tmp_path, model, before, after):
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


def test_pieces_of_gate_and_up_lie_where_the_whole_has_them() -> None:
    """Of 8 rows, the gate's 4 and then up's 4, two ranks hold half of each: 0, 1, 4, 5 and 2, 3, 6, 7."""
    layout = resolve_layout(config_of("llama tied", MEGATRON_PLAIN), 2)
    spec = TensorSpec(shape=(8, 3), fan_in=1, fan_out=0, init=Init.WEIGHT, partition_dim=0, partition_stride=2)
    whole, found = torch.arange(24.0).view(8, 3), torch.zeros(8, 3)
    for rank, rows in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        for _, piece in _shards("weight.fc1", whole[rows], spec, layout, rank):
            first = piece.global_offset[0]
            found[first : first + len(piece.data)] = piece.data
    assert torch.equal(found, whole)


@pytest.mark.slow
@pytest.mark.parametrize("split", [PP2, Split("plain", pipeline=2)], ids=str)
def test_both_copies_of_a_tied_embedding_go_on(ranks: Ranks, tmp_path: Path, split: Split) -> None:
    """With multi-token prediction the last stage holds two, under one name: the head, and what it embeds by."""
    config = config_of("mtp", split, model__share_embeddings_and_output_weights=True)
    prepare(config)
    expected = ranks.run(split.processes, bodies.train, config=config, steps=STEPS)[0]["losses"]
    ranks.run(split.processes, bodies.leg, config=config, start_at=0, stop_at=STOP, save=str(tmp_path))
    gone_on = ranks.run(split.processes, bodies.leg, config=config, start_at=STOP, stop_at=STEPS, load=str(tmp_path))
    np.testing.assert_allclose(gone_on[0]["losses"], expected[STOP:], rtol=TOLERANCE)


def test_there_are_pairs_enough() -> None:
    assert len(set(PAIRS)) >= 12
    assert set(QUICK) <= set(PAIRS)


@pytest.mark.parametrize("broken", ["load_weights_alone", "slices_swapped"])
def test_without_it_the_curve_is_another(ranks: Ranks, reference: Any, tmp_path: Path, broken: str) -> None:
    """Negative controls: the optimizer's state left out; tensor-parallel slices written under each other's offsets."""
    expected = reference("gpt3")
    losses = go(ranks, tmp_path, "gpt3", ONE, Split(0, tensor=2), broken=broken)[0]
    assert np.max(np.abs(np.array(losses) / expected - 1)) > 10 * TOLERANCE


@pytest.mark.slow
def test_rows_of_another_rank_show(ranks: Ranks, reference: Any, tmp_path: Path) -> None:
    """Negative control: loss 5 depends on the weights that were loaded, of which each rank took the first rows."""
    expected = reference("gpt3")
    losses = go(ranks, tmp_path, "gpt3", ONE, FSDP2, broken="fsdp2_first_rows")[0]
    np.testing.assert_allclose(losses[:STOP], expected[:STOP], rtol=TOLERANCE)
    assert abs(losses[STOP] / expected[STOP] - 1) > 10 * TOLERANCE


@pytest.mark.slow
def test_another_peak_rate_loads(ranks: Ranks, tmp_path: Path) -> None:
    """Groups are known by their rule: with the rate doubled on the way, the state is the same and the rates follow."""
    config = config_of("gpt3", MEGATRON)
    prepare(config)
    ranks.run(2, bodies.leg, config=config, start_at=0, stop_at=STOP, save=str(tmp_path))
    faster = config_of("gpt3", MEGATRON, hparams__lr=6e-3)
    legs = [
        ranks.run(2, bodies.leg, config=c, start_at=STOP, stop_at=STOP + 2, load=str(tmp_path))[0]
        for c in (config, faster)
    ]
    assert legs[0]["losses"][0] == legs[1]["losses"][0]
    assert legs[0]["losses"][1] != legs[1]["losses"][1]
    np.testing.assert_allclose(np.array(legs[1]["rates"]), 2 * np.array(legs[0]["rates"]), rtol=1e-12)


@pytest.mark.parametrize(
    "patch",
    [patch.name for patch in ALL_PATCHES if "checkpoint" in patch.name and patch.is_needed(cuda=False)],
)
def test_without_the_patch_nothing_is_saved(ranks: Ranks, tmp_path: Path, patch: str) -> None:
    """Ranks of the pool may not start processes, and there is no CUDA to wait for."""
    config = config_of("gpt3", Split("plain"))
    prepare(config)
    with pytest.raises(RankError):
        ranks.run(1, bodies.leg, config=config, start_at=0, stop_at=1, save=str(tmp_path), broken=f"patch:{patch}")
