"""Transformer Engine's modules in the local spec's places: same names, same records, same initial values, any layout.

They compute on CUDA alone (benchmarks/gpu.py compares losses there); built they are on any machine that has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve_auto
from mup_megatron.model.build import parametrize
from mup_megatron.util.errors import ConfigError
from tests.helpers import transformer_engine
from tests.helpers.configs import MIXED, MOE, make
from tests.helpers.distributed import Ranks
from tests.helpers.transformer_engine import TE, installed
from tests.model.as_built.test_same_table import MODELS


def config_of(model: str, **overrides: Any) -> Any:
    growth, architecture, own = MODELS[model]
    config = make(growth, architecture, **own, **overrides)
    prepare(config)
    return config


def layout_of(tensor: int) -> dict[str, Any]:
    return {"parallel__tensor_model_parallel_size": tensor, "parallel__sequence_parallel": tensor > 1}


def check_the_same(plain: list[Any], ours: list[Any]) -> None:
    """Names, values to the last bit, partition marks, and what the rules give, on every rank."""
    for theirs, built in zip(plain, ours, strict=True):
        assert sorted(theirs["values"]) == sorted(built["values"])
        for name, value in theirs["values"].items():
            np.testing.assert_array_equal(built["values"][name], value, err_msg=name)
        assert built["marks"] == theirs["marks"]
        assert built["rows"] == theirs["rows"]


# Not sinks, made on CUDA; nor experts with biases under tensor parallelism: only the Megatron engine has them,
# and that takes Transformer Engine's Adam.
CELLS = [(name, size) for name in MODELS for size in (1, 2) if name != "sinks" and (name, size) != ("moe-biases", 2)]


@installed
@pytest.mark.parametrize(("model", "tensor"), CELLS)
def test_the_same_tensors(te_ranks: Ranks, model: str, tensor: int) -> None:
    config = config_of(model, **layout_of(tensor))
    plain = te_ranks.run(tensor, transformer_engine.recorded, config=config)
    ours = te_ranks.run(tensor, transformer_engine.recorded, config=config, kernels=TE)
    check_the_same(plain, ours)
    for theirs, built in zip(plain, ours, strict=True):
        assert list(theirs["values"]) == list(built["values"])
        assert any(module.startswith(TE) for module in built["modules"])  # negative control: it is Transformer Engine's
        assert not any(module.startswith(TE) for module in theirs["modules"])


@installed
@pytest.mark.parametrize("tensor", [1, 2])
def test_grouped_experts(te_ranks: Ranks, tensor: int) -> None:
    """Each weight inside the grouped layers has the name, the record and the values of that expert's own layer."""
    config = config_of("moe", **layout_of(tensor))
    plain = te_ranks.run(tensor, transformer_engine.recorded, config=config)
    ours = te_ranks.run(tensor, transformer_engine.recorded, config=config, kernels=TE, grouped=True)
    check_the_same(plain, ours)
    for built in ours:
        assert "transformer_engine.pytorch.module.grouped_linear" in built["modules"]  # negative control


@installed
def test_the_model_of_the_gpu_checks(te_ranks: Ranks) -> None:
    """benchmarks/gpu.py compares losses of the same tensors."""
    plain, ours = (te_ranks.run(1, transformer_engine.benchmarked, kernels=kernels) for kernels in ("megatron", TE))
    check_the_same(plain, ours)
    assert any(module.startswith(TE) for module in ours[0]["modules"])  # negative control


def test_where_experts_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine's layers alone; asked for elsewhere it is refused, and `explain` has the same rows."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("mup_megatron.engines.setup.auto.importable", lambda package: True)

    def grouped(growth: dict[str, Any], **model: Any) -> Any:
        return resolve_auto(make(growth, "llama", **model)).model.moe_grouped_gemm

    assert grouped(MOE, model__transformer_impl=TE) is True
    assert grouped(MOE, model__transformer_impl=TE, model__moe_grouped_gemm=False) is False
    assert grouped(MOE) is False
    assert grouped(MIXED, model__transformer_impl=TE) is False
    with pytest.raises(ConfigError, match=r"model\.moe_grouped_gemm: the grouped matrix product is"):
        make(MOE, "llama", model__moe_grouped_gemm=True)
    with pytest.raises(ConfigError, match=r"model\.moe_grouped_gemm: belongs to a mixture of experts"):
        make(MIXED, "llama", model__moe_grouped_gemm=True, model__transformer_impl=TE)
    rows = [
        parametrize(make(MOE, "llama", model__transformer_impl=TE, model__moe_grouped_gemm=asked), 1000).tensors
        for asked in (True, False)
    ]
    assert {name: (row.group, row.shape.spec) for name, row in rows[0].items()} == {
        name: (row.group, row.shape.spec) for name, row in rows[1].items()
    }


@pytest.mark.parametrize("key", ["transformer_impl", "norm_implementation", "core_attention"])
def test_refused_where_it_cannot_compute(key: str) -> None:
    config = make(MIXED, "gpt3", **{f"model__{key}": TE})
    with pytest.raises(ConfigError, match=f"model.{key}: {TE} computes on CUDA alone"):
        resolve_auto(config)
