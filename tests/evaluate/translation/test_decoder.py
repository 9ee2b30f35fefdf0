"""The decoder with its cache gives the logits of the whole model, whatever order a search puts its sequences into."""

from __future__ import annotations

from typing import Any

import pytest

from tests.evaluate.translation import bodies
from tests.helpers.configs import make_t5
from tests.helpers.distributed import Ranks

MULTIPLIERS = {
    "hparams__attention_multiplier": 2.0,
    "hparams__output_multiplier": 3.0,
    "hparams__embedding_multiplier": 2.0,
    "hparams__residual_multiplier": 0.5,
    "hparams__init_method_std": 0.3,
}
KINDS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "rotary, a head of its own": {
        "model__position_embedding_type": "rope",
        "model__share_embeddings_and_output_weights": False,
    },
    "megatron-core's attention": {"model__core_attention": "megatron"},
    "relative positions": {
        "model__position_embedding_type": "relative",
        "model__relative_attention_num_buckets": 8,
        "model__relative_attention_max_distance": 6,
        "hparams__relative_bias_multiplier": 4.0,
        "run__seed": 11,  # whose translations do not all end at once
    },
}


@pytest.mark.parametrize(
    "kind", ["as it comes", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:])]
)
def test_cached_is_uncached(ranks: Ranks, kind: str) -> None:
    ((found, expected),) = ranks.run(1, bodies.cached, config=make_t5(**MULTIPLIERS, **KINDS[kind]))
    assert found.shape == (6, 6, 375)
    assert float((found - expected).abs().max()) < 1e-5  # the decoder gives fp32
    assert float(expected.std()) > 1.0


@pytest.mark.parametrize("lost", ["the exchange", "the padding"])
def test_what_is_lost_is_seen(ranks: Ranks, lost: str) -> None:
    ((found, expected),) = ranks.run(1, bodies.cached, config=make_t5(**MULTIPLIERS), lost=lost)
    wrong = (found - expected).abs().amax(dim=(0, 2)) > 1e-2
    # Sequences 2 and 5 are their own parents throughout; the first sentence is the longest, and is not padded.
    assert (
        wrong.tolist()
        == {
            "the exchange": [True, True, False, True, True, False],
            "the padding": [False, False, True, True, True, True],
        }[lost]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["as it comes", "relative positions"])
def test_tensor_parallel_ranks_translate_as_one(ranks: Ranks, kind: str) -> None:
    """Greedily as the whole model does token by token, and with four beams the same on one rank and on two."""
    config = make_t5(**MULTIPLIERS, **KINDS[kind], parallel__tensor_model_parallel_size=2)
    alone = make_t5(**MULTIPLIERS, **KINDS[kind])
    for beams in (1, 4):
        ((one, greedy),) = ranks.run(1, bodies.translations, config=alone, beams=beams)
        first, second = ranks.run(2, bodies.translations, config=config, beams=beams)
        assert first == second == (one, greedy)
        assert (one == greedy) == (beams == 1)
        assert len({len(tokens) for tokens in one}) > 1
