"""The one schema of a run (`Config` and its sections) and how it is read (`load_config`).

An unknown key is an error that names the nearest known one. This package imports nothing of the project but `errors`.
"""

from mup_megatron.config.growth import GrowingSize, growing_sizes
from mup_megatron.config.load import derive, load_config, parse_config, parse_overrides, parse_yaml
from mup_megatron.config.model import OF_EXPERTS
from mup_megatron.config.schema import Base, Config, Data, Growth, Hparams, Model, Optimizer, Parallel, Training
from mup_megatron.config.training import BETAS, ONE_MINUS, PARAMETRIZATIONS, PLANE, TUNABLE, one_minus

__all__ = [
    "BETAS",
    "OF_EXPERTS",
    "ONE_MINUS",
    "PARAMETRIZATIONS",
    "PLANE",
    "TUNABLE",
    "Base",
    "Config",
    "Data",
    "GrowingSize",
    "Growth",
    "Hparams",
    "Model",
    "Optimizer",
    "Parallel",
    "Training",
    "derive",
    "growing_sizes",
    "load_config",
    "one_minus",
    "parse_config",
    "parse_overrides",
    "parse_yaml",
]
