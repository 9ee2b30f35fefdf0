"""A search that begins at values that are known (`tuning.prior`). Public names: `with_prior`, `first_trial`, `told`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mup_megatron.config import Config, derive
from mup_megatron.config.study import Range
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.space import Value, short, value_of
from mup_megatron.util.errors import UserError


def with_prior(config: Config) -> Config:
    """The config with the ranges that `tuning.prior` leaves of `tuning.search`; as it is where there is none.

    A log_uniform range is cut to what it shares with `tuning.prior_factor` about the value. `uniform` and `choice`
    stay, and so does what the record did not tune.

    Raises:
        ConfigError: the record is not there, is none, or says nothing of what is searched; a range does not come near
            its value.
    """
    found = _known(config)
    if not found:
        return config
    search = {name: _narrowed(config, name, each, found.get(name)) for name, each in config.tuning.search.items()}
    return derive(config, {"tuning.search": {name: each.model_dump() for name, each in search.items()}})


def first_trial(config: Config) -> dict[str, Value]:
    """Values of the first trial: those that are known, or the nearest ends of the ranges. Empty without `tuning.prior`,
    and of a grid, whose points are what they are."""
    if config.tuning.sampler == "grid":
        return {}
    return {name: _inside(config.tuning.search[name], value) for name, value in _known(config).items()}


def told(config: Config) -> str | None:
    """The line that says what is taken, of a config from `with_prior`; None where nothing is."""
    parts = []
    for name, value in first_trial(config).items():
        cut = config.tuning.search[name].log_uniform
        around = f" (then {short(cut[0])} to {short(cut[1])})" if cut else ""
        parts.append(f"{name} {short(value)}{around}")
    return f"the first trial has the values of {config.tuning.prior}: {', '.join(parts)}" if parts else None


def _known(config: Config) -> dict[str, Value]:
    """By name: what the record's study chose, or what `hparams:` has, where that says something of what is searched."""
    prior, search = config.tuning.prior, config.tuning.search
    if prior is None:
        return {}
    values = {name: value_of(config, name) for name in search} if prior == "hparams" else _recorded(config, prior)
    found = {name: values[name] for name in search if name in values and _says(search[name], values[name])}
    if search and not found:
        raise config.error(
            "tuning.prior",
            f"{prior} says nothing of what is searched ({', '.join(search)}); expected another record, or null",
        )
    return found


_read: dict[str, Mapping[str, Value]] = {}
"""By path, what was read last: a worker that comes to lead needs it again, wherever the file has gone."""


def _recorded(config: Config, path: str) -> Mapping[str, Value]:
    try:
        _read[path] = TransferRecord.expect(Path(path), None).study.values
    except UserError as error:
        if path not in _read:
            raise config.error("tuning.prior", f"{error}; expected a transfer record, or hparams") from None
    return _read[path]


def _says(dimension: Range, value: Value) -> bool:
    """Whether it is one of the choices, or a number, of which a range in the logarithm takes positive ones."""
    if dimension.choice is not None:
        return value in dimension.choice
    return isinstance(value, int | float) and (value > 0 or dimension.log_uniform is None)


def _narrowed(config: Config, name: str, dimension: Range, value: float | None) -> Range:
    if dimension.log_uniform is None or value is None:
        return dimension
    low, high = dimension.log_uniform
    factor = config.tuning.prior_factor
    cut = [max(low, value / factor), min(high, value * factor)]
    if not cut[0] < cut[1]:
        raise config.error(
            f"tuning.search.{name}",
            f"{short(low)} to {short(high)} has nothing of {short(value)} divided and multiplied by {short(factor)} "
            f"(tuning.prior_factor), the value of {config.tuning.prior} (tuning.prior); expected a range around that",
        )
    return Range(log_uniform=cut)


def _inside(dimension: Range, value: Value) -> Value:
    """The value itself, or the end of the range that it lies beyond."""
    bounds = dimension.log_uniform or dimension.uniform
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])
