"""What may be tuned, and a config with values put in.

Public names: `with_values`, `values_of`, `value_of`, `in_config`, `same`, `most`, `key_of`, `keys_of`, `check_over`,
`check_overrides`, `proxy_config`, `bracket_of`, `trials_by_bracket`, `without_fitted`, `distributions`, `one_process`,
`stretched`, `short`, `WIDTH`, `STEPS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mup_megatron.config import BETAS, ONE_MINUS, TUNABLE, Config, Training, derive, one_minus
from mup_megatron.config.per_tensor import PerTensor, config_key, flat, split_name
from mup_megatron.data.prepare import data_directory
from mup_megatron.util.errors import UserError

if TYPE_CHECKING:
    import optuna

WIDTH, STEPS = 256, 5000
"""The least that Tensor Programs V, appendix D, advises for a proxy: hidden size, and training steps."""

Value = Any
"""Of a hyperparameter: a number, the name of a schedule, None for one that follows another."""


def short(value: Value) -> str:
    """A value with three digits; the name of a schedule as it is."""
    return value if isinstance(value, str) else f"{value:.3g}"


# Step counts of a schedule, which shrink and grow with the length of the run.
# Brackets of hyperband over slots, 4 : 3 : 3 as Optuna shares them among three brackets at reduction factor 2. Trials
# of bracket b may be stopped at the last 2 - b rungs only.
_BRACKETS = (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)
_STEP_COUNTS = ("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps")


def distributions(config: Config) -> dict[str, optuna.distributions.BaseDistribution]:
    """The config's search space in Optuna's terms, in the order of the config."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space: dict[str, optuna.distributions.BaseDistribution] = {}
    for name, dimension in config.tuning.search.items():
        bounds = dimension.log_uniform or dimension.uniform
        if bounds:
            space[name] = FloatDistribution(bounds[0], bounds[1], log=dimension.log_uniform is not None)
        else:
            space[name] = CategoricalDistribution(dimension.choice or [])
    return space


def values_of(config: Config) -> dict[str, Value]:
    """Every hyperparameter at the base as the config has it, and of what stands elsewhere what is tuned."""
    plain = config.hparams.model_dump(exclude={"per_tensor"})
    searched = {name: value_of(config, name) for name in config.tuning.search if name not in plain}
    return {**plain, **flat(config.hparams.per_tensor), **searched}


def key_of(name: str) -> str:
    """The config's key of a hyperparameter: hparams.lr, hparams.per_tensor.embedding.lr, training.lr_schedule."""
    return config_key(name) if split_name(name) is not None else TUNABLE[name]


def value_of(config: Config, name: str) -> Value:
    """A hyperparameter as the config has it, tuned or not; a factor of `per_tensor` is 1 where it is not said."""
    if (parts := split_name(name)) is not None:
        entry = config.hparams.per_tensor.get(parts[0], PerTensor())
        return getattr(entry, parts[1])
    if name in BETAS:
        return one_minus(config.optimizer.betas[BETAS.index(name)])
    if name in ONE_MINUS:
        return one_minus(config.optimizer.momentum)
    return getattr(getattr(config, TUNABLE[name].partition(".")[0]), name)


def in_config(name: str, value: Value) -> Value:
    """A value as the config has it under `key_of`: β, of 1 - β."""
    return one_minus(value) if name in ONE_MINUS and not isinstance(value, str) else value


def same(name: str, one: Value, other: Value) -> bool:
    """Whether two values of a hyperparameter are one in a config."""
    return bool(in_config(name, one) == in_config(name, other))


def most(name: str) -> float:
    """The largest value that a hyperparameter can have."""
    return 1.0 if name in ONE_MINUS else math.inf


def check_over(config: Config, over: str) -> None:
    """Raises UserError where what `--over` names is nothing that the optimizer reads."""
    if what := config.optimizer.lacks(over):
        raise UserError(f"--over: {over}: moves nothing: optimizer.name {config.optimizer.name} has no {what}")


