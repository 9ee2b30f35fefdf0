"""Which values a study tries. Public names: `sampler`, `points`, `suggest`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from mup_megatron.config import Config
from mup_megatron.tuning.space import Value, distributions


def sampler(config: Config, slot: int = 0) -> optuna.samplers.BaseSampler:
    """The config's sampler; one that learns from trials that ended (tpe) draws something else for every slot."""
    if config.tuning.sampler == "tpe":
        seed = random.Random(f"{config.run.seed} {slot}").getrandbits(32)  # noqa: S311  (no secret)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed=config.run.seed)


def points(config: Config) -> list[dict[str, Value]]:
    """Values of the trials of the plan, by slot; empty where the sampler learns from trials that ended (tpe).

    There are `tuning.trials` of them, fewer where a grid has fewer.
    """
    space, count = distributions(config), config.tuning.trials
    if config.tuning.sampler == "tpe":
        return [{} for _ in range(count)]
    if config.tuning.sampler == "grid":
        choices = [config.tuning.search[name].choice or [] for name in space]
        found = [dict(zip(space, point, strict=True)) for point in itertools.product(*choices)]
        random.Random(config.run.seed).shuffle(found)  # noqa: S311  (no secret)
        return found[:count]
    study = optuna.create_study(sampler=sampler(config))
    return [dict(study.ask(dict(space)).params) for _ in range(count)]


def suggest(trial: optuna.trial.Trial, space: Mapping[str, BaseDistribution]) -> None:
    """Has Optuna draw a trial's values, or take those that were enqueued with it."""
    for name, distribution in space.items():
        if isinstance(distribution, FloatDistribution):
            trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
        elif isinstance(distribution, CategoricalDistribution):
            trial.suggest_categorical(name, distribution.choices)
