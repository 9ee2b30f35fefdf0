"""Regimes: changes of a config under which a rule matters that has no effect in the plain coordinate check.

Public names: `Regime`, `REGIMES`. µP has to keep every size in each of them (`coord-check --thorough`), and a control
(controls.py) takes its rule out in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mup_megatron.config import Config
from mup_megatron.proof.family import Axis

Keys = Callable[[Config, int], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A change of a config.

    Args:
        what: for people.
        keys: config keys and their values, from the config and the steps of the check; raises ConfigError where the
            config has no such regime. None where the config is in it already.
        axis: what has to grow.
        regrows: whether other sizes grow than the config's own.
        repeat: it must give the plain check's numbers, not the same slopes: all of them, or the outputs before the
            first step.
        resumes: half way through, another model and optimizer go on from files.
        thorough: whether `coord-check --thorough` runs it; else only controls do, because it is of another model.
        optimizer: whose configs `--thorough` runs it for all the same.
    """

    what: str
    keys: Keys = lambda config, steps: {}
    axis: Axis = "width"
    regrows: bool = False
    repeat: Literal["all", "start"] | None = None
    resumes: bool = False
    thorough: bool = True
    optimizer: str = ""


def _head_size_grows(config: Config, steps: int) -> dict[str, Any]:
    """Heads stay as many and grow; queries start from zero (appendix D.2), so that all that logits are was learned.

    A few tokens: the more of them share an update, the less of it is aligned with any one key, and only what is aligned
    tells 1/d from 1/sqrt(d) (logits go as d^-0.1 and d^0.4 with 16 tokens, as d^-0.4 and d^0.1 with 256).
    """
    base = config.model.resized(config.base.width)
    heads = {
        "model.num_attention_heads": base.num_attention_heads,
        "base.num_attention_heads": None,
        "proxy.num_attention_heads": None,
        "training.seq_length": min(8, config.training.seq_length),
        "parametrization.zero_init_query": not config.model.qk_layernorm,
    }
    if config.model.multi_latent_attention:
        sizes = {name: getattr(base, name) for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")}
        return {**heads, **{f"{part}.{name}": size for part in ("model", "base") for name, size in sizes.items()}}
    return {
        **heads,
        # An encoder-decoder has as many key/value heads as query heads, and no key for them.
        "model.num_query_groups": None if base.family == "t5" else base.query_groups,
        "base.num_query_groups": None,
        "proxy.num_query_groups": None,
        "model.kv_channels": base.head_size,
        "base.kv_channels": base.head_size,
    }


def _adam(config: Config, control: str) -> None:
    if config.optimizer.name not in ("adamw", "adam") or (control == "decay" and config.optimizer.name != "adamw"):
        raise config.error(
            "optimizer.name", f"{config.optimizer.name}: the regime {control} is of adamw; expected that"
        )


_UNDECAYED = {"hparams.weight_decay": 0.0, "parametrization.weight_decay": "independent"}
"""Without decay, and with a rule of it that every optimizer has."""


def _large_epsilon(config: Config, steps: int) -> dict[str, Any]:
    """Near a gradient's coordinates at the base; unclipped."""
    _adam(config, "eps")
    return {"optimizer.eps": 1e-2, "training.clip_grad": 0.0}


def _large_decay(config: Config, steps: int) -> dict[str, Any]:
    """Decay takes 50 times what a gradient does at the base, by the config's own rule, and a tenth of a weight in all.

    λ·σ is 50 for the matrices that start smallest, output projections; and lr·λ·steps is 1/10. Rules other than
    `independent` make lr·λ smaller on a wider model; if the base lost most of its weights, outputs would show that.
    """
    _adam(config, "decay")
    decay = 50.0 * math.sqrt(2 * config.num_layers_base) / config.hparams.init_method_std
    return {"hparams.lr": 0.1 / (decay * steps), "hparams.weight_decay": decay}


def _depth_grows(config: Config, steps: int) -> dict[str, Any]:
    rule = config.parametrization.depth
    layers = config.num_layers_base
    return {"parametrization.depth": "completep" if rule == "none" else rule, "base.num_layers": layers}


def _sgd(config: Config, steps: int) -> dict[str, Any]:
    """A rate with which SGD moves what Adam would at most, unclipped; without decay."""
    lr = config.hparams.lr if config.optimizer.name == "sgd" else 0.02
    keys = {"optimizer.name": "sgd", "hparams.lr": lr, "training.clip_grad": 0.0, **_UNDECAYED}
    return {**keys, "optimizer.implementation": "auto"} if config.optimizer.name == "lion" else keys


def _of_megatron(optimizer: str, **more: Any) -> Keys:
    """An optimizer under the Megatron engine, which alone has it; without decay."""
    keys = {
        "optimizer.name": optimizer,
        "optimizer.implementation": "auto",
        "parallel.engine": "megatron",
        "parallel.use_distributed_optimizer": False,
        "parallel.use_torch_fsdp2": False,
        "parallel.zero_stage": 1,
        "parallel.offload_optimizer": False,
        "parallel.deepspeed_config": None,
        **_UNDECAYED,
        **more,
    }
    return lambda config, steps: keys


def _untied(config: Config, steps: int) -> dict[str, Any] | None:
    """A head of its own, whose rate and initial values are its own too."""
    tied = config.model.share_embeddings_and_output_weights
    return {"model.share_embeddings_and_output_weights": False} if tied else None


def _relative(config: Config, steps: int) -> dict[str, Any] | None:
    """A trained bias on attention logits instead of the config's positions."""
    if config.model.position_embedding_type == "relative":
        return None
    return {"model.position_embedding_type": "relative", "model.rope_scaling": False}


_RECOMPUTED = {
    "training.recompute_granularity": "full",
    "training.recompute_method": "uniform",
    "training.recompute_num_layers": 1,
}
"""Every layer's forward pass runs twice."""


def _doubled(config: Config, steps: int) -> dict[str, Any]:
    """Multipliers make up for initial values of half the size; a tied head's too."""
    hparams = config.hparams
    keys = {
        "hparams.embedding_multiplier": 2 * hparams.embedding_multiplier,
        "hparams.embedding_init_method_std": (hparams.embedding_init_method_std or hparams.init_method_std) / 2,
    }
    if config.model.share_embeddings_and_output_weights:
        keys["hparams.output_multiplier"] = 2 * hparams.output_multiplier
    return keys


REGIMES: dict[str, Regime] = {
    "plain": Regime(what="the config's own"),
    "untied": Regime(what="a head that is not tied to the embedding", keys=_untied),
    "eps": Regime(what="epsilon near gradients", keys=_large_epsilon),
    "decay": Regime(what="decay that matters", keys=_large_decay),
    "head_size": Regime(what="a growing head size", keys=_head_size_grows, regrows=True),
    "depth": Regime(what="a growing depth", keys=_depth_grows, axis="depth", regrows=True),
    "sgd": Regime(what="SGD", keys=_sgd),
    "muon": Regime(what="Muon", keys=_of_megatron("muon")),
    "soap": Regime(what="SOAP", keys=_of_megatron("soap"), thorough=False),
    # Above the singular values of every gradient; unclipped.
    "soap_eps": Regime(
        what="SOAP's epsilon above gradients",
        keys=_of_megatron("soap", **{"optimizer.soap_eps": 3.0, "training.clip_grad": 0.0}),
        thorough=False,
        optimizer="soap",
    ),
    "relative": Regime(what="relative positions", keys=_relative, thorough=False),
    "recompute": Regime(what="recomputation: the plain numbers", keys=lambda *_: _RECOMPUTED, repeat="all"),
    "multipliers": Regime(
        what="embedding halved, its multiplier doubled: the plain start", keys=_doubled, repeat="start"
    ),
    "resume": Regime(what="stopped and resumed: the plain numbers", repeat="all", resumes=True),
}
"""By name."""
