"""Maximal update parametrization (µP) for megatron-core and DeepSpeed, right under any sharding.

Importing this package imports neither torch, nor megatron-core, nor DeepSpeed: every module imports what it needs,
so that `mup-megatron --help` answers at once.
"""

from pathlib import Path as _Path

__version__ = "0.1.0"

# `mup_megatron.patches` lies inside the package in a wheel (setup.py puts it there), and beside it in a checkout.
if not _Path(__file__).with_name("patches").is_dir():
    __path__.append(str(_Path(__file__).resolve().parent.parent))
