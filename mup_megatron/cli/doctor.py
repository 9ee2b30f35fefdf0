"""What is installed, which patches are active, what is missing and what that costs.

Public names: `examine` (plain data), `print_examination`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from typing import Any

PACKAGES = ("torch", "megatron-core", "deepspeed", "sentencepiece", "optuna", "transformers", "tiktoken")

# What may be missing: name, how it is found, what it costs to do without.
_OPTIONAL = (
    ("CUDA device", "cuda", "training runs on the CPU, over gloo"),
    ("NVIDIA Apex", "apex", "no fused Apex LayerNorm and FusedAdam; torch's are used"),
    (
        "Transformer Engine",
        "transformer_engine",
        "no model.transformer_impl: transformer_engine; megatron-core's local layers and sdpa attention are used",
    ),
    ("emerging_optimizers", "emerging_optimizers", "no optimizer.name: muon or soap, and lion under DeepSpeed alone"),
    (
        "C++ compiler",
        "c++",
        "no optimizer.implementation deepspeed_cpu_adam (parallel.offload_optimizer needs it), nor deepspeed_lion",
    ),
)


def examine() -> dict[str, Any]:
    """Versions, devices, patches, what is missing. Applies the patches that this machine needs, as every run does."""
    import torch

    from mup_megatron.parallel import upstream

    upstream.prepare_deepspeed()
    from mup_megatron import megatron_training
    from mup_megatron.patches import ALL_PATCHES, active_patches
    from mup_megatron.patches.megatron_training import TRAINING_PATCHES, entry_patches

    active = active_patches()
    compiler = shutil.which(os.environ.get("CXX", "c++")) is not None
    known = {"cuda": torch.cuda.is_available(), "c++": compiler}
    there = {key: known[key] if key in known else upstream.importable(key) for _, key, _ in _OPTIONAL}
    return {
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["CPU"],
        "cores": os.cpu_count(),
        "patches": [
            {
                "name": patch.name,
                "symbol": patch.symbol,
                "versions": f"{patch.distribution} {patch.versions}",
                "active": patch.name in active,
                "why": patch.why,
                "under": under,
            }
            for under, patches in (
                ("every command", ALL_PATCHES),
                ("mup-megatron run", (*TRAINING_PATCHES, *entry_patches(megatron_training))),
            )
            for patch in patches
        ],
        "missing": [{"name": name, "costs": costs} for name, key, costs in _OPTIONAL if not there[key]],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_examination(examination: dict[str, Any], console: Any) -> None:
    """Prints what `examine` found. `console` is a rich Console."""
    from rich.table import Table

    installed = Table("package", "version", box=None, title="installed", title_justify="left")
    installed.add_row("Python", examination["python"])
    for package, version in examination["packages"].items():
        installed.add_row(package, version or "not installed")
    console.print(installed)
    console.print(f"devices: {', '.join(examination['devices'])}; {examination['cores']} cores", highlight=False)
    patches = Table("patch", "active", "symbol", "why", box=None, title="patches", title_justify="left")
    for patch in examination["patches"]:
        elsewhere = "no" if patch["under"] == "every command" else f"under {patch['under']}"
        patches.add_row(patch["name"], "yes" if patch["active"] else elsewhere, patch["symbol"], patch["why"])
    console.print(patches)
    if examination["missing"]:
        missing = Table("missing", "what that costs", box=None, title="not here", title_justify="left")
        for item in examination["missing"]:
            missing.add_row(item["name"], item["costs"])
        console.print(missing)
