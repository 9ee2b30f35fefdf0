"""Options that change what a layer computes: at the base the plain run to the last bit, elsewhere the rules by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mup_megatron.model.build import parametrize
from mup_megatron.parallel import upstream
from mup_megatron.parallel.layout import Layout
from mup_megatron.util.errors import UserError
from tests.helpers import megatron_runs
from tests.helpers.distributed import Ranks
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_elsewhere import elsewhere
from tests.megatron_training.test_megatron_translation import VOCABULARY, table, translated

pytestmark = needs_training
EXPERTS = "--num-experts 4 --disable-bias-linear"
# The base is the model itself, so that every ratio is 1.
BASE = "hidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 128\n"

FEATURES = {
    "quick-geglu": "--quick-geglu",
    "clamped": "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 0.05",
    "no-balancing": f"{EXPERTS} --moe-router-load-balancing-type none",
    "two-losses": f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
    "sinkhorn": f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    "rope-scaling": "--use-rope-scaling --position-embedding-type rope",
    "yarn": "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8",
    "off-by-one": "--softmax-type off-by-one",
    "learnable": "--softmax-type learnable",
    "gate": "--attention-output-gate --group-query-attention --num-query-groups 2",
    "l2-norm": f"--qk-l2-norm {EXPERTS}",
    "fp16": "--fp16 --initial-loss-scale 1024 --apply-query-key-layer-scaling --attention-softmax-in-fp32",
    "warm-up": "--lr-warmup-init 2e-3 --lr-warmup-iters 2 --lr-decay-style linear --lr-decay-iters 4",
    "rising-decay": "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 2.0",
    "probs-on-input": f"{EXPERTS} --moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    "decayed-qk-norms": "--qk-layernorm --apply-wd-to-qk-layernorm",
    "residual-behind-norm": "--apply-residual-connection-post-layernorm",
    "detached-heads": "--mtp-num-layers 1 --mtp-detach-heads --position-embedding-type rope",
    "routing-replay": f"{EXPERTS} --moe-enable-routing-replay",
    "interleaved-halves": f"{EXPERTS} --swiglu --moe-mlp-glu-interleave-size 16",
    "random-replicas": "--data-parallel-random-init",
    "decoupled": "--decoupled-lr 3e-3 --decoupled-min-lr 1e-3 --lr-decay-style linear --lr-decay-iters 3",
}


def run(ranks: Ranks, folder: Path, *extra: str, **changed: Any) -> dict[str, Any]:
    own = {"base": BASE, "train_iters": 3, "clip_grad": 0, **changed}
    return megatron_runs.run(ranks, folder, *extra, **own)[0]


QUICK = ("learnable",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
def test_at_the_base_it_is_the_plain_run(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """From the same weights the same losses and the same weights after three steps, to the last bit."""
    words = FEATURES[name].split()
    ours = run(ranks, tmp_path, *words, dropout_seed=1)
    assert ours["status"] == 0, ours["said"]
    plain = run(ranks, tmp_path, *words, plainly=True, initial=ours["initial"], dropout_seed=1)
    megatron_runs.assert_same(ours, plain, steps=3)
    megatron_runs.assert_moved(ours)


@pytest.mark.slow
def test_rotary_positions_of_latent_attention(ranks: Ranks, tmp_path: Path) -> None:
    """Base and share of the rotary positions are those that are typed, in the model and in the checkpoint's record."""
    latent = (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 8 --position-embedding-type rope --rope-type rope"
    )
    saves = f"--save {tmp_path / 'saved'} --save-interval 3"
    usual, typed = (
        run(ranks, tmp_path, *f"{latent} {more}".split())
        for more in ("", f"--rotary-base 100 --rotary-percent 0.5 {saves}")
    )
    assert usual["status"] == typed["status"] == 0, typed["said"]
    assert usual["steps"][0] != typed["steps"][0]
    for tensor, value in usual["initial"].items():
        assert np.array_equal(typed["initial"][tensor], value), tensor
    record = json.loads((tmp_path / "saved" / "iter_0000003" / "mup.json").read_text())["config"]["model"]
    assert (record["rotary_base"], record["rotary_percent"]) == (100, 0.5)


def test_a_decay_that_rises_keeps_its_multipliers(ranks: Ranks, tmp_path: Path) -> None:
    """From half the width: a hidden matrix decays twice as much as Megatron's schedule says, the embedding as it says.

    Linear from 0.1 to 0.4 over three steps, of which the last takes what two thirds of the way give.
    """
    words = ("--weight-decay-incr-style", "linear", "--start-weight-decay", "0.1", "--end-weight-decay", "0.4")
    found = run(ranks, tmp_path, *words, base="hidden_size: 32\nnum_attention_heads: 4\nffn_hidden_size: 128\n")
    assert found["status"] == 0, found["said"]
    decays = {name: group["weight_decay"] for name, group in found["ended"].items()}
    assert decays["decoder.layers.0.self_attention.linear_qkv.weight"] == pytest.approx(2 * 0.4)
    assert decays["decoder.layers.0.mlp.linear_fc2.weight"] == pytest.approx(0.4)
    assert decays["decoder.layers.0.mlp.linear_fc1.bias"] == 0


