"""How megatron-bridge is imported on a CPU. Imports nothing of megatron-core itself: the order is what matters."""

from __future__ import annotations

import importlib
import sys
import warnings

from mup_megatron.megatron_training.options import prepare
from mup_megatron.parallel import upstream


def with_bridge() -> None:
    """Imports megatron-core without Transformer Engine, whose optimizer computes on CUDA alone, and Bridge with it."""
    upstream.prepare_process()
    prepare()  # before Bridge takes functions by name that compute on CUDA alone
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    for package in upstream.CUDA_ONLY:
        if sys.modules.get(package, package) is None:
            del sys.modules[package]
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("megatron.bridge.training.setup")


def with_engine() -> None:
    """Imports both with Transformer Engine, whose layers recipes choose."""
    from tests.helpers.transformer_engine import prepare_with_it

    prepare_with_it()
    prepare()
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("megatron.bridge.training.setup")
