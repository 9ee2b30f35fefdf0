"""Muon under `mup-megatron run`: upstream's own run at the base, rates by hand elsewhere, no layout in the losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mup_megatron.engines.setup.megatron import emerging_missing
from tests.helpers import megatron_runs
from tests.helpers.breakages import break_
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.installed import needs_training

pytestmark = [
    needs_training,
    pytest.mark.skipif(emerging_missing("muon") is not None, reason=str(emerging_missing("muon"))),
]
# Rotary: learned positions are Muon's in plain megatron-core, and Adam's here.
MUON = ("--optimizer", "muon", "--position-embedding-type", "rope", "--muon-fp32-matmul-prec", "high")
SAME = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"
HALF = "hidden_size: 32\nnum_attention_heads: 2\nffn_hidden_size: 128\n"
EXPERTS = ("--num-experts", "4", "--disable-bias-linear", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32")


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> dict[str, Any]:
    """The last rank's, which logs the losses."""
    own = {"train_iters": 4, "global_batch_size": 4, **changed}
    return megatron_runs.run(ranks, folder, *MUON, *extra, **own)[-1]


@pytest.mark.slow
def test_at_the_base_it_is_the_plain_run(ranks: Ranks, tmp_path: Path) -> None:
    """From the same weights the same losses and weights after four steps, to the last bit."""
    ours = run(ranks, tmp_path, base=SAME, clip_grad=0)
    assert ours["status"] == 0, ours["said"]
    plain = run(ranks, tmp_path, base=SAME, clip_grad=0, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=8)


def test_rates_from_half_the_width(ranks: Ranks, tmp_path: Path) -> None:
    """(m_out/m_in)^1/2 over the growth of sqrt(larger side), which megatron-core's spectral mode multiplies with.

    Of fc1 (128 x 64 from 128 x 32) m_in = 2 and nothing else grows; of fc2 m_out = 2; of the projection (64 x 64 from
    32 x 32) both are 2, and so is the larger side. Word embedding and norm's gain are Adam's, and keep their rate.
    """
    found = run(ranks, tmp_path, base=HALF)
    assert found["status"] == 0, found["said"]
    assert re.search(r"^mup-megatron: audit: (\d+) tensors, \1 right; .* right$", found["printed"], re.M)  # all seen
    expected = {
        "decoder.layers.0.mlp.linear_fc1.weight": 2**-0.5,
        "decoder.layers.0.mlp.linear_fc2.weight": 2**0.5,
        "decoder.layers.0.self_attention.linear_proj.weight": 2**-0.5,
        "embedding.word_embeddings.weight": 1.0,
        "decoder.final_layernorm.weight": 1.0,
    }
    assert {name: found["groups"][name]["max_lr"] for name in expected} == pytest.approx(
        {name: 1e-2 * rate for name, rate in expected.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        # As many rows of the vocabulary as one process has.
        "--tensor-model-parallel-size 2 --muon-tp-mode duplicated --make-vocab-size-divisible-by 64",
        "--pipeline-model-parallel-size 2",
        "--expert-model-parallel-size 2",
    ],
)
def test_no_layout_is_in_the_losses(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks train as one does: tensor, pipeline and expert parallel."""
    model = EXPERTS if "expert" in layout else ()
    whole = run(ranks, tmp_path, *model, base=HALF)
    assert whole["status"] == 0, whole["said"]
    assert whole["losses"][0] - whole["losses"][-1] > 0.05
    ranks.run(2, megatron_runs.warm)
    split = run(ranks, tmp_path, *model, *layout.split(), base=HALF, count=2)
    assert split["status"] == 0, split["said"]
    assert split["losses"] == pytest.approx(whole["losses"], rel=2e-5)
    for name, group in split["ended"].items():
        name = name.replace("output_layer", "embedding.word_embeddings")  # tied, and the last stage's copy
        assert group["lr"] == pytest.approx(whole["ended"][name]["lr"], rel=1e-12), name


SHARED = ("--bf16", "--use-distributed-optimizer")


def without(rank: Any, *, words: list[str], broken: str) -> dict[str, Any]:
    with break_(broken):
        return megatron_runs.train(rank, words=words)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2 --muon-tp-mode duplicated", "--num-experts"])
def test_ranks_that_share_the_steps_train_as_those_that_do_not(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """Upstream's layer-wise optimizer, in bf16: 20 losses to the last bit; negative control: nobody hears of the steps.

    Not clipped, since the norm is summed in another order. Each matrix is stepped by one data-parallel rank.
    """
    count = 4 if "tensor" in layout else 2
    words = EXPERTS if "experts" in layout else tuple(layout.split())
    ranks.run(count, megatron_runs.warm)
    settings: dict[str, Any] = {"base": HALF, "clip_grad": 0, "train_iters": 20, "count": count}
    each = run(ranks, tmp_path, "--bf16", *words, **settings)
    assert each["status"] == 0, each["said"]
    assert each["losses"][0] - each["losses"][-1] > 0.5
    assert run(ranks, tmp_path, *SHARED, *words, **settings)["losses"] == each["losses"]
    said = megatron_runs.words(
        tmp_path, *MUON, *SHARED, *words, base=HALF, clip_grad=0, train_iters=4, global_batch_size=4
    )
    alone = ranks.run(count, without, words=said, broken="layer_wise_steps_stay")[-1]["losses"]
    assert [one == other for one, other in zip(alone, each["losses"], strict=False)] == [True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "why"),
    [("norm", r"(?i)cuda"), ("norm-group", r"(?i)cuda"), ("gather", "invalid tensor size")],
)
def test_without_its_patches_ranks_cannot_share_them(patch: str, why: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, megatron_runs.warm)
    said = megatron_runs.words(tmp_path, *MUON, *SHARED, base=HALF, train_iters=1, global_batch_size=4)
    with pytest.raises(RankError, match=why):
        ranks.run(2, without, words=said, broken=f"patch:cpu-layer-wise-{patch}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--muon-scale-mode unit_rms_norm", "--muon-scale-mode unit_rms_norm: not under µP here (Muon's rates are"),
        ("--muon-scalar-optimizer lion", "--muon-scalar-optimizer lion: not under µP here"),
        ("--muon-no-split-qkv", "--muon-no-split-qkv: not under µP here"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer: Muon's layer-wise optimizer steps in bf16"),
        ("--optimizer dist_muon", "--optimizer dist_muon: Muon's layer-wise optimizer steps in bf16 alone"),
        (
            "--optimizer soap",
            "--optimizer soap: not under µP here (no rule for it is built and tested here; SOAP has one",
        ),
    ],
)
def test_refused(words: str, said: str, ranks: Ranks, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, *words.split(), base=HALF)
    assert found["status"] == 2
    assert said in found["said"]


def test_slices_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Upstream's default under tensor parallelism orthogonalises each rank's slice."""
    ranks.run(2, megatron_runs.warm)
    found = run(ranks, tmp_path, "--tensor-model-parallel-size", "2", base=HALF, count=2)
    assert found["status"] == 2
    assert "--muon-tp-mode blockwise: each tensor-parallel rank would orthogonalise its slice" in found["said"]
