"""Maximal update parametrization (µP) for megatron-core and DeepSpeed, right under any sharding.

Importing this package imports neither torch, nor megatron-core, nor DeepSpeed: every module imports what it needs,
so that `mup-megatron --help` answers at once.
"""

__version__ = "0.1.0"
