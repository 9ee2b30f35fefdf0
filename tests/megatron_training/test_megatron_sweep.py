"""Fifty mixes of Megatron's options: at the base µP is the plain run to the last bit, or one sentence refuses."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.distributed import RankError, Ranks
from tests.helpers.installed import needs_training
from tests.megatron_training.test_megatron_features import run

pytestmark = [
    pytest.mark.slow,
    needs_training,
]
SEED = 20261122
MIXES = 50
PER_TEST = 10
# What a command line is mixed of: one choice of each line. The first is upstream's default.
CHOICES: dict[str, tuple[str, ...]] = {
    "positions": (
        "",
        "--position-embedding-type rope",
        "--position-embedding-type rope",
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500000",
        "--position-embedding-type rope --use-rope-scaling",
        "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8",
        "--position-embedding-type none",
    ),
    "attention": (
        "",
        "--group-query-attention --num-query-groups 2",
        "--group-query-attention --num-query-groups 1",
        "--group-query-attention --num-query-groups 2 --attention-output-gate",
        "--qk-layernorm",
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
        " --v-head-dim 8",
        "--multi-latent-attention --kv-lora-rank 16 --qk-layernorm --rope-type yarn --rotary-scaling-factor 4",
    ),
    "softmax": ("", "", "--softmax-type off-by-one", "--softmax-type learnable", "--attention-softmax-in-fp32"),
    "norm": ("", "--normalization RMSNorm", "--normalization RMSNorm --norm-epsilon 1e-6"),
    "mlp": ("", "--swiglu", "--squared-relu", "--quick-geglu"),
    "bias": ("", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"),
    "head": ("", "--untie-embeddings-and-output-weights"),
    "experts": (
        "",
        "",
        "--num-experts 4 --moe-router-topk 2",
        "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 32 --moe-layer-freq [0,1]",
        "--num-experts 4 --moe-shared-expert-intermediate-size 32 --moe-aux-loss-coeff 0.1",
        "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 2"
        " --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5",
        "--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
    ),
    "ahead": ("", "", "", "--mtp-num-layers 1"),
    "optimizer": (
        "--optimizer adam --weight-decay 0.1",
        "--optimizer adam --adam-beta2 0.95 --adam-eps 1e-6 --weight-decay 0",
        "--optimizer adam --weight-decay 0.1",
        "--optimizer sgd --sgd-momentum 0.9 --weight-decay 0",
        "--optimizer sgd --sgd-momentum 0.9 --weight-decay 0",
        "--optimizer lion",
    ),
    "schedule": (
        "",
        "--lr-decay-style cosine --min-lr 1e-3 --lr-warmup-iters 1 --lr-decay-iters 4",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear --lr-decay-iters 4",
    ),
    "precision": ("", "", "--bf16", "--fp16 --initial-loss-scale 1024"),
    "memory": (
        "",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective",
    ),
    # Not of attention: on a CPU upstream's fork of random states has no effect (patches/README.md), ours has.
    "drops": ("", "", "--hidden-dropout 0.1"),
    "rest": (
        *[""] * 9,
        *["--calculate-per-token-loss"] * 2,
        "--qk-clip",
        "--fp32-residual-connection",
        "--qk-l2-norm",
        "--apply-residual-connection-post-layernorm",
        "--apply-wd-to-qk-layernorm",
    ),
}


def mix(number: int) -> list[str]:
    draw = random.Random(f"{SEED} {number}")
    return " ".join(draw.choice(choices) for choices in CHOICES.values()).split()


def compared(ranks: Ranks, folder: Path, words: list[str]) -> str:
    """`equal`; `refused` by a sentence, what upstream cannot build among it; `upstream` where that raises the same."""
    try:
        ours = run(ranks, folder, *words, dropout_seed=SEED)
    except RankError as error:
        with pytest.raises(RankError, match=re.escape(str(error).strip().splitlines()[-1])):
            run(ranks, folder, *words, plainly=True)
        return "upstream"
    if ours["status"] == 2:
        assert "mup-megatron: error: " in ours["said"], ours["said"]
        return "refused"
    plain = run(ranks, folder, *words, plainly=True, initial=ours["initial"], dropout_seed=SEED)
    assert (ours["status"], plain["status"]) == (0, 0), f"{words}: {ours['said'][-500:]}, {plain['said'][-500:]}"
    assert plain["steps"] == ours["steps"], words
    assert len(ours["steps"]) == 3
    for tensor, value in plain["final"].items():
        assert np.array_equal(ours["final"][tensor], value), f"{words}: {tensor}"
    return "equal"


@pytest.fixture(scope="module")
def outcomes() -> dict[int, str]:
    return {}


@pytest.mark.parametrize("first", range(0, MIXES, PER_TEST))
def test_mixes(first: int, ranks: Ranks, tmp_path: Path, outcomes: dict[int, str]) -> None:
    wrong = []
    for number in range(first, first + PER_TEST):
        try:
            outcomes[number] = compared(ranks, tmp_path, mix(number))
        except Exception as error:  # the others are looked at too
            wrong.append(f"mix {number}: {error}")
    assert not wrong, "\n".join(wrong)


def test_how_many_ran(outcomes: dict[int, str]) -> None:
    """A sweep of refusals would compare nothing; counted once, and a mix that ends otherwise is looked at."""
    assert Counter(outcomes.values()) == {"equal": 23, "refused": 18, "upstream": 9}
