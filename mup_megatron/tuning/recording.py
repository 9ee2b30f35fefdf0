"""The transfer record of a study that has ended: what each value becomes on the target, and where that is extrapolated.

Public names: `make_record`, `becomes`, `extrapolated`, `other_settings`, `not_transferred`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mup_megatron.config import Config, derive
from mup_megatron.config.per_tensor import split_name
from mup_megatron.model.explain import explain
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.shapes import without_numbers
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.family import digest, digested
from mup_megatron.tuning.fitted import Fitted, told
from mup_megatron.tuning.predicted import predicted
from mup_megatron.tuning.record import TransferRecord
from mup_megatron.tuning.space import Value, proxy_config, values_of, without_fitted

_PACKAGES = ("torch", "megatron-core", "deepspeed", "optuna", "mup-megatron")


def becomes(parametrization: Parametrization, layout: Layout) -> dict[str, Any]:
    """What a config's hyperparameters are on its model: the forward multipliers, and a row per kind of tensor."""
    explained = explain(parametrization, layout)
    rows: dict[str, dict[str, Any]] = {}
    for parameter in explained["parameters"]:
        blocks = parameter["blocks"]
        std = {block["name"]: block["init_std"] for block in blocks} if blocks else parameter["init_std"]
        rows.setdefault(
            without_numbers(parameter["name"]),
            {
                "lr": parameter["lr"],
                "lr_multiplier": parameter["lr_multiplier"],
                "init": parameter["init"],
                "init_std": std,
                "eps": parameter["eps"],
                "weight_decay": parameter["weight_decay"],
            },
        )
    return {"forward": explained["forward"], "tensors": rows}


def extrapolated(config: Config, found: TransferRecord | None = None) -> list[str]:
    """In what the target lies beyond what the proxy was tuned on, besides width, in words.

    Args:
        config: the target's run.
        found: the record whose values it takes; None for one that is tuned as the config says.
    """
    tuned = _tuned_on(config) if found is None else found.proxy.trained
    target = _trained(config)
    said = []
    for name in ("train_steps", "global_batch_size", "seq_length", "tokens", "num_layers"):
        small, large = tuned.get(name), target[name]
        if small is not None and small != large:
            factor = large / small
            times = f" ({factor:.3g} times)" if factor >= 2 else f" (1/{1 / factor:.3g})" if factor <= 0.5 else ""
            said.append(f"{_MEASURES[name]}: tuned at {small:,}, target at {large:,}{times}")
    return said + other_settings(config, found)


def other_settings(config: Config, found: TransferRecord | None) -> list[str]:
    """Which settings of the schedule and of clipping are not those that the record's values were tuned with, in words.

    A best rate is one under its schedule: without warm-up or clipping, or with a rate that does not fall, another one
    is best. Steps are compared as shares of the run, as `proxy_config` scales them, and told where one is more than a
    quarter above the other. What was tuned itself is the record's.

    Args:
        config: the target's run.
        found: the record whose values it takes; None for one that is tuned as the config says.
    """
    if found is None:
        return []
    tuned, target, said = found.proxy.settings, _settings(config), []
    for name in target.keys() & tuned.keys() - set(found.tuned):
        before, now, unit = tuned[name], target[name], ""
        if name in _SHARES:
            if _alike(before, now):
                continue
            before, now, unit = _shares(before), _shares(now), " of the steps"
        if before != now:
            said.append(f"training.{name}: tuned with {before}{unit}, target with {now}{unit}")
    return sorted(said)


_SHARES = ("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps", "lr_milestones")
"""Of the settings those that are steps, kept as shares of a run."""
_OWN = {"multi-step": ("lr_milestones", "lr_gamma"), "WSD": ("lr_wsd_decay_style",)}
"""Settings that one schedule alone has."""


def _alike(before: Any, now: Any) -> bool:
    """Whether no share is more than a quarter above the other's."""
    pairs = [sorted(pair) for pair in zip_longest(_listed(before), _listed(now), fillvalue=math.inf)]
    return all(large <= 1.25 * small for small, large in pairs)


def _shares(value: Any) -> str:
    return ", ".join(f"{share:.3g}" for share in _listed(value))


def _listed(value: Any) -> list[float]:
    return [float(share) for share in (value if isinstance(value, list) else [value])]


