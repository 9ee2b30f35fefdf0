"""A model as built trains as the one with shims does, in every layout: initial values, losses and weights."""

from __future__ import annotations

from typing import Any

import megatron.core
import numpy as np
import pytest
from packaging.version import Version

from mup_megatron.data.prepare import prepare
from tests.helpers.configs import make
from tests.helpers.distributed import Ranks
from tests.model.as_built import bodies
from tests.model.as_built.test_same_table import MODELS

PLAIN = {"model__core_attention": "megatron", "parallel__engine": "megatron"}
TENSOR = {"parallel__tensor_model_parallel_size": 2}
PIPELINE = {"parallel__pipeline_model_parallel_size": 2}
EXPERT = {"parallel__expert_model_parallel_size": 2}
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt3": ("gpt3", 1, {"hparams__residual_multiplier": 0.5, "hparams__embedding_multiplier": 2.0}),
    "gpt3-tp": ("gpt3", 2, TENSOR),
    "llama": ("llama", 1, {}),
    "llama-pp": ("llama", 2, PIPELINE),
    "tied-pp": ("tied-llama", 2, PIPELINE),
    "qk-norm-tp": ("qk-norm", 2, TENSOR),
    "sinks-tp": ("sinks", 2, TENSOR),
    "gate-tp": ("output-gate", 2, TENSOR),
    "moe": ("moe", 1, {}),
    "moe-ep": ("moe", 2, EXPERT),
    "mla": ("mla", 1, {}),
    "mla-tp": ("mla", 2, {**TENSOR, "model__qk_layernorm": False}),
    "mtp": ("mtp", 1, {"hparams__residual_multiplier": 0.5}),
    "depth": (
        "llama",
        1,
        {"parametrization__depth": "completep", "base__num_layers": 1},
    ),
    "interleaved": (
        "gpt3",
        2,
        {**PIPELINE, "parallel__virtual_pipeline_model_parallel_size": 2, "model__num_layers": 4},
    ),
}
QUICK = ("gpt3-tp",)
router = pytest.mark.skipif(
    Version(megatron.core.__version__) < Version("0.17"),
    reason="the router of megatron-core 0.16 needs Transformer Engine (NameError: te_general_gemm)",
)


def _marks(name: str) -> list[Any]:
    return [*([] if name in QUICK else [pytest.mark.slow]), *([router] if name.startswith("moe") else [])]


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in RUNS])
def test_both_train_alike(name: str, ranks: Ranks) -> None:
    """Two steps at a target wider than its base, to the last bit: the kernels are upstream's in both."""
    model, count, changed = RUNS[name]
    growth, architecture, own = MODELS[model]
    config = make(growth, architecture, **{**PLAIN, **own, **changed})
    prepare(config)
    recorded = ranks.run(count, bodies.recorded, config=config, steps=2)
    built = ranks.run(count, bodies.trained, config=config, steps=2)
    for theirs, ours in zip(recorded, built, strict=True):
        assert list(ours["initial"]) == list(theirs["initial"])
        for part in ("initial", "final"):
            for tensor, value in theirs[part].items():
                np.testing.assert_array_equal(ours[part][tensor], value, err_msg=f"{part} {tensor}")
        assert ours["losses"] == theirs["losses"]
        assert ours["norms"] == theirs["norms"]
        assert ours["groups"] == theirs["groups"]
        assert ours["table"] == theirs["table"]
        assert "mup_megatron.model.layers.norm" in theirs["layers"]
        assert "mup_megatron.model.layers.norm" not in ours["layers"]  # negative control: the layers are upstream's own
