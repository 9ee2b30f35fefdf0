"""`mup-megatron run` with latent experts, sparse attention, and multi-token prediction on a stage of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.model.as_built import attach
from tests.helpers import megatron_runs
from tests.helpers.breakages import break_
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.installed import needs_training
from tests.model.as_built.own_layers import LATENT

pytestmark = needs_training
BASE = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"
# A quarter of every size; the head size stays.
QUARTER = "hidden_size: 16\nnum_attention_heads: 1\nffn_hidden_size: 32\n"
# What upstream builds of Transformer Engine's layers, over layers that run on a CPU.
EXPERTS = (
    "--num-experts 4 --disable-bias-linear --moe-latent-size 32 --spec tests.model.as_built.own_layers latent_experts"
)
SPARSE = (
    "--experimental-attention-variant dsa --disable-bias-linear --multi-latent-attention --q-lora-rank 24 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope "
    "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 --dsa-indexer-topk 4 --dsa-indexer-loss-coeff 0.1 "
    "--no-dsa-indexer-rotate-activation --spec tests.model.as_built.own_layers sparse_attention"
)
INDEXER = ("--mup-tensors", "standard:dsa-indexer")
AHEAD = "--mtp-num-layers 1 --position-embedding-type rope"


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> list[dict[str, Any]]:
    return megatron_runs.run(ranks, folder, *extra, **{"base": BASE, "train_iters": 3, "clip_grad": 0, **changed})


def entries(folder: Path) -> tuple[str, str]:
    (folder / "tensors.yaml").write_text(LATENT)
    return "--mup-tensors", str(folder / "tensors.yaml")


def rates(found: dict[str, Any]) -> dict[str, float]:
    assert found["status"] == 0, found["said"]
    return {name: group["max_lr"] for name, group in found["groups"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["latent", "sparse"])
def test_at_the_base_it_is_the_plain_run(variant: str, ranks: Ranks, tmp_path: Path) -> None:
    """From the same weights the same losses and weights, to the last bit; every tensor moves."""
    words = (EXPERTS if variant == "latent" else SPARSE).split()
    own = entries(tmp_path) if variant == "latent" else INDEXER
    (ours,) = run(ranks, tmp_path, *words, *own)
    assert ours["status"] == 0, ours["said"]
    (plain,) = run(ranks, tmp_path, *words, plainly=True, initial=ours["initial"])
    megatron_runs.assert_same(ours, plain, steps=3)
    megatron_runs.assert_moved(ours)


def test_rates_around_a_latent(ranks: Ranks, tmp_path: Path) -> None:
    """By hand: hidden 16 to 64, the latent 16 to 32. A latent that the base does not name is fixed."""
    own = entries(tmp_path)
    (wide,) = run(ranks, tmp_path, *EXPERTS.split(), *own, base=QUARTER + "moe_latent_size: 16\n", train_iters=2)
    found, moe = rates(wide), "decoder.layers.1.mlp."
    expected = {
        "router.weight": (4, 0.05 / 4),
        "fc1_latent_proj.weight": (4, 0.05 / 2),
        "fc2_latent_proj.weight": (2, 0.05 / 2 / 2**0.5),  # one of two layers' output: 0.05 / sqrt(2 · 2)
        "experts.local_experts.3.linear_fc1.weight": (2, 0.05 / 2**0.5),
        "experts.local_experts.3.linear_fc2.weight": (4, 0.05 / 2 / 2),
    }
    for name, (growth, std) in expected.items():
        assert found[moe + name] == pytest.approx(1e-2 / growth), name
        assert wide["initial"][moe + name].std() == pytest.approx(std, rel=0.15), name
    assert np.isfinite(wide["steps"]).all()


@pytest.mark.slow
def test_a_fixed_latent(ranks: Ranks, tmp_path: Path) -> None:
    (wide,) = run(ranks, tmp_path, *EXPERTS.split(), *entries(tmp_path), base=QUARTER)
    found, moe = rates(wide), "decoder.layers.0.mlp."
    assert found[moe + "fc1_latent_proj.weight"] == pytest.approx(1e-2 / 4)
    assert found[moe + "fc2_latent_proj.weight"] == 1e-2
    assert found[moe + "experts.local_experts.0.linear_fc1.weight"] == 1e-2
    assert wide["groups"][moe + "fc1_latent_proj.weight"]["eps"] == 1e-8  # a fan-out that does not grow
    assert wide["groups"][moe + "fc2_latent_proj.weight"]["eps"] == pytest.approx(1e-8 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_latent_experts_on_two_ranks(sizes: dict[str, int], ranks: Ranks, tmp_path: Path) -> None:
    common: dict[str, Any] = {"base": QUARTER + "moe_latent_size: 16\n", "global_batch_size": 4}
    own = entries(tmp_path)
    (one,) = run(ranks, tmp_path, *EXPERTS.split(), *own, **common)
    two = run(ranks, tmp_path, *EXPERTS.split(), *own, count=2, **common, **sizes)
    assert [one["status"], *(rank["status"] for rank in two)] == [0, 0, 0], two[0]["said"]
    logged = max((rank["losses"] for rank in two), key=len)
    assert logged == pytest.approx(one["losses"], rel=1e-5)
    assert len(logged) == 3


def test_sparse_attention_from_a_quarter_of_the_width(ranks: Ranks, tmp_path: Path) -> None:
    """By hand: ranks and heads' sizes fixed, 1 head to 4. The indexer keeps the base's rates, and is named."""
    (wide,) = run(ranks, tmp_path, *SPARSE.split(), *INDEXER, base=QUARTER, train_iters=2)
    found, layer = rates(wide), "decoder.layers.1.self_attention."
    reads_hidden = {"linear_q_down_proj", "linear_kv_down_proj", "linear_proj"}
    for name in reads_hidden:
        assert found[f"{layer}{name}.weight"] == pytest.approx(1e-2 / 4), name
    indexer = {name for name in found if ".indexer." in name}
    assert len(indexer) == 2 * 5
    assert {found[name] for name in indexer} == {1e-2}
    assert "in the standard parametrization, with the base's rates at every width" in wide["said"]
    assert "indexer.linear_weights_proj.weight" in wide["said"]
    assert np.isfinite(wide["steps"]).all()


@pytest.mark.slow
def test_the_softmax_scale_of_sparse_attention(ranks: Ranks, tmp_path: Path) -> None:
    """It is the rules', with a multiplier of 2 too; where the class is not known, start-up stops."""
    (tmp_path / "mup.yaml").write_text("hparams: {attention_multiplier: 2.0}\n")
    words = (*SPARSE.split(), *INDEXER, "--mup-config", str(tmp_path / "mup.yaml"))
    (doubled,) = run(ranks, tmp_path, *words)
    (single,) = run(ranks, tmp_path, *SPARSE.split(), *INDEXER)
    assert doubled["status"] == single["status"] == 0, doubled["said"]
    assert doubled["steps"] != single["steps"]
    (unknown,) = ranks.run(1, _without_the_class, words=megatron_runs.words(tmp_path, *words, base=BASE))
    assert unknown["status"] == 2
    assert "core_attention: DSAttention has the softmax scale 0.25, the rules say 0.5" in unknown["said"]