def _settings(config: Config) -> dict[str, Any]:
    """Of the schedule and of clipping, what proxy and target have alike where one config describes both."""
    training = config.training
    steps = {name: getattr(training, name) or 0 for name in _SHARES if name != "lr_milestones"}
    steps["lr_decay_steps"] = steps["lr_decay_steps"] or training.train_steps
    own = {name: getattr(training, name) for name in _OWN.get(training.lr_schedule, ())}
    if "lr_milestones" in own:
        own["lr_milestones"] = [step / training.train_steps for step in training.lr_milestones]
    return {
        "lr_schedule": training.lr_schedule,
        "lr_warmup_init": training.lr_warmup_init,
        **own,
        "min_lr_ratio": training.min_lr_ratio,
        "clip_grad": training.clip_grad,
        "clip_norm": training.clip_norm,
        **{name: count / training.train_steps for name, count in steps.items()},
    }


_REGULARISERS = ("weight_decay",)
"""Of what can be tuned, what Tensor Programs V (arXiv 2203.03466, table 1 and section 6) counts among regularisers."""


def not_transferred(names: Iterable[str]) -> list[str]:
    """Which of the tuned hyperparameters µTransfer does not move, in words.

    Args:
        names: of what was searched.
    """
    return [
        f"{name} was tuned: it regularises, and how much of it is best depends on the size of model and data, so its "
        "value need not transfer (docs/what-transfers.md)"
        for name in names
        if (split_name(name) or ("", name))[1] in _REGULARISERS
    ]


_MEASURES = {
    "train_steps": "optimizer steps",
    "global_batch_size": "global batch size",
    "seq_length": "tokens per sequence",
    "tokens": "tokens",
    "num_layers": "layers",
}


def _tuned_on(config: Config) -> dict[str, int]:
    return _trained(proxy_config(config, values_of(config), seed=config.run.seed, directory=Path(config.run.dir)))


def _trained(config: Config) -> dict[str, int]:
    training = config.training
    return {
        "train_steps": training.train_steps,
        "global_batch_size": training.global_batch_size,
        "seq_length": training.seq_length,
        "tokens": training.train_steps * training.global_batch_size * config.sample_tokens,
        "num_layers": config.model.num_layers,
    }


def make_record(
    parametrization: Parametrization,
    layout: Layout,
    values: Mapping[str, Value],
    *,
    study: Mapping[str, Any],
    budget: Mapping[str, Any],
    ladder: Fitted | None = None,
) -> TransferRecord:
    """The record of what was tuned.

    Args:
        parametrization: of the target's run, `values` in its config.
        layout: of the same run.
        values: every hyperparameter at the base.
        study: what they were found with (outcome.Choice.as_json).
        budget: the plan, and what was spent.
        ladder: of the config; a rule that takes its exponent from one is left out where there is none.
    """
    config = parametrization.config
    chosen = config.parametrization.model_dump()
    if config.parametrization.unfitted:
        config = derive(config, without_fitted(config))
        parametrization = replace(parametrization, config=config)
    settings = digested(config)
    made = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "digest": digest(settings),
        "family": settings,
        "values": dict(values),
        "tuned": list(config.tuning.search),
        "target": {
            "name": config.run.name,
            "sizes": {name: getattr(config.model, name) for name in (*config.base.sizes, "num_layers")},
            "becomes": {**becomes(parametrization, layout), **({"tensors": {}} if config.model.as_built else {})},
            "extrapolated": extrapolated(config),
            "not_transferred": not_transferred(config.tuning.search),
            **({} if ladder is None else {"ladder": told(config, ladder), "predicted": predicted(config, ladder)}),
        },
        "proxy": {
            "sizes": {name: getattr(config.proxy_model, name) for name in (*config.base.sizes, "num_layers")},
            "trained": _tuned_on(config),
            "settings": _settings(config),
        },
        "rules": {
            **chosen,
            "optimizer": parametrization.update_rule,
        },
        "study": dict(study),
        "budget": dict(budget),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
        **({} if ladder is None else {"ladder": ladder.as_json()}),
    }
    return TransferRecord.model_validate(json.loads(json.dumps(made)))  # keys are text, as they will be read