def check_overrides(config: Config, allowed: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a value on the command line that tuning would replace."""
    begins = config.tuning.prior == "hparams" and config.tuning.sampler != "grid"  # whose points are what they are
    for name, dimension in config.tuning.search.items():
        if begins and (dimension.choice is None or value_of(config, name) in dimension.choice):
            continue  # it is where the search begins
        if config.is_overridden(key := key_of(name)) and key not in allowed:
            raise config.error(
                key,
                f"{in_config(name, value_of(config, name))} is given, but tuning would take its place (tuning.search); "
                "expected no such override, or `train`, which trains with the values of hparams:, or pipeline "
                f"--allow-change {key}, which trains the target with it whatever is tuned",
            )


def with_values(config: Config, values: Mapping[str, Value]) -> Config:
    """The config with hyperparameters replaced.

    Args:
        config: the run.
        values: by the names of `config.TUNABLE`, and factors of `per_tensor`.

    Raises:
        KeyError: a name is none of these.
        ConfigError: a value is none that the config may have.
    """
    return derive(config, keys_of(values))


def keys_of(values: Mapping[str, Value]) -> dict[str, Value]:
    """Hyperparameters by the config's keys. Raises KeyError for a name that is none."""
    if unknown := {name for name in values if name not in TUNABLE and split_name(name) is None}:
        raise KeyError(f"not hyperparameters: {', '.join(sorted(unknown))}")
    return {key_of(name): in_config(name, value) for name, value in values.items()}


def tuning_steps(config: Config) -> int:
    """Optimizer steps of a whole trial: `tuning.train_steps`, else as many as the target's."""
    return config.tuning.train_steps or config.training.train_steps


def rungs(config: Config) -> list[int]:
    """Steps at which a trial may be stopped: steps / r², rounded down, and r times as many; empty without pruner."""
    if config.tuning.pruner == "none":
        return []
    interval = rung_interval(config)
    found = [interval, interval * config.tuning.reduction_factor]
    return [step for step in found if step < tuning_steps(config)]


def bracket_of(config: Config, slot: int) -> int:
    """Hyperband's bracket of a slot: how many of the first rungs its trials pass unjudged; 0 under another pruner."""
    return _BRACKETS[slot % len(_BRACKETS)] if config.tuning.pruner == "hyperband" else 0


def trials_by_bracket(config: Config) -> dict[int, int]:
    """How many of the planned trials are in each bracket."""
    found: dict[int, int] = {}
    for slot in range(period := len(_BRACKETS)):
        bracket = bracket_of(config, slot)
        found[bracket] = found.get(bracket, 0) + len(range(slot, config.tuning.trials, period))
    return found


def rung_interval(config: Config) -> int:
    """Steps between evaluations (and checkpoints) of a trial."""
    return max(1, tuning_steps(config) // config.tuning.reduction_factor**2)


def proxy_config(
    config: Config, values: Mapping[str, Value], *, seed: int, directory: Path, cache: Path | None = None
) -> Config:
    """The run of one trial: the proxy on one process, everything else as the target has it.

    The schedule keeps its shape: where the proxy's run is shorter or longer than the target's, warm-up and decay take
    the same share of it.

    Args:
        config: the target's run.
        values: hyperparameters of the trial.
        seed: of initial values and of the order of the data.
        directory: where the trial lives.
        cache: where megatron-core keeps the index of its samples; one per process that writes it.
    """
    tuning, training, interval = config.tuning, config.training, rung_interval(config)
    return derive(
        config,
        {
            **keys_of(values),
            **_schedule(training, tuning_steps(config)),
            **({} if config.tuning.command else _one_process(config)),
            **without_fitted(config),
            "run.samples": [],
            "run.name": f"{config.run.name}, {directory.name}",
            "run.dir": str(directory),
            "run.seed": seed,
            # Of learned positions the proxy has as many as the target, whatever the length of its sequences.
            "model": {**config.proxy_model.model_dump(), "max_position_embeddings": config.max_position_embeddings}
            if tuning.seq_length
            else config.proxy_model.model_dump(),
            "training.global_batch_size": tuning.global_batch_size or training.global_batch_size,
            "training.seq_length": tuning.seq_length or training.seq_length,
            "training.micro_batch_size": tuning.micro_batch_size or training.micro_batch_size,
            "training.eval_interval": interval,
            "training.checkpoint_interval": interval,
            "training.checkpoints_kept": 1,
            "data.dir": str(data_directory(config)),
            "data.cache_dir": str(cache) if cache else None,
        },
    )


def without_fitted(config: Config) -> dict[str, str]:
    """Keys that take out what a ladder says: of trials, at whose batch and tokens it is nothing."""
    return {f"parametrization.{name}": "none" for name in config.parametrization.fitted}


def stretched(config: Config, steps: int) -> Config:
    """The config with another number of steps; warm-up and decay keep their share of them, and so their shape."""
    return derive(config, _schedule(config.training, steps))


def _schedule(training: Training, steps: int) -> dict[str, Any]:
    scaled = {
        f"training.{name}": max(1, round(count * steps / training.train_steps))
        for name in _STEP_COUNTS
        if (count := getattr(training, name))
    }
    milestones = sorted({max(1, round(step * steps / training.train_steps)) for step in training.lr_milestones})
    return {**scaled, "training.lr_milestones": milestones, "training.train_steps": steps}


def one_process(config: Config) -> Config:
    """The config on one process, unsplit. The DeepSpeed engine's numbers are those of every layout and engine.

    A run of megatron.training (`tuning.command`) stays in its own layout.
    """
    return derive(config, {"run.samples": []} if config.tuning.command else _one_process(config))


def _one_process(config: Config) -> dict[str, Any]:
    parallel, optimizer = config.parallel, config.optimizer
    of_megatron = config.steps_matrices  # which the Megatron engine alone has
    section = {
        "engine": "megatron" if of_megatron else "deepspeed",
        "tensor_model_parallel_size": 1,
        "zero_stage": 1,  # bf16 needs a partitioned optimizer
        "use_distributed_optimizer": not of_megatron and parallel.use_distributed_optimizer,
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
    }
    # What offloads is DeepSpeed's, and whose SGD megatron-core takes is its own business.
    anew = parallel.offload_optimizer or (optimizer.name == "sgd" and parallel.engine == "megatron")
    return {
        "parallel": section,
        "optimizer.implementation": "auto" if anew else optimizer.implementation,
        "run.samples": [],
    }
