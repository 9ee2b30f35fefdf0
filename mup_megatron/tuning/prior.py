"""A search that begins at values that are known (`tuning.prior`). Public names: `with_prior`, `first_trial`."""

from __future__ import annotations

from pathlib import Path

from mup_megatron.config import Config, derive
from mup_megatron.config.study import Range
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.space import Value, short, value_of

_FACTOR = 4.0
"""A log_uniform range is cut to a quarter and four times of the value that is known."""


def with_prior(config: Config) -> Config:
    """The config with the ranges that `tuning.prior` leaves of `tuning.search`; as it is where there is none.

    A range is cut to what it shares with a quarter to four times of the value. `uniform` and `choice` stay, and so does
    what the record did not tune.

    Raises:
        UserError: the record is not there, or is none.
        ConfigError: a range does not come near the value.
    """
    found = _known(config)
    search = {name: _narrowed(config, name, each, found.get(name)) for name, each in config.tuning.search.items()}
    if not found:
        return config
    return derive(config, {"tuning.search": {name: each.model_dump() for name, each in search.items()}})


def first_trial(config: Config) -> dict[str, Value]:
    """Values of the first trial: those that are known, or the nearest ends of the ranges. None without `tuning.prior`,
    and of a grid, whose points are what they are."""
    found = {} if config.tuning.sampler == "grid" else _known(config)
    near = {name: _inside(each, found.get(name)) for name, each in config.tuning.search.items()}
    return {name: value for name, value in near.items() if value is not None}


def _known(config: Config) -> dict[str, Value]:
    """By name: what the record's study chose, or what `hparams:` has."""
    if config.tuning.prior is None:
        return {}
    if config.tuning.prior == "hparams":
        return {name: value_of(config, name) for name in config.tuning.search}
    return TransferRecord.expect(Path(config.tuning.prior), None).study.values


def _narrowed(config: Config, name: str, dimension: Range, value: Value) -> Range:
    if dimension.log_uniform is None or not isinstance(value, int | float):
        return dimension
    low, high = dimension.log_uniform
    cut = [max(low, value / _FACTOR), min(high, value * _FACTOR)]
    if not cut[0] < cut[1]:
        raise config.error(
            f"tuning.search.{name}",
            f"{short(low)} to {short(high)} has nothing of a quarter to four times {short(value)}, the value of "
            f"{config.tuning.prior} (tuning.prior); expected a range around that",
        )
    return Range(log_uniform=cut)


def _inside(dimension: Range, value: Value) -> Value:
    """The value itself, or the end of the range that it lies beyond; None where it is none of the choices."""
    bounds = dimension.log_uniform or dimension.uniform
    if bounds is None:
        return value if value in (dimension.choice or []) else None
    return min(max(value, bounds[0]), bounds[1]) if isinstance(value, int | float) else None
