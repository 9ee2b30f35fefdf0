"""Cross-attention by hand: softmax scale and masks at the consumer, and what tensor-parallel ranks hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mup_megatron.config import derive
from mup_megatron.data.prepare import prepare
from tests.helpers import t5_bodies
from tests.helpers.comparison import Difference, compare_initial
from tests.helpers.configs import make_t5
from tests.helpers.distributed import Ranks
from tests.model.layers.test_architectures import softmax


def attended(seen: dict[str, np.ndarray], scale: float) -> np.ndarray:
    """softmax(scale · q·k) v over the keys that are not masked, [t, b, a·d], in float64."""
    logits = np.einsum("sbad,kbad->bask", seen["query"], seen["key"]) * scale
    masked = np.broadcast_to(seen["mask"].astype(bool), logits.shape)
    context = np.einsum("bask,kbad->sbad", softmax(np.where(masked, -np.inf, logits)), seen["value"])
    return context.reshape(*context.shape[:2], -1)


@pytest.mark.parametrize("core", ["megatron", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_softmax_scale_at_the_consumer(ranks: Ranks, core: str) -> None:
    """Heads of 12 over a base of 8: 3 · 1/sqrt(12) · sqrt(8/12), in all three kinds of attention."""
    config = make_t5(model__core_attention=core, hparams__attention_multiplier=3.0, training__decoder_seq_length=24)
    prepare(config)
    seen = ranks.run(1, t5_bodies.attention, config=config)[0]
    scale = 3 * math.sqrt(8) / 12
    assert {name: parts["query"].shape[0] for name, parts in seen.items()} == {
        "encoder": 32,
        "decoder": 24,
        "cross": 24,
    }
    assert seen["cross"]["key"].shape[0] == 32
    assert seen["cross"]["mask"].any()
    for name, parts in seen.items():
        expected = attended(parts, scale)
        np.testing.assert_allclose(parts["context"], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        # The comparison can tell 1/d from 1/sqrt(d), and a mask from none.
        for other in (
            attended(parts, 3 / math.sqrt(12)),
            attended({**parts, "mask": np.zeros_like(parts["mask"])}, scale),
        ):
            assert np.abs(other - expected).max() > 1e-3


def slices(name: str, whole: np.ndarray, rank: int) -> np.ndarray:
    """What one of two tensor-parallel ranks must hold of cross-attention, worked out by hand: half of the heads."""
    if name.endswith("linear_proj.weight"):
        return np.split(whole, 2, axis=1)[rank]
    if "linear_kv" in name:  # head by head, d rows of the key and d of the value
        heads = whole.reshape(8, 2, 12, *whole.shape[1:])[4 * rank : 4 * rank + 4]
        return heads.reshape(96, *whole.shape[1:])
    return np.split(whole, 2)[rank] if "linear_q." in name else whole


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("nothing", None),
        pytest.param(
            "keys_apart_from_values", r"decoder\.layers\.0\.cross_attention\.linear_kv", marks=pytest.mark.slow
        ),
    ],
)
def test_tensor_parallel_ranks_hold_heads(ranks: Ranks, broken: str, why: str | None) -> None:
    """The wrong record: all keys before all values, of which each rank takes a half, as of gate|up."""
    config = make_t5(parallel__tensor_model_parallel_size=2, parallel__zero_stage=0)
    prepare(config)
    whole = ranks.run(1, t5_bodies.initial, config=derive(config, {"parallel.tensor_model_parallel_size": 1}))[0]
    results = ranks.run(2, t5_bodies.initial, config=config, broken=broken)
    own = [{"initial": {n: v for n, v in held.items() if "cross_attention" in n}} for held in results]
    assert len(own[0]["initial"]) == 12
    if why is None:
        compare_initial(own, {"initial": whole}, slices)
    else:
        with pytest.raises(Difference, match=why):
            compare_initial(own, {"initial": whole}, slices)


def test_every_branch_is_scaled(ranks: Ranks) -> None:
    """1/4 of 1 + 2: three layers of two branches, and two of three."""
    config = make_t5(hparams__residual_multiplier=0.25)
    prepare(config)
    added = ranks.run(1, t5_bodies.branches, config=config)[0]
    assert len(added) == 3 * 2 + 2 * 3
    assert set(added.values()) == {0.75}
