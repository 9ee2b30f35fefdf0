"""What holds identity 2 up can be taken out one by one, and then the comparison fails: shims, patches, mendings."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mup_megatron.data.prepare import prepare
from tests.helpers import bodies
from tests.helpers.comparison import Difference
from tests.helpers.configs import MIXED, make
from tests.helpers.distributed import RankError, Ranks
from tests.helpers.layouts import Split, check

STEPS = 4
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


def compare(ranks: Ranks, reference: Any, broken: str, architecture: str, split: Split) -> None:
    """That of tests/engines/test_parity.py, in short. Raises Difference, or RankError where it does not run."""
    whole = reference(architecture)
    config = make(MIXED, architecture, **split.overrides, **MULTIPLIERS)
    results = ranks.run(split.processes, bodies.train, config=config, steps=STEPS, broken=broken)
    check(results, whole, split, gated=architecture == "llama")


ONE, TP2, SEQUENCE_PARALLEL = Split(0), Split(0, tensor=2), Split(0, tensor=2, sequence=True)


@pytest.mark.parametrize(
    ("architecture", "split"), [("gpt3", TP2), ("gpt3", SEQUENCE_PARALLEL), ("llama", TP2), ("llama", ONE)]
)
def test_the_unbroken_model_equals_one_process(ranks: Ranks, reference: Any, architecture: str, split: Split) -> None:
    compare(ranks, reference, "nothing", architecture, split)


@pytest.mark.parametrize(
    ("broken", "architecture", "split", "why"),
    [
        ("no_sequence_parallel_reduction", "gpt3", SEQUENCE_PARALLEL, r"grad_norms\[0\] on rank 0"),
        ("norms_not_marked_sequence_parallel", "llama", SEQUENCE_PARALLEL, r"grad_norms\[0\] on rank 0"),
        ("no_mpu", "gpt3", Split(1, tensor=2), r"losses\[0\] on rank 0"),
        ("init_by_local_shape", "gpt3", TP2, r"initial value of .*linear_proj\.weight on rank 0"),
        ("width_from_local_shape", "gpt3", TP2, "group of .*weight on rank 0"),
        ("no_readout_multiplier", "gpt3", ONE, r"losses\[0\] on rank 0"),
        ("no_embedding_multiplier", "gpt3", ONE, r"losses\[0\] on rank 0"),
        ("no_residual_multiplier", "gpt3", ONE, r"losses\[0\] on rank 0"),
        (
            "no_qkv_blocks",
            "gpt3",
            ONE,
            r"group of .*linear_qkv\.weight .* 3\.75\d*e-09.* instead of .* 2\.5e-09",
        ),
        ("no_qkv_shim", "gpt3", ONE, r"linear_qkv\.weight: its layer does not say its global shape"),
        ("no_fc1_shim", "gpt3", ONE, r"linear_fc1\.weight: its layer does not say its global shape"),
        (
            "no_row_parallel_shim",
            "gpt3",
            ONE,
            r"linear_proj\.weight: its layer does not say its global shape",
        ),
        ("no_norm_shim", "gpt3", ONE, r"layernorm\.weight: its layer does not say its global shape"),
        (
            "no_embedding_record",
            "gpt3",
            ONE,
            r"word_embeddings\.weight: its layer does not say its global shape",
        ),
        ("no_readout_record", "llama", ONE, r"output_layer\.weight: its layer does not say its global shape"),
        ("patch:cpu-current-device", "llama", ONE, "CUDA"),
        ("patch:cpu-get-rng-state", "gpt3", ONE, "CUDA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_it_the_comparison_fails(
    ranks: Ranks, reference: Any, broken: str, architecture: str, split: Split, why: str
) -> None:
    """`why` is what comparison or library say of it: the quantity that differs, the tensor without record."""
    reference(architecture)
    with pytest.raises((Difference, RankError), match=why):
        compare(ranks, reference, broken, architecture, split)
