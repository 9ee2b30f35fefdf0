"""What a process does before it uses megatron-core and DeepSpeed; the one place that applies patches.

Public names: `prepare_process`, `prepare_deepspeed`, `quiet`, `importable`, `inference_mode`, `CUDA_ONLY`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import warnings

CUDA_ONLY = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
"""Packages that compute on CUDA alone."""


def prepare_process() -> None:
    """Applies the patches that this machine needs of megatron-core and torch.

    Idempotent; call before building anything. DeepSpeed's are `prepare_deepspeed`'s: a command that reads a config does
    without DeepSpeed's imports.

    Without CUDA, packages that compute on CUDA alone are as good as not installed: megatron-core takes their optimizer
    and norm kernels where it can import them.
    """
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        for package in CUDA_ONLY:
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # an import of it raises ImportError
    _apply(of_deepspeed=False, cuda=cuda)


def prepare_deepspeed() -> None:
    """`prepare_process`, and the patches of DeepSpeed, which they import. Before its communication starts."""
    prepare_process()
    import torch

    _apply(of_deepspeed=True, cuda=torch.cuda.is_available())


def _apply(*, of_deepspeed: bool, cuda: bool) -> None:
    from mup_megatron.patches import ALL_PATCHES, apply_patches

    apply_patches([each for each in ALL_PATCHES if (each.distribution == "deepspeed") is of_deepspeed], cuda=cuda)


def quiet() -> None:
    """Silences the warnings of upstream's modules in a process that runs a command of ours; upstream's errors stay.

    A user of the command can do nothing about them. `python -W` shows them all the same. A script of megatron.training
    keeps its warnings.
    """
    for logger in ("DeepSpeed", "megatron", "megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(deepspeed|megatron|torch)(\..*)?$")


def importable(package: str) -> bool:
    """Whether the package is there; for `apex`, whether it is NVIDIA's (PyPI's apex is another project)."""
    if importlib.util.find_spec(package) is None:
        return False
    return package != "apex" or importlib.util.find_spec("apex.normalization") is not None


def inference_mode() -> contextlib.AbstractContextManager[None]:
    """What tells megatron-core that logits after the last token suffice: 0.19 has a flag, 0.16 looks at the context."""
    from megatron.core.inference import utils

    flag = getattr(utils, "InferenceMode", None)
    return flag.active() if flag else contextlib.nullcontext()