@pytest.mark.parametrize(
    "option", ["--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type apply_wd_to_qk_layernorm", ""]
)
def test_decay_of_qk_norms(option: str, tmp_path: Path) -> None:
    """Gains and biases of the norms of queries and keys decay at the base's rate, and no other vector does."""
    config, parametrization, *_ = elsewhere(
        f"--qk-layernorm --weight-decay 0.3 --hidden-size 128 --num-attention-heads 4 {option}",
        tmp_path,
        {"hidden_size": 64, "num_attention_heads": 2},
    )
    decays = {
        name: tensor.weight_decay for name, tensor in parametrization.tensors.items() if len(tensor.shape.infshape) == 1
    }
    of_norms = {name for name in decays if name.rpartition(".")[0].endswith(("q_layernorm", "k_layernorm"))}
    assert len(of_norms) == 2 * 2 * config.model.num_layers
    assert {decays[name] for name in of_norms} == ({0.3} if option else {0.0})
    assert {decay for name, decay in decays.items() if name not in of_norms} == {0.0}


def test_no_depth_rule_behind_a_norm(tmp_path: Path) -> None:
    words = "--apply-residual-connection-post-layernorm --hidden-size 128 --num-attention-heads 4"
    elsewhere(words, tmp_path, {"hidden_size": 64})
    (tmp_path / "mup.yaml").write_text("parametrization: {depth: completep}")
    base = {"hidden_size": 64, "num_layers": 1}
    with pytest.raises(UserError, match=r"^--apply-residual-connection-post-layernorm: no depth rule is known"):
        elsewhere(f"{words} --mup-config {tmp_path}/mup.yaml", tmp_path, base)


def test_no_unit_scale(tmp_path: Path) -> None:
    words = "--hidden-size 128 --num-attention-heads 4"
    elsewhere(words, tmp_path, {"hidden_size": 64})
    (tmp_path / "mup.yaml").write_text("parametrization: {scaling: unit}")
    with pytest.raises(UserError, match=r"^parametrization\.scaling: unit is not known of a model that a script or"):
        elsewhere(f"{words} --mup-config {tmp_path}/mup.yaml", tmp_path, {"hidden_size": 64})


