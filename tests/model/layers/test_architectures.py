"""Mixtures of experts, multi-latent attention and multi-token prediction: forward passes by hand, negative controls.

Layouts: tests/engines/test_parity.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.comparison import Difference, compare_curves
from tests.helpers.configs import MIXED, MLA, MOE, make
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import Split
from tests.helpers.matrix import BIAS, CASES, YARN, config_of


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def causal_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float) -> np.ndarray:
    """[s, b, a, d], [s, b, g, d], [s, b, g, v] to [s, b, a·v], in float64."""
    repeat = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, repeat, axis=2), np.repeat(value, repeat, axis=2)
    logits = np.einsum("sbad,kbad->bask", query, key) * scale
    logits[..., np.triu(np.ones(logits.shape[-2:], dtype=bool), 1)] = -np.inf
    context = np.einsum("bask,kbav->sbav", softmax(logits), value)
    return context.reshape(*context.shape[:2], -1)


@pytest.mark.parametrize("core", ["megatron", "sdpa"])
@pytest.mark.parametrize(
    ("growth", "overrides", "scale"),
    [
        # Query/key heads 12 + 8 = 20 over a base of 8 + 4 = 12: 3 · 1/sqrt(20) · sqrt(12/20).
        (MLA, {}, 3 * math.sqrt(12) / 20),
        # YaRN's 0.1 · 1 · ln(40) + 1, squared.
        (MLA, YARN, 3 * math.sqrt(12) / 20 * (0.1 * math.log(40) + 1) ** 2),
        # Heads of 8 in both.
        (MIXED, {"model__qk_layernorm": True}, 3 / math.sqrt(8)),
    ],
    ids=["mla", "mla-yarn", "qk-norm"],
)
def test_softmax_scale_at_the_consumer(
    ranks: Ranks, core: str, growth: dict[str, Any], overrides: dict[str, Any], scale: float
) -> None:
    """What the core attention makes of its queries, keys and values is softmax(scale · q·k) v."""
    config = make(growth, "llama", model__core_attention=core, hparams__attention_multiplier=3.0, **overrides)
    prepare(config)
    seen = ranks.run(1, bodies.core_attention, config=config)[0]
    assert seen["layers"] == 2
    expected = causal_attention(seen["query"], seen["key"], seen["value"], scale)
    np.testing.assert_allclose(seen["context"], expected, rtol=1e-4, atol=1e-6)
    without = causal_attention(seen["query"], seen["key"], seen["value"], scale / 3)
    assert np.abs(without - expected).max() > 1e-3  # the comparison can tell


def test_sdpa_masks_and_decoding() -> None:
    """Given masks, grouped heads, one query against a cache, several against a cache: as megatron-core's attention."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mup_megatron.model.layers.attention import SdpaAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = SdpaAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=0.0, softmax_scale=0.7)
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(6, 2, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2))
    value = torch.randn(6, 2, 2, 5, generator=generator, dtype=torch.float64)
    whole = causal_attention(query.numpy(), key.numpy(), value.numpy(), 0.7)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    for mask in (None, causal):
        np.testing.assert_allclose(attention(query, key, value, mask).numpy(), whole, rtol=1e-10)
    for first in (5, 2):
        decoded = attention(query[first:], key, value, None)
        np.testing.assert_allclose(decoded.numpy(), whole[first:], rtol=1e-10)
        assert decoded.shape == (6 - first, 2, 20)
    window = causal | torch.ones(6, 6, dtype=torch.bool).tril(-2)[None, None]  # itself and the one before
    assert not np.allclose(attention(query, key, value, window).numpy(), whole)
    alone = causal | torch.ones(6, 6, dtype=torch.bool).tril(-1)[None, None]  # itself: the value comes through
    expected = np.repeat(value.numpy(), 2, axis=2).reshape(6, 2, -1)
    np.testing.assert_allclose(attention(query, key, value, alone).numpy(), expected, rtol=1e-10)
    with pytest.raises(ValueError, match="packed_seq_params"):
        attention(query, key, value, None, packed_seq_params=object())


def test_readout_and_embedding_multipliers_hold_for_multi_token_prediction(ranks: Ranks) -> None:
    """The head sees its input times 6 · 64/96 = 4, the trunk the embedding times 5, once per predicted token."""
    config = make(
        MIXED,
        "gpt3",
        model__mtp_num_layers=2,
        hparams__output_multiplier=6.0,
        hparams__embedding_multiplier=5.0,
    )
    prepare(config)
    calls = ranks.run(1, bodies.multi_token_calls, config=config)[0]
    assert len(calls["readout"]) == 3
    assert len(calls["embedding"]) == 3
    assert calls["readout"] == pytest.approx([4.0] * 3, rel=1e-5)
    assert calls["embedding"] == pytest.approx([5.0] * 3, rel=1e-5)


