"""Whether the installed wheel of megatron-core has megatron.training, and the mark of tests that need it."""

from __future__ import annotations

import importlib.util

import pytest

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
NO_TRAINING = "megatron.training ships with megatron-core 0.19 and later, which need Python 3.12"
needs_training = pytest.mark.skipif(not HAS_TRAINING, reason=NO_TRAINING)
