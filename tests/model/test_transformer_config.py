"""What TransformerConfig is told of kernels, by the device and by what is installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest
import torch

from mup_megatron.model.build import parametrize
from mup_megatron.model.transformer_config import core_config
from mup_megatron.parallel.layout import resolve_layout
from tests.helpers.configs import MIXED, VOCABULARY, make


@pytest.mark.parametrize(("device", "built", "fused"), [("cpu", 3, False), ("cuda", 2, False), ("cuda", 3, True)])
def test_softmax_is_fused_where_all_its_extensions_are(
    monkeypatch: pytest.MonkeyPatch, device: str, built: int, fused: bool
) -> None:
    """Upstream imports them when it computes in 16 bits (fused_softmax.py); an H100 without Apex's found that."""
    names = [
        f"{kind}_cuda" for kind in ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax")
    ]
    there, find = names[:built], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: importlib.machinery.ModuleSpec(name, None) if name in there else find(name, *more),
    )
    config = make(MIXED)
    forward = parametrize(config, VOCABULARY).forward
    core = core_config(config, config.model, forward, resolve_layout(config, 1), torch.device(device))
    assert core.masked_softmax_fusion is fused
