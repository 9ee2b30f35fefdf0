"""Whether the library works here, what is missing and what that costs, what is installed, which patches are active.

Public names: `examine` (plain data), `print_examination`, `print_everything`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from typing import Any, NamedTuple

from mup_megatron import __version__

PACKAGES = ("torch", "megatron-core", "deepspeed", "sentencepiece", "optuna", "transformers", "tiktoken", "sacrebleu")


class Part(NamedTuple):
    """What a machine may do without. With the costs, and with what gets it, a line of a screen each.

    Args:
        name: for people.
        key: how it is found.
        costs: what does not work, or works otherwise, without it.
        get: what to type, or to have.
    """

    name: str
    key: str
    costs: str
    get: str


PARTS = (
    Part(
        "CUDA device",
        "cuda",
        "training runs on the CPU, over gloo",
        "a GPU that nvidia-smi lists, and a torch that is built for CUDA",
    ),
    Part(
        "Transformer Engine",
        "transformer_engine",
        "none of its layers, nor of its attention; local ones",
        "with CUDA: pip install --no-build-isolation 'transformer_engine[pytorch]'",
    ),
    Part(
        "NVIDIA Apex",
        "apex",
        "no fused Apex LayerNorm and FusedAdam; torch's are used",
        "with CUDA: from source, with its CUDA extensions: github.com/NVIDIA/apex",
    ),
    Part(
        "emerging_optimizers",
        "emerging_optimizers",
        "no muon or soap; lion under DeepSpeed alone",
        "with Python 3.12 or newer: pip install 'mup-megatron[muon]'",
    ),
    Part(
        "C++ compiler",
        "c++",
        "no deepspeed_cpu_adam (offloaded optimizer), no deepspeed_lion",
        "sudo apt-get install -y g++ python3-dev",
    ),
    Part(
        "transformers",
        "transformers",
        "no huggingface tokenizer; import compares no logits",
        "pip install 'mup-megatron[tokenizers]'",
    ),
    Part("tiktoken", "tiktoken", "no tiktoken tokenizer", "pip install 'mup-megatron[tokenizers]'"),
    Part("sacrebleu", "sacrebleu", "no BLEU of translations", "pip install 'mup-megatron[bleu]'"),
)


def examine() -> dict[str, Any]:
    """Versions, devices, patches, what is missing. Applies the patches that this machine needs, as every run does."""
    examined = {
        "version": __version__,
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "cores": os.cpu_count(),
        "problems": _unmet(),
        "devices": [],
        "patches": [],
        "missing": [],
    }
    if examined["problems"]:
        return examined  # what follows imports them
    import torch

    from mup_megatron.parallel import upstream
    from mup_megatron.patches.patch import PatchError

    try:
        upstream.prepare_deepspeed()
    except PatchError as error:
        return {**examined, "problems": [str(error)]}
    compiler = shutil.which(os.environ.get("CXX", "c++")) is not None
    known = {"cuda": torch.cuda.is_available(), "c++": compiler}
    there = {key: known[key] if key in known else upstream.importable(key) for _, key, _, _ in PARTS}
    return {
        **examined,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["CPU"],
        "patches": _patches(),
        "missing": [{"name": part.name, "costs": part.costs, "get": part.get} for part in PARTS if not there[part.key]],
    }


def _unmet() -> list[str]:
    """What this package requires and does not find, a sentence each; nothing is known of a tree that is not installed.

    It reads what was installed and imports none of it.
    """
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in importlib.metadata.requires("mup-megatron") or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for each in needed:
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        version = _version(each.name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            is_there = "is not installed" if version is None else f"is {version}"
            found.append(f"{each.name} {is_there}; expected: pip install '{each.name}{each.specifier}'")
    return found


def _patches() -> list[dict[str, Any]]:
    from mup_megatron import megatron_training
    from mup_megatron.patches import ALL_PATCHES, active_patches
    from mup_megatron.patches.megatron_training import TRAINING_PATCHES, entry_patches

    active = active_patches()
    return [
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
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_examination(examination: dict[str, Any], console: Any) -> None:
    """Prints the verdict, then what is missing: a screen. `console` is a rich Console."""
    verdict = f"mup-megatron {examination['version']}"
    if examination["problems"]:
        lines = [f"not ready: {verdict} does not work here", *examination["problems"]]
    else:
        counts = Counter(examination["devices"])
        devices = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
        packages = (f"{package} {examination['packages'][package]}" for package in PACKAGES[:3])
        lines = [
            f"ready: what {verdict} needs is here, and its patches fit it",
            f"Python {examination['python']}, {', '.join(packages)}",
            f"devices: {devices}; {examination['cores']} cores",
        ]
    if examination["missing"]:
        lines.append("not here, what that costs, and how to get it:")
    for item in examination["missing"]:
        lines += [f"  {item['name']}: {item['costs']}", f"      {item['get']}"]
    for line in [*lines, "all packages and patches: mup-megatron doctor --all"]:
        console.print(line, highlight=False)


def print_everything(examination: dict[str, Any], console: Any) -> None:
    """Prints every package and every patch that `examine` found. `console` is a rich Console."""
    from rich.table import Table

    installed = Table("package", "version", box=None, title="installed", title_justify="left")
    for package, version in examination["packages"].items():
        installed.add_row(package, version or "not installed")
    console.print(installed)
    patches = Table("patch", "active", "symbol", "why", box=None, title="patches", title_justify="left")
    for patch in examination["patches"]:
        elsewhere = "no" if patch["under"] == "every command" else f"under {patch['under']}"
        patches.add_row(patch["name"], "yes" if patch["active"] else elsewhere, patch["symbol"], patch["why"])
    console.print(patches)
