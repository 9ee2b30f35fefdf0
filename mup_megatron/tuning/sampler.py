"""Which values a study tries. Public names: `sampler`, `points`, `suggest`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from mup_megatron.config import Config
from mup_megatron.tuning.prior import first_trial
from mup_megatron.tuning.space import Value, distributions


def sampler(config: Config, slot: int = 0) -> optuna.samplers.BaseSampler:
    """The config's sampler. One that learns from trials that ended (tpe) gets a random seed of its own per slot."""
    if config.tuning.sampler == "tpe":
        seed = random.Random(f"{config.run.seed} {slot}").getrandbits(32)  # noqa: S311  (no secret)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed=config.run.seed)


def points(config: Config) -> list[dict[str, Value]]:
    """Values of the trials of the plan, by slot; empty where the sampler learns from trials that ended (tpe).

    There are `tuning.trials` of them, fewer where a grid has fewer. The first has the values of `tuning.prior`.
    """
    found = _points(config)
    return [{**first, **first_trial(config)} for first in found[:1]] + found[1:]


def _points(config: Config) -> list[dict[str, Value]]:
    space, count = distributions(config), config.tuning.trials
    if config.tuning.sampler == "tpe":
        return [{} for _ in range(count)]
    if config.tuning.sampler == "grid":
        choices = [config.tuning.search[name].choice or [] for name in space]
        found = [dict(zip(space, point, strict=True)) for point in itertools.product(*choices)]
        random.Random(config.run.seed).shuffle(found)  # noqa: S311  (no secret)
        return found[:count]
    if config.tuning.sampler == "quasi_random":
        return _sobol(space, count, config.run.seed)
    study = optuna.create_study(sampler=sampler(config))
    return [dict(study.ask(dict(space)).params) for _ in range(count)]


def _sobol(space: Mapping[str, BaseDistribution], count: int, seed: int) -> list[dict[str, Value]]:
    """Points of a scrambled Sobol sequence: of 2^k of them, each 2^k-th part of every range holds exactly one."""
    import torch

    engine = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=seed)
    return [
        {name: _at(distribution, part) for (name, distribution), part in zip(space.items(), row, strict=True)}
        for row in engine.draw(count, dtype=torch.float64).tolist()
    ]


def _at(distribution: Any, part: float) -> Value:
    """The value that lies so far along a dimension, from 0 to below 1."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(part * len(distribution.choices))]
    if not distribution.log:
        return distribution.low + part * (distribution.high - distribution.low)
    return math.exp(math.log(distribution.low) + part * math.log(distribution.high / distribution.low))


def suggest(trial: optuna.trial.Trial, space: Mapping[str, BaseDistribution]) -> None:
    """Has Optuna draw a trial's values, or take those that were enqueued with it."""
    for name, distribution in space.items():
        if isinstance(distribution, FloatDistribution):
            trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
        elif isinstance(distribution, CategoricalDistribution):
            trial.suggest_categorical(name, distribution.choices)
