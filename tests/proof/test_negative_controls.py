"""What holds identity 2 up can be taken out one by one, and then the comparison fails: shims, patches, mendings."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from tests.engines.test_layout_invariance import slices
from tests.helpers import bodies
from tests.helpers.comparison import Difference, compare_curves, compare_groups, compare_initial
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import RankError, Ranks

STEPS = 6
MULTIPLIERS = {
    "hparams__output_multiplier": 2.0,
    "hparams__embedding_multiplier": 3.0,
    "hparams__residual_multiplier": 0.5,
    "hparams__attention_multiplier": 2.0,
}


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Any:
    @cache
    def run(architecture: str) -> dict[str, Any]:
        config = make(MIXED, architecture, parallel__zero_stage=0, **MULTIPLIERS)
        prepare(config)
        return ranks.run(1, bodies.train, config=config, steps=STEPS)[0]

    return run


def compare(ranks: Ranks, reference: Any, broken: str, architecture: str = "gpt3", **layout: Any) -> None:
    """The comparison of test_layout_invariance, in short. Raises Difference, or RankError where it does not run."""
    whole = reference(architecture)
    data = layout.pop("data", 1)
    tensor = layout.pop("tensor", 2)
    config = make(
        MIXED,
        architecture,
        parallel__tensor_model_parallel_size=tensor,
        training__micro_batch_size=4 // data,
        **{"parallel__zero_stage": 0, **layout},
        **MULTIPLIERS,
    )
    results = ranks.run(tensor * data, bodies.train, config=config, steps=STEPS, broken=broken)
    compare_groups(results, whole)
    compare_initial(
        results, whole, lambda name, value, rank: slices(name, value, tensor, rank, architecture == "llama")
    )
    compare_curves(results, whole)


SEQUENCE_PARALLEL = {"parallel__sequence_parallel": True}


@pytest.mark.parametrize(
    ("architecture", "layout"), [("gpt3", {}), ("gpt3", SEQUENCE_PARALLEL), ("llama", {}), ("llama", {"tensor": 1})]
)
def test_the_unbroken_model_equals_one_process(
    ranks: Ranks, reference: Any, architecture: str, layout: dict[str, Any]
) -> None:
    compare(ranks, reference, "nothing", architecture, **layout)


@pytest.mark.parametrize(
    ("broken", "architecture", "layout", "why"),
    [
        ("no_sequence_parallel_reduction", "gpt3", SEQUENCE_PARALLEL, r"grad_norms\[0\] on rank 0"),
        ("norms_not_marked_sequence_parallel", "llama", SEQUENCE_PARALLEL, r"grad_norms\[0\] on rank 0"),
        ("no_mpu", "gpt3", {"parallel__zero_stage": 1}, r"losses\[0\] on rank 0"),
        ("init_by_local_shape", "gpt3", {}, r"initial value of .*linear_proj\.weight on rank 0"),
        ("width_from_local_shape", "gpt3", {}, "group of .*weight on rank 0"),
        ("no_readout_multiplier", "gpt3", {"tensor": 1}, r"losses\[0\] on rank 0"),
        ("no_embedding_multiplier", "gpt3", {"tensor": 1}, r"losses\[0\] on rank 0"),
        ("no_residual_multiplier", "gpt3", {"tensor": 1}, r"losses\[0\] on rank 0"),
        (
            "no_qkv_blocks",
            "gpt3",
            {"tensor": 1},
            r"group of .*linear_qkv\.weight .* 3\.75\d*e-09.* instead of .* 2\.5e-09",
        ),
        ("no_qkv_shim", "gpt3", {"tensor": 1}, r"linear_qkv\.weight: its layer does not say its global shape"),
        ("no_fc1_shim", "gpt3", {"tensor": 1}, r"linear_fc1\.weight: its layer does not say its global shape"),
        (
            "no_row_parallel_shim",
            "gpt3",
            {"tensor": 1},
            r"linear_proj\.weight: its layer does not say its global shape",
        ),
        ("no_norm_shim", "gpt3", {"tensor": 1}, r"layernorm\.weight: its layer does not say its global shape"),
        (
            "no_embedding_record",
            "gpt3",
            {"tensor": 1},
            r"word_embeddings\.weight: its layer does not say its global shape",
        ),
        ("no_readout_record", "llama", {"tensor": 1}, r"output_layer\.weight: its layer does not say its global shape"),
        ("patch:cpu-current-device", "llama", {"tensor": 1}, "CUDA"),
        ("patch:cpu-get-rng-state", "gpt3", {"tensor": 1}, "CUDA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_it_the_comparison_fails(
    ranks: Ranks, reference: Any, broken: str, architecture: str, layout: dict[str, Any], why: str
) -> None:
    """`why` is what comparison or library say of it: the quantity that differs, the tensor without record."""
    reference(architecture)
    with pytest.raises((Difference, RankError), match=why):
        compare(ranks, reference, broken, architecture, **layout)
