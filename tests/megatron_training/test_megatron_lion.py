"""`mup-megatron run` with `--optimizer lion`: upstream's own at the base, and Adam's rates elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.engines.setup.megatron import emerging_missing
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = [
    needs_training,
    pytest.mark.skipif(emerging_missing("lion") is not None, reason=str(emerging_missing("lion"))),
]
# Rotary: learned positions are Lion's in plain megatron-core, and Adam's here.
LION = ("--optimizer", "lion", "--position-embedding-type", "rope")
SAME = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"
HALF = "hidden_size: 32\nnum_attention_heads: 2\nffn_hidden_size: 128\n"


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> dict[str, Any]:
    """The last rank's, which logs the losses."""
    own = {"train_iters": 4, "global_batch_size": 4, "lr": 2e-3, **changed}
    return megatron_runs.run(ranks, folder, *LION, *extra, **own)[-1]


@pytest.mark.slow
def test_at_the_base_it_is_the_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    """From the same weights the same losses and weights after four steps, to the last bit."""
    ours = run(ranks, tmp_path, base=SAME, clip_grad=0)
    assert ours["status"] == 0, ours["said"]
    plain = run(ranks, tmp_path, base=SAME, clip_grad=0, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=8)


def test_rates_from_half_the_width(ranks: Ranks, tmp_path: Path) -> None:
    """1/m_in, as under Adam; lr times decay stays, and no group has an epsilon of the rule's."""
    found = run(ranks, tmp_path, base=HALF)
    assert found["status"] == 0, found["said"]
    layer = "decoder.layers.0."
    expected = {
        f"{layer}mlp.linear_fc1.weight": 1e-3,
        f"{layer}mlp.linear_fc2.weight": 2e-3,
        f"{layer}self_attention.linear_qkv.weight": 1e-3,
        f"{layer}self_attention.linear_proj.weight": 1e-3,
        "embedding.word_embeddings.weight": 2e-3,
        "decoder.final_layernorm.weight": 2e-3,
    }
    assert {name: found["groups"][name]["max_lr"] for name in expected} == expected
    decays = {name: found["groups"][name]["wd_mult"] for name in expected}
    assert decays == dict(zip(expected, (2, 1, 2, 2, 1, 0), strict=True))
    assert ["eps" in found["groups"][name] for name in expected] == [False] * 4 + [True] * 2  # AdamW steps the rest
    # A sign: after one step a coordinate has moved by its rate.
    one = run(ranks, tmp_path, "--weight-decay", "0", base=HALF, train_iters=1, clip_grad=0)
    for name in (f"{layer}mlp.linear_fc1.weight", f"{layer}mlp.linear_fc2.weight"):
        moved = np.abs(one["final"][name] - one["initial"][name])
        assert np.median(moved) == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        # As many rows of the vocabulary as one process has.
        "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64",
        "--pipeline-model-parallel-size 2",
    ],
)
def test_no_layout_is_in_the_losses(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, tmp_path, base=HALF)
    assert whole["losses"][0] - whole["losses"][-1] > 0.05
    ranks.run(2, megatron_runs.warm)
    split = run(ranks, tmp_path, *layout.split(), base=HALF, count=2)
    assert split["status"] == 0, split["said"]
    assert split["losses"] == pytest.approx(whole["losses"], rel=2e-5)


def test_refused(ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, "--use-distributed-optimizer", base=HALF)
    assert found["status"] == 2
    assert (
        "--use-distributed-optimizer: megatron-core's layer-wise optimizer is tested with Muon alone" in found["said"]
    )
