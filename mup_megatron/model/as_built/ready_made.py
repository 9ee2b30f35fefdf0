"""Entries for layers that no rule of this project is tested for: their tensors keep the standard parametrization.

Public names: `READY_MADE`, `READY_FOR`.

Published rules exist: for Mamba by Vankadara et al. ("On Feature Learning in Structured State Space Models", NeurIPS
2024), for gated delta nets by Liu and Gu (arXiv 2606.04048). The first are of Mamba-1, and megatron-core's mixer is
Mamba-2; neither was checked here against its authors' numbers. Both papers find that the standard parametrization does
not transfer such layers' rates, so a user has to ask for it by name.
"""

from __future__ import annotations

from collections.abc import Mapping

# The two linear layers are drawn by the config's init methods, whose place the rules take; the rest by the layer.
_MIXER = """
- {{module: {module}, parameter: in_proj.weight, kind: standard, init: weight}}
- {{module: {module}, parameter: out_proj.weight, kind: standard, init: output_projection}}
- {{module: {module}, parameter: '*', kind: standard}}
"""
_INDEXER = """
- {module: DSAIndexer, parameter: linear_wq_b.weight, kind: standard, init: weight}
- {module: DSAIndexer, parameter: linear_wk.weight, kind: standard, init: weight}
- {module: DSAIndexer, parameter: linear_weights_proj.weight, kind: standard, init: weight}
- {module: DSAIndexer, parameter: '*', kind: standard}
"""

READY_MADE: Mapping[str, str] = {
    "standard:mamba": _MIXER.format(module="MambaMixer"),
    "standard:gated-delta-net": _MIXER.format(module="GatedDeltaNet"),
    "standard:dsa-indexer": _INDEXER,
}
"""The text of a file of `--mup-tensors`, by the word that stands for it."""

READY_FOR: Mapping[str, str] = {
    "MambaMixer": "standard:mamba",
    "GatedDeltaNet": "standard:gated-delta-net",
    "DSAIndexer": "standard:dsa-indexer",
}
"""The word, by the class whose tensors it is about."""
