"""`mup-megatron run` where data-parallel ranks share the parameters (torch FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training

pytestmark = needs_training
SAME = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"
HALF = "hidden_size: 32\nnum_attention_heads: 2\n"
# Upstream's: under FSDP2 the head has a weight of its own.
UNTIED = "--untie-embeddings-and-output-weights"
LAYER = "decoder.layers.0."


def run(ranks: Ranks, folder: Path, *extra: str, count: int = 2, **changed: Any) -> dict[str, Any]:
    """The last rank's, which logs the losses."""
    own = {"train_iters": 3, "global_batch_size": 4, "base": HALF, **changed}
    return megatron_runs.run(ranks, folder, *extra, count=count, **own)[-1]


@pytest.fixture(scope="module")
def two(ranks: Ranks) -> Ranks:
    ranks.run(2, megatron_runs.warm)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--num-experts 4 --disable-bias-linear", "--bf16", "--data-parallel-random-init"])
def test_fsdp2_is_one_process(more: str, two: Ranks, tmp_path: Path) -> None:
    """The same initial values and rates for every tensor, and the losses of one process that shards nothing."""
    whole = run(two, tmp_path, UNTIED, *more.split(), count=1)
    assert whole["status"] == 0, whole["said"]
    split = run(two, tmp_path, UNTIED, "--use-torch-fsdp2", *more.split())
    assert split["status"] == 0, split["said"]
    assert list(split["initial"]) == list(whole["initial"])
    for name, value in whole["initial"].items():
        assert np.array_equal(split["initial"][name], value), name
    keys = ("max_lr", "min_lr", "eps", "wd_mult", "rule")
    for name, group in whole["groups"].items():
        assert [split["groups"][name].get(key) for key in keys] == [group.get(key) for key in keys], name
    # By hand: from half the width a matrix that reads hidden vectors has half the rate, and decays twice as much.
    if more != "--bf16":  # where the optimizer holds copies in fp32, which have no names here
        group = split["groups"][f"{LAYER}self_attention.linear_qkv.weight"]
        assert (group["max_lr"], group["wd_mult"]) == (5e-3, 2.0)
    assert len(split["losses"]) == 3
    assert split["losses"] == pytest.approx(whole["losses"], rel=2e-3 if "bf16" in more else 2e-5)


@pytest.mark.slow
def test_fsdp2_at_the_base_is_plain_fsdp2(two: Ranks, tmp_path: Path) -> None:
    """From the same weights the same losses and weights after three steps, to the last bit.

    Without clipping: megatron-core sums the norm group by group, and groups in µP stand in another order.
    """
    ours = run(two, tmp_path, UNTIED, "--use-torch-fsdp2", base=SAME, clip_grad=0)
    assert ours["status"] == 0, ours["said"]
    plain = run(
        two, tmp_path, UNTIED, "--use-torch-fsdp2", base=SAME, clip_grad=0, plainly=True, initial=ours["initial"]
    )
    megatron_runs.assert_same(ours, plain, steps=3)
    megatron_runs.assert_moved(ours)


@pytest.mark.slow
def test_fsdp2_goes_on(two: Ranks, tmp_path: Path) -> None:
    """With its weights; the optimizer's state upstream loads with Transformer Engine's or Apex's Adam alone."""
    saved = str(tmp_path / "saved")
    words = (UNTIED, "--use-torch-fsdp2", "--ckpt-format", "torch_dist")
    whole = run(two, tmp_path, *words, "--save", saved, "--load", saved, "--save-interval", "2")
    assert whole["status"] == 0, whole["said"]
    assert (tmp_path / "saved" / "iter_0000002" / "mup.json").is_file()
    loads = (*words, "--load", saved, "--ckpt-step", "2")
    refused = run(two, tmp_path, *loads)
    assert refused["status"] == 2
    assert (
        "--load with --use-torch-fsdp2: megatron-core cannot go on with the state of torch's AdamW" in refused["said"]
    )
    rest = run(two, tmp_path, *loads, "--no-load-optim")
    assert rest["status"] == 0, rest["said"]
    assert rest["losses"] == whole["losses"][2:]