def test_expert_bias_moves_towards_idle_experts(ranks: Ranks) -> None:
    """Each step by the update rate, up where an expert got fewer tokens than the mean, down where it got more."""
    config = make(MOE, "llama", parallel__zero_stage=0, **BIAS)
    prepare(config)
    for bias, tokens in ranks.run(1, bodies.expert_bias, config=config)[0]:
        np.testing.assert_allclose(bias, 0.01 * np.sign(tokens.mean() - tokens), rtol=1e-6)
        assert tokens.sum() == 8 * 32 * 2  # sequences, positions, experts per token


def test_an_auxiliary_loss_is_a_mean_over_micro_batches(ranks: Ranks) -> None:
    """Its gradient does not depend on how many micro-batches a batch is cut into (the sequence-wise loss is a mean)."""
    norms = []
    for micro in (8, 2):
        config = make(
            MOE,
            "llama",
            parallel__zero_stage=0,
            training__micro_batch_size=micro,
            model__moe_aux_loss_coeff=10.0,
        )
        prepare(config)
        norms.append(ranks.run(1, bodies.train, config=config, steps=1)[0]["grad_norms"][0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


BROKEN_REGIME = {
    "hparams__lr": 8e-3,
    "hparams__output_multiplier": 2.0,
    "hparams__attention_multiplier": 2.0,
    "model__moe_aux_loss_coeff": 1.0,
}
ONE = Split(0)


def trained(ranks: Ranks, case: str, split: Split, broken: str = "nothing") -> list[dict[str, Any]]:
    """Six steps in that regime."""
    regime = {key: value for key, value in BROKEN_REGIME.items() if "moe" not in key or CASES[case][0] is MOE}
    config = config_of(f"llama, {case}", split, **regime)
    prepare(config)
    return ranks.run(split.processes, bodies.train, config=config, steps=6, broken=broken)


@pytest.fixture(scope="module")
def unbroken(ranks: Ranks) -> Any:
    """One process, once for all controls of a case."""
    return cache(lambda case: trained(ranks, case, ONE)[0])


@pytest.mark.parametrize(
    ("broken", "case", "split", "why"),
    [
        ("no_router_shim", "moe", ONE, r"mlp\.router\.weight: its layer does not say its global shape"),
        pytest.param(
            *(
                "no_shared_expert_shim",
                "moe",
                ONE,
                r"shared_experts\.gate_weight: its layer does not say its global shape",
            ),
            marks=pytest.mark.slow,
        ),
        ("hidden_losses_not_scaled", "moe", ONE, r"grad_norms\[0\] on rank 0"),
        ("expert_bias_not_updated", "moe-expert-bias", ONE, r"losses\[1\] on rank 0"),
        ("no_mla_shim", "mla", ONE, r"linear_q_down_proj\.weight: its layer does not say its global shape"),
        pytest.param(
            *("no_query_up_shim", "mla", ONE, r"linear_q_up_proj\.weight: its layer does not say its global shape"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                "no_key_value_up_shim",
                "mla",
                ONE,
                r"linear_kv_up_proj\.weight: its layer does not say its global shape",
            ),
            marks=pytest.mark.slow,
        ),
        ("patch:mla-local-attention", "mla", ONE, "channels"),
        ("upstream_softmax_scale", "mla", ONE, r"(losses|grad_norms)\[0\] on rank 0"),
        pytest.param(
            *("no_gather_hook", "mla", Split(0, tensor=2, sequence=True), r"grad_norms\[[01]\] on rank 0"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("no_eh_proj_shim", "mtp", ONE, r"eh_proj\.weight: its layer does not say its global shape"),
            marks=pytest.mark.slow,
        ),
        pytest.param("hidden_losses_not_scaled", "mtp", ONE, r"grad_norms\[0\] on rank 0", marks=pytest.mark.slow),
        (
            "qk_norm_not_summed_over_heads",
            "qk-norm",
            Split(0, tensor=2),
            r"grad_norms\[[01]\] on rank 0",
        ),  # by the text
        ("patch:cpu-alltoall-stream", "moe-alltoall", ONE, "CUDA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_it_the_comparison_fails(
    ranks: Ranks, unbroken: Any, broken: str, case: str, split: Split, why: str
) -> None:
    """`why` is what comparison or library say of it: the quantity that differs, the tensor without record."""
    whole = unbroken(case)
    if split.tensor > 1:  # whole, it holds
        compare_curves(trained(ranks, case, split), whole)
    with pytest.raises((Difference, RankError), match=why):
        compare_curves(trained(ranks, case, split, broken), whole)