# Hidden 64 to 128, heads 2 to 4 of size 32, two query groups in both; FFN 64 to 192. The base's init std is 0.05.
GROWN = "--hidden-size 128 --num-attention-heads 4 --kv-channels 32 --group-query-attention --num-query-groups 2"
FROM = {"hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64}
ATTENTION = "decoder.layers.1.self_attention"


def rows(words: str, folder: Path) -> dict[str, Any]:
    upstream.prepare_process()
    config, *_ = translated(f"{GROWN} --ffn-hidden-size 192 {words}", FROM, folder)
    return table(parametrize(config, VOCABULARY))


def blocks(row: dict[str, Any]) -> dict[str, tuple[int, float, float]]:
    return {block["name"]: (block["fan_out"], block["m_out"], block["init_std"]) for block in row["blocks"]}


def test_rows_of_a_gate(tmp_path: Path) -> None:
    """Gates are as many rows as queries, and grow with them: init as 1/sqrt(m_in); fixed groups are output-like."""
    row = rows("--attention-output-gate", tmp_path)[f"{ATTENTION}.linear_qkv.weight"]
    assert row["global_shape"] == [2 * (2 * 32 + 2 * 32 + 32 + 32), 128]
    hidden, output = pytest.approx(0.05 / 2**0.5), pytest.approx(0.05 / 2)
    assert blocks(row) == {
        "query": (128, 2.0, hidden),
        "gate": (128, 2.0, hidden),
        "key": (64, 1.0, output),
        "value": (64, 1.0, output),
    }
    assert (row["lr_multiplier"], row["eps_multiplier"], row["weight_decay_multiplier"]) == (0.5, 0.5, 2.0)


def test_the_row_of_a_sink(tmp_path: Path) -> None:
    """A vector over heads: initial values and rate stay, epsilon falls as 1/m_out, nothing decays."""
    row = rows("--softmax-type learnable", tmp_path)[f"{ATTENTION}.core_attention.softmax_offset"]
    assert (row["global_shape"], row["base_shape"], row["init"], row["init_std"]) == ([4], [2], "normal", 0.05)
    assert (row["lr_multiplier"], row["eps_multiplier"], row["weight_decay"]) == (1.0, 0.5, 0.0)
    ungrouped = "--hidden-size 128 --num-attention-heads 4 --kv-channels 32 --ffn-hidden-size 192"
    config, *_ = translated(f"{ungrouped} --softmax-type learnable --optimizer sgd", FROM, tmp_path)
    descent = table(parametrize(config, VOCABULARY))[f"{ATTENTION}.core_attention.softmax_offset"]
    assert descent["lr_multiplier"] == 2.0


def test_rows_under_a_norm_without_gains(tmp_path: Path) -> None:
    """What goes into a norm keeps hidden-like init where its fan-out is fixed; values do not go into one."""
    found = rows("--qk-l2-norm --num-experts 2", tmp_path)[f"{ATTENTION}.linear_qkv.weight"]
    hidden, output = pytest.approx(0.05 / 2**0.5), pytest.approx(0.05 / 2)
    assert {name: std for name, (_, _, std) in blocks(found).items()} == {
        "query": hidden,
        "key": hidden,
        "value": output,
    }


def test_functions_without_weights_change_no_row(tmp_path: Path) -> None:
    plain = rows("--position-embedding-type rope --swiglu", tmp_path)
    for words in (
        "--position-embedding-type rope --use-rope-scaling --swiglu",
        "--position-embedding-type yarn --rotary-scaling-factor 8 --swiglu",
        "--position-embedding-type rope --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0",
        "--position-embedding-type rope --swiglu --softmax-type off-by-one",
    ):
        assert rows(words, tmp_path) == plain, words


def test_a_norm_that_upstream_leaves_out(ranks: Ranks, tmp_path: Path) -> None:
    """megatron-core 0.19 gives a dense local layer no L2 norm, whatever the option says."""
    said = "self_attention.q_layernorm is IdentityOp, and megatron-core's own for these options is L2Norm"
    built = run(ranks, tmp_path, "--qk-l2-norm")
    assert built["status"] == 0
    assert "no config says the script's layers" in built["said"]
    assert f"{said}\n" in built["said"]


def test_rates_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """Megatron's rate of embedding and head, moved by the rules; warm-up begins with each group's share of its rate.

    Hidden 32 to 64, so that fc1's rate is halved; the head is tied, and keeps its rate as the embedding does.
    """
    words = "--decoupled-lr 3e-3 --decoupled-min-lr 1e-3 --min-lr 1e-4 --lr-warmup-init 2e-3 --lr-warmup-iters 2"
    base = "hidden_size: 32\nnum_attention_heads: 2\n"
    found = run(ranks, tmp_path, *words.split(), "--lr-decay-style", "linear", "--lr-decay-iters", "3", base=base)
    assert found["status"] == 0, found["said"]
    groups = found["groups"]
    embedding = groups["embedding.word_embeddings.weight"]
    hidden = groups["decoder.layers.0.mlp.linear_fc1.weight"]
    assert (embedding["max_lr"], embedding["min_lr"], embedding["lr_multiplier"]) == (3e-3, 1e-3, 1.0)
    assert (hidden["max_lr"], hidden["lr_multiplier"]) == (5e-3, 0.5)
    assert hidden["min_lr"] == pytest.approx(5e-5, rel=1e-12)
    assert groups["embedding.position_embeddings.weight"]["max_lr"] == 1e-2
    assert embedding["lr"] == 2e-3
    assert hidden["lr"] == 1e-3


@pytest.mark.parametrize("pipeline_before_data", [False, True])
def test_where_ranks_are(pipeline_before_data: bool) -> None:
    """Against megatron-core's own generator of groups, for every rank of a mixed layout."""
    from megatron.core.parallel_state import RankGenerator

    sizes = {"tp": 2, "ep": 1, "dp": 3, "pp": 2, "cp": 2}
    order = "tp-cp-ep-pp-dp" if pipeline_before_data else "tp-cp-ep-dp-pp"
    layout = Layout(
        world_size=24,
        tensor=2,
        data=3,
        sequence_parallel=False,
        zero_stage=0,
        micro_batches=1,
        pipeline=2,
        context=2,
        pipeline_before_data=pipeline_before_data,
    )
    generator = RankGenerator(**sizes, order=order)
    own = {"tp": layout.tensor_rank, "cp": layout.context_rank, "dp": layout.data_rank, "pp": layout.pipeline_rank}
    for token, rank_of in own.items():
        groups = generator.get_ranks(token)
        assert len(groups) == 24 // sizes[token]
        for group in groups:
            assert [rank_of(rank) for rank in group] == list(range(sizes[token])), token


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("--num-layers 4", (((0, 1),), ((2, 3),))),
        ("--num-layers 4 --num-virtual-stages-per-pipeline-rank 2", (((0,), (2,)), ((1,), (3,)))),
        ("--num-layers 5 --pipeline-model-parallel-layout Ett|tttL", (((0, 1),), ((2, 3, 4),))),
        ("--num-layers 5 --pipeline-model-parallel-layout Et|tt|t|tL", (((0,), (3,)), ((1, 2), (4,)))),
        (
            "--num-layers 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            (((0, 1),), ((2, 3),)),
        ),
        ("--num-layers 5 --decoder-first-pipeline-num-layers 2", (((0, 1),), ((2, 3, 4),))),
    ],
)
def test_where_layers_are(words: str, stages: Any, tmp_path: Path) -> None:
    """By hand: E is the embedding, t a layer, L the loss; stages of the first chunk come before those of the second."""
    found = elsewhere(f"--hidden-size 64 --num-attention-heads 4 --pipeline-model-parallel-size 2 {words}", tmp_path)
    assert tuple(tuple(tuple(chunk) for chunk in stage) for stage in found[2].stages) == stages
