"""What holds identity 2 up can be taken out one by one, and then the comparison fails: shims, patches, mendings."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from tests import bodies
from tests.configs import MIXED, make
from tests.distributed import RankError, Ranks

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
    """The comparison of test_layout_invariance, in short; raises AssertionError (RankError is one) if it fails."""
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
    for result in ranks.run(tensor * data, bodies.train, config=config, steps=STEPS, broken=broken):
        assert result["groups"] == whole["groups"]
        for name, value in result["initial"].items():
            if value.shape == whole["initial"][name].shape:
                np.testing.assert_array_equal(value, whole["initial"][name], err_msg=name)
        np.testing.assert_allclose(result["losses"], whole["losses"], rtol=2e-5)
        np.testing.assert_allclose(result["grad_norms"], whole["grad_norms"], rtol=2e-5)


SEQUENCE_PARALLEL = {"parallel__sequence_parallel": True}


@pytest.mark.parametrize(
    ("architecture", "layout"), [("gpt3", {}), ("gpt3", SEQUENCE_PARALLEL), ("llama", {}), ("llama", {"tensor": 1})]
)
def test_whole_it_holds(ranks: Ranks, reference: Any, architecture: str, layout: dict[str, Any]) -> None:
    compare(ranks, reference, "nothing", architecture, **layout)


@pytest.mark.parametrize(
    ("broken", "architecture", "layout"),
    [
        ("no_sequence_parallel_reduction", "gpt3", SEQUENCE_PARALLEL),
        ("norms_not_marked_sequence_parallel", "llama", SEQUENCE_PARALLEL),
        ("no_mpu", "gpt3", {"parallel__zero_stage": 1}),
        ("init_by_local_shape", "gpt3", {}),
        ("width_from_local_shape", "gpt3", {}),
        ("no_readout_multiplier", "gpt3", {"tensor": 1}),
        ("no_embedding_multiplier", "gpt3", {"tensor": 1}),
        ("no_residual_multiplier", "gpt3", {"tensor": 1}),
        ("no_qkv_blocks", "gpt3", {"tensor": 1}),
        ("no_qkv_shim", "gpt3", {"tensor": 1}),
        ("no_fc1_shim", "gpt3", {"tensor": 1}),
        ("no_row_parallel_shim", "gpt3", {"tensor": 1}),
        ("no_norm_shim", "gpt3", {"tensor": 1}),
        ("no_embedding_record", "gpt3", {"tensor": 1}),
        ("no_readout_record", "llama", {"tensor": 1}),
        ("patch:cpu-current-device", "llama", {"tensor": 1}),
        ("patch:cpu-get-rng-state", "gpt3", {"tensor": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_it_the_comparison_fails(
    ranks: Ranks, reference: Any, broken: str, architecture: str, layout: dict[str, Any]
) -> None:
    reference(architecture)
    with pytest.raises((AssertionError, RankError)):
        compare(ranks, reference, broken, architecture, **layout)
