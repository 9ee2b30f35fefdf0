"""Where a record comes from: which code, which command, with what, on what machine, when, from which text.

Public names: `provenance`, `machine`, `commit`, `KEYS`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mup_megatron.util.files import read_text
from mup_megatron.util.secrets import masked_value

KEYS = ("commit", "command", "date", "processor", "python", "versions", "text")
"""What a record must tell of itself (`machine` tells more)."""
_PACKAGES = ("torch", "megatron-core", "deepspeed", "mup-megatron")
_ROOT = Path(__file__).resolve().parents[2]


def provenance(text: str | None) -> dict[str, Any]:
    """What a record tells of where it comes from.

    Args:
        text: digest of what was trained on; None where nothing was trained, or on files that this project did not make.

    Returns:
        Plain data.
    """
    return {"commit": commit(), "command": _command(), "text": text, **machine()}


def machine() -> dict[str, Any]:
    """Where and with what a result was measured."""
    import torch

    return {
        "date": str(datetime.date.today()),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
    }


def commit() -> str | None:
    """The checkout's commit, with -dirty where a tracked file differs; None where the library is no checkout."""
    if not (_ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None


def _command() -> str:
    """The command line, without the folders of this machine's programs, and without secrets."""
    spec, program = sys.modules["__main__"].__spec__, Path(sys.argv[0])
    if spec is not None:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        words = ["python", os.path.relpath(program)] if program.suffix == ".py" else [program.name]
    return shlex.join([*words, *map(masked_value, sys.argv[1:])])


def _processor() -> str:
    with suppress(OSError):
        for line in read_text("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
