"""Transformer Engine's modules in the local spec's places: same names, same records, same initial values, any layout.

They compute on CUDA alone (benchmarks/gpu.py compares losses there); built they are on any machine that has them.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mup_megatron import upstream
from mup_megatron.data.prepare import prepare
from mup_megatron.errors import ConfigError
from mup_megatron.model import parametrize
from mup_megatron.setup import resolve_auto
from tests import bodies
from tests.configs import MIXED, MLA, MOE, make
from tests.distributed import Ranks

TE = "transformer_engine"
found = importlib.machinery.PathFinder.find_spec(TE)  # which looks past sys.modules, where it may be hidden
installed = pytest.mark.skipif(found is None, reason="Transformer Engine is not installed")
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt3": ("gpt3", MIXED, {}),
    "llama": ("llama", MIXED, {"model__qk_layernorm": True}),
    "moe": ("llama", MOE, {}),
    "mla": ("llama", MLA, {}),
    "mtp": ("llama", MIXED, {"model__mtp_num_layers": 1}),
}


def config_of(model: str, **overrides: Any) -> Any:
    architecture, growth, own = MODELS[model]
    config = make(growth, architecture, **own, **overrides)
    prepare(config)
    return config


def prepare_with_it() -> None:
    """As for any rank, but for what would hide it: imported already it stays, and with it its norm of gradients."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    clip_grads.l2_norm_impl = local_multi_tensor_l2_norm
    upstream.prepare_process()


@pytest.fixture(scope="module")
def te_ranks() -> Iterator[Ranks]:
    ranks = Ranks(prepare_with_it)
    yield ranks
    ranks.close()


@installed
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_tensors(te_ranks: Ranks, model: str, tensor: int) -> None:
    layout = {"parallel__tensor_model_parallel_size": tensor, "parallel__sequence_parallel": tensor > 1}
    config = config_of(model, **layout)
    plain = te_ranks.run(tensor, bodies.built, config=config)
    ours = te_ranks.run(tensor, bodies.built, config=config, kernels=TE)
    for theirs, built in zip(plain, ours, strict=True):
        assert list(theirs["values"]) == list(built["values"])
        for name, value in theirs["values"].items():
            np.testing.assert_array_equal(built["values"][name], value, err_msg=name)
        assert built["marks"] == theirs["marks"]
        assert any(module.startswith(TE) for module in built["modules"])  # negative control: it is Transformer Engine's
        assert not any(module.startswith(TE) for module in theirs["modules"])


@installed
@pytest.mark.parametrize("tensor", [1, 2])
def test_grouped_experts(te_ranks: Ranks, tensor: int) -> None:
    """Each weight inside the grouped layers has the name, the record and the values of that expert's own layer."""
    layout = {"parallel__tensor_model_parallel_size": tensor, "parallel__sequence_parallel": tensor > 1}
    config = config_of("moe", **layout)
    plain = te_ranks.run(tensor, bodies.built, config=config)
    ours = te_ranks.run(tensor, bodies.built, config=config, kernels=TE, grouped=True)
    for theirs, built in zip(plain, ours, strict=True):
        assert sorted(theirs["values"]) == sorted(built["values"])
        for name, value in theirs["values"].items():
            np.testing.assert_array_equal(built["values"][name], value, err_msg=name)
        assert built["marks"] == theirs["marks"]
        assert "transformer_engine.pytorch.module.grouped_linear" in built["modules"]  # negative control


def test_where_experts_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine's layers alone; asked for elsewhere it is refused, and `explain` has the same rows."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("mup_megatron.setup.auto.importable", lambda package: True)

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
