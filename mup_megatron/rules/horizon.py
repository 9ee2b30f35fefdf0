"""What a config's rules over batch and tokens make of the optimizer's numbers (formulas.py, docs/parametrization.md).

Public names: `horizon`, `betas`, `kept_betas`, `said`, `moved`, `applied`, `without_rules`. Hyperparameters are those
of the trials: of `tuning.global_batch_size`, `seq_length` and `train_steps`, where these are set, else of the run's
own, and then every factor is 1.
"""

from __future__ import annotations

from typing import Any, get_args

from mup_megatron.config import Config
from mup_megatron.rules import formulas


def horizon(config: Config) -> formulas.HorizonFactors:
    """The factors on rate, epsilon, decay and 1 - beta, from the trials' batch and tokens to the run's.

    Raises:
        ConfigError: an exponent is a ladder's, and no ladder has said it.
    """
    chosen = config.parametrization
    return formulas.horizon_factors(
        m_batch=config.batch_ratio,
        m_tokens=config.tokens_ratio,
        batch=_whole_rule(chosen.batch) or _exponent(config, "batch"),
        tokens=_exponent(config, "tokens"),
        keeps_timescale=chosen.weight_decay == "timescale",
    )


def betas(config: Config) -> tuple[float, float]:
    """Adam's betas on the run."""
    first, second = config.optimizer.betas
    factor = horizon(config).forgetting
    return (first, second) if factor == 1.0 else (1.0 - factor * (1.0 - first), 1.0 - factor * (1.0 - second))


def kept_betas(config: Config, batch: str) -> tuple[float, float]:
    """What `optimizer.betas` becomes under another rule over batch, so that Adam's betas on the run stay.

    Args:
        config: the run.
        batch: what `parametrization.batch` becomes.

    Raises:
        ConfigError: no betas of trials would do.
    """
    factor = formulas.horizon_factors(
        m_batch=config.batch_ratio, m_tokens=config.tokens_ratio, batch=_whole_rule(batch) or 0.0
    ).forgetting
    now, (first, second) = horizon(config).forgetting, config.optimizer.betas
    if factor == now:
        return first, second
    kept = 1.0 - now / factor * (1.0 - first), 1.0 - now / factor * (1.0 - second)
    if min(kept) < 0.0:
        raise config.error(
            "parametrization.batch",
            f"{batch} takes 1 - beta to {factor:.4g} of the trials', so that they would need a beta of {min(kept):.4g} "
            "for the run's to stay; expected power:0.5, which leaves the betas",
        )
    return kept


def said(config: Config) -> str | None:
    """The rules and what they do here, in words; None where none is chosen."""
    chosen = config.parametrization
    if not chosen.has_horizon_rule:
        return None
    found = horizon(config)
    named = [f"{name}: {value}" for name, value in (("batch", chosen.batch), ("tokens", chosen.tokens))]
    named += ["weight_decay: timescale"] if chosen.weight_decay == "timescale" else []
    one, other = betas(config)
    return (
        f"{', '.join(named)}; a step has {float(config.batch_ratio):.4g} times a trial's tokens, the run "
        f"{float(config.tokens_ratio):.4g} times: lr × {found.lr:.4g}, eps × {found.eps:.4g}, weight decay × "
        f"{found.weight_decay:.4g}, betas {one:.6g} and {other:.6g}"
    )


def moved(config: Config) -> dict[str, tuple[float, float]]:
    """Every value that the rules move, by name: at the trials' batch and tokens, and at the run's; both at the base."""
    found, optimizer = horizon(config), config.optimizer
    values = {"lr": (config.hparams.lr, found.lr), "weight_decay": (config.hparams.weight_decay, found.weight_decay)}
    if optimizer.name != "sgd":
        values["eps"] = (optimizer.eps, found.eps)
    ends = {name: (value, value * factor) for name, (value, factor) in values.items()}
    ends |= {f"beta{n}": pair for n, pair in enumerate(zip(optimizer.betas, betas(config), strict=True), 1)}
    return {name: (before, after) for name, (before, after) in ends.items() if before != after}


def without_rules(config: Config) -> dict[str, Any]:
    """Keys that turn the rules over batch and tokens off, as a ladder trains."""
    off = {"parametrization.batch": "none", "parametrization.tokens": "none"}
    if config.parametrization.weight_decay == "timescale":
        off["parametrization.weight_decay"] = "independent"
    return off


def applied(config: Config) -> dict[str, Any]:
    """Keys of the same run with the factors in its values and the rules off; none where no rule is chosen.

    For what trains the run's tensors on another batch or for other steps, from which the rules would count anew.
    """
    if not config.parametrization.has_horizon_rule:
        return {}
    found, hparams = horizon(config), config.hparams
    return {
        **without_rules(config),
        "hparams.lr": hparams.lr * found.lr,
        "hparams.weight_decay": hparams.weight_decay * found.weight_decay,
        "training.lr_warmup_init": config.training.lr_warmup_init * found.lr,
        "optimizer.eps": config.optimizer.eps * found.eps,
        "optimizer.betas": list(betas(config)),
    }


def _whole_rule(batch: str) -> formulas.BatchRule | None:
    """A rule that moves more than the rate; None of the others."""
    return next((rule for rule in get_args(formulas.BatchRule) if rule == batch), None)


def _exponent(config: Config, axis: str) -> float:
    """Of `power:NUMBER` and `fitted:NUMBER`; 0 of `none`."""
    rule = getattr(config.parametrization, axis)
    if rule == "fitted":
        raise config.error(
            f"parametrization.{axis}",
            "fitted takes its exponent from a ladder, and there is none; expected tuning.ladder: PATH of a ladder.json "
            "(mup-megatron ladder CONFIG writes it), or pipeline with a transfer record that holds one, or "
            "fitted:NUMBER",
        )
    return float(rule.partition(":")[2] or 0.0)
