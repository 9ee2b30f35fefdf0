"""Identity 2 for positions as a bias on attention logits: every layout against one process, and what breaks it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.comparison import Difference, compare_curves
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import STEPS, Split, check
from tests.model.layers.test_position_bias import KINDS, TABLE

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-dp2-sp-zero1": (
        4,
        {
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
            "parallel__zero_stage": 1,
            "training__micro_batch_size": 2,
        },
    ),
    "tp2": (2, {"parallel__tensor_model_parallel_size": 2}),
    "zero3": (2, {"parallel__zero_stage": 3, "training__micro_batch_size": 2}),
    "zero3-recompute": (
        2,
        {"parallel__zero_stage": 3, "training__micro_batch_size": 2, "training__recompute_granularity": "selective"},
    ),
    "sdpa": (1, {"model__core_attention": "sdpa"}),
    "sdpa-recompute": (1, {"model__core_attention": "sdpa", "training__recompute_granularity": "selective"}),
    "cp2": (2, {"parallel__engine": "megatron", "parallel__context_parallel_size": 2}),
    "pp2": (2, {"parallel__engine": "megatron", "parallel__pipeline_model_parallel_size": 2}),
    "pp2-recompute": (
        2,
        {
            "parallel__engine": "megatron",
            "parallel__pipeline_model_parallel_size": 2,
            "training__recompute_granularity": "full",
            "training__recompute_method": "uniform",
            "training__recompute_num_layers": 1,
        },
    ),
    "pp2-dp2-distributed-optimizer": (
        4,
        {
            "parallel__engine": "megatron",
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__use_distributed_optimizer": True,
            "training__micro_batch_size": 2,
        },
    ),
    "pp2-tp2-sp-invariant-norm": (
        4,
        {
            "parallel__engine": "megatron",
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
        },
    ),
}
QUICK = (("relative", "tp2-dp2-sp-zero1"), ("relative", "pp2"))


def config_of(kind: str, **overrides: Any) -> Any:
    keys = {"hparams__lr": 3e-3, "hparams__relative_bias_multiplier": 8.0, "parallel__tensor_model_parallel_size": 1}
    return make(MIXED, "llama", **{**keys, **KINDS[kind], **overrides})


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    @cache
    def run(kind: str, clip_norm: str = "global") -> dict[str, Any]:
        config = config_of(kind, training__clip_norm=clip_norm)
        prepare(config)
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]

    return run


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, id=f"{kind}-{layout}", marks=() if (kind, layout) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_layout_changes_nothing(ranks: Ranks, reference: Any, kind: str, layout: str) -> None:
    count, keys = LAYOUTS[layout]
    clip_norm = "invariant" if "invariant" in layout else "global"
    whole = reference(kind, clip_norm)
    config = config_of(kind, training__clip_norm=clip_norm, **keys)
    results = ranks.run(count, bodies.train, config=config, steps=STEPS)
    parallel = config.parallel
    split = Split(0, tensor=parallel.tensor_model_parallel_size, pipeline=parallel.pipeline_model_parallel_size)
    check(results, whole, split)
    assert all((TABLE in result["initial"]) == (kind == "relative") for result in results)


def test_the_regime_can_tell(reference: Any) -> None:
    losses = {kind: reference(kind)["losses"] for kind in KINDS}
    assert all(curve[0] - curve[-1] > 0.5 for curve in losses.values())
    assert abs(losses["relative"][-1] / losses["alibi"][-1] - 1) > 1e-3


@pytest.mark.parametrize(
    ("broken", "kind", "layout", "why"),
    [
        ("no_relative_bias_spec", "relative", "sdpa", r"relative_attention_bias\.weight: its layer does not say"),
        ("relative_bias_gradient_of_own_heads", "relative", "tp2", r"grad_norms\[0\] on rank \d"),
        pytest.param(
            *("relative_bias_copies_apart", "relative", "pp2", r"grad_norms\[\d\] on rank \d"), marks=pytest.mark.slow
        ),
        ("slopes_of_local_heads", "alibi", "tp2", r"losses\[0\] on rank \d"),
        pytest.param(
            "bias_gradient_not_collected", "relative", "sdpa-recompute", "second time", marks=pytest.mark.slow
        ),
    ],
)
def test_without_it_the_comparison_fails(
    ranks: Ranks, reference: Any, broken: str, kind: str, layout: str, why: str
) -> None:
    count, keys = LAYOUTS[layout]
    with pytest.raises((Difference, RankError), match=why):
        compare_curves(
            ranks.run(count, bodies.train, config=config_of(kind, **keys), steps=STEPS, broken=broken), reference(kind)
        )


@pytest.mark.slow
def test_it_goes_on_in_another_layout(ranks: Ranks, tmp_path: Any, reference: Any) -> None:
    """Saved by two pipeline stages, gone on with by two tensor-parallel ranks."""
    count, keys = LAYOUTS["pp2"]
    folder = str(tmp_path / "state")
    ranks.run(count, bodies.leg, config=config_of("relative", **keys), start_at=0, stop_at=STEPS // 2, save=folder)
    count, keys = LAYOUTS["tp2"]
    later = {"start_at": STEPS // 2, "stop_at": STEPS, "load": folder}
    rest = ranks.run(count, bodies.leg, config=config_of("relative", **keys), **later)
    expected = reference("relative")["losses"][STEPS // 2 :]
    assert len(expected) == STEPS // 2
    np.testing.assert_allclose(rest[0]["losses"], expected, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"model__mtp_num_layers": 1},
        {"model__softmax_type": "learnable"},
        {"model__qk_layernorm": True},
        {"model__attention_output_gate": True},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_beside_other_options(ranks: Ranks, overrides: dict[str, Any]) -> None:
    """It trains, and two tensor-parallel ranks give the losses of one."""
    plain = config_of("relative", **overrides)
    prepare(plain)
    whole = ranks.run(1, bodies.train, config=plain, steps=8)[0]
    split = config_of("relative", parallel__tensor_model_parallel_size=2, **overrides)
    compare_curves(ranks.run(2, bodies.train, config=split, steps=8), whole)