def _without_the_class(rank: Any, *, words: list[str]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attach, "_latent_attention", lambda: (attach.MultiLatentAttention,))
        return megatron_runs.train(rank, words=words)


@pytest.mark.slow
def test_an_indexer_without_entries_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = run(ranks, tmp_path, *SPARSE.split())
    assert found["status"] == 2
    assert (
        "no rule of µP is tested for the tensors of DSAIndexer; expected --mup-tensors standard:dsa-indexer"
        in (found["said"])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "count"), [("Ettm|L", 2), ("Ett|mL", 2), ("Ett|m|L", 3)])
@pytest.mark.parametrize("head", ["", "--untie-embeddings-and-output-weights"])
def test_prediction_on_a_stage_of_its_own(head: str, layout: str, count: int, ranks: Ranks, tmp_path: Path) -> None:
    """Beside the head, before it, and alone: one rank's weights after a step of SGD, and its losses.

    The script names the ranks that hold embeddings, as upstream's does; megatron-core alone would leave out the stage
    of the prediction, whose copy of the embedding then drifts away.
    """
    words = [*AHEAD.split(), *head.split(), "--optimizer", "sgd"]
    common: dict[str, Any] = {"base": QUARTER, "global_batch_size": 4, "sgd_momentum": 0, "lr": 0.1}
    (one,) = run(ranks, tmp_path, *words, **common)
    placed = ("--pipeline-model-parallel-layout", layout)
    several = run(ranks, tmp_path, *words, *placed, count=count, pipeline_model_parallel_size=count, **common)
    assert [one["status"], *(rank["status"] for rank in several)] == [0] * (count + 1), several[0]["said"]
    assert several[-1]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert len(one["losses"]) == 3
    assert any(name.startswith("mtp.") for rank in several for name in rank["final"])
    embedding = "embedding.word_embeddings.weight"
    for rank in several:
        for name, value in rank["final"].items():
            if name == "output_layer.weight" and not head and embedding in rank["final"]:
                continue  # the embedding's copy on this stage is the head, and upstream's own weight is not read
            same = name if name in one["final"] else embedding  # of a tied head
            np.testing.assert_allclose(value, one["final"][same], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_without_its_patch_a_stage_of_prediction_does_not_run(ranks: Ranks, tmp_path: Path) -> None:
    """Negative control of cpu-pipeline-shapes: the stages wait for CUDA, which is not there."""
    common: dict[str, Any] = {"base": QUARTER, "global_batch_size": 4, "pipeline_model_parallel_size": 2}
    words = [*AHEAD.split(), "--pipeline-model-parallel-layout", "Ettm|L"]
    said = megatron_runs.words(tmp_path, *words, train_iters=1, clip_grad=0, **common)
    with pytest.raises(RankError, match=r"(?i)cuda"):
        ranks.run(2, _without_the_patch, words=said)


def _without_the_patch(rank: Any, *, words: list[str]) -> dict[str, Any]:
    with break_("patch:cpu-pipeline-shapes"):
        return megatron_runs.train(rank, words=words)
