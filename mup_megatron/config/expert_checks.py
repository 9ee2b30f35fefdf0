"""What must hold where the number of experts grows (docs/parametrization.md, section 10). Public name: `CHECKS`."""

from __future__ import annotations

from fractions import Fraction

from mup_megatron.config.schema import Config, Model


def _check_rule(config: Config) -> None:
    """A number of experts grows under a rule, and a rule knows the number that it grows from."""
    named = [f"{section}.{name}" for section in ("base", "proxy") for name in getattr(config, section).experts]
    if config.model.num_moe_experts is None:
        chosen = ["parametrization.experts"] if config.parametrization.experts != "none" else []
        if named or chosen:
            raise config.error(
                (named or chosen)[0], "belongs to a mixture of experts; expected model.num_moe_experts set"
            )
        return
    if config.parametrization.experts == "none":
        if named:
            raise config.error(
                named[0],
                "a number of experts, or of experts per token, that grows has no rule here (an expert's gradient falls "
                "about as 1/experts); expected it under model: alone, or parametrization.experts: fixed_share",
            )
        return
    if config.base.num_moe_experts is None:
        raise config.error(
            "base.num_moe_experts",
            f"missing; parametrization.experts: {config.parametrization.experts} needs the number of experts where "
            "hyperparameters are defined",
        )
    if config.optimizer.name in ("muon", "soap"):
        which = "Muon, which orthogonalises" if config.optimizer.name == "muon" else "SOAP, which preconditions"
        raise config.error(
            "parametrization.experts",
            f"{config.parametrization.experts} has no rule for {which} a router's rows together; "
            "expected none, or optimizer.name: adamw, lion or sgd",
        )


def _check_models(config: Config) -> None:
    """Base and proxy can be built, and their experts' outputs are added up as the model's are."""
    if config.parametrization.experts == "none" or config.model.num_moe_experts is None:
        return
    base = config.model.resized(config.base)
    for section, model in (("base", base), ("proxy", config.proxy_model), ("model", config.model)):
        _check_buildable(config, section, model)
        if _weights(model) != _weights(base):
            raise config.error(
                f"{section}.moe_router_topk",
                f"{model.moe_router_topk} experts per token, whose scores add up to {_weights(model)}; in the base "
                f"{base.moe_router_topk}, whose scores add up to {_weights(base)}; expected two or more in both",
            )
        _check_share(config, section, _share(model), _share(base), _weights(base))


def _check_buildable(config: Config, section: str, model: Model) -> None:
    experts, topk = model.num_moe_experts or 0, model.moe_router_topk
    if topk > experts:
        key = "num_moe_experts" if config.base.num_moe_experts and section != "model" else "moe_router_topk"
        raise config.error(f"{section}.{key}", f"{topk} experts per token of {experts}; expected at most {experts}")
    plain = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if topk == 1 and plain and model.moe_router_load_balancing_type != "sinkhorn":
        raise config.error(
            f"{section}.moe_router_topk",
            "softmax over a single chosen expert is 1 and gives the router no gradient; expected 2 or more",
        )
    groups, per_token = model.moe_router_num_groups, model.moe_router_group_topk
    if groups and per_token and (experts % groups or topk % per_token or topk // per_token > experts // groups):
        raise config.error(
            f"{section}.num_moe_experts",
            f"{topk} of {experts} experts cannot be taken in equal parts from {per_token} of {groups} groups",
        )


def _check_share(config: Config, section: str, share: Fraction, of_base: Fraction, weights: str) -> None:
    if share == of_base:
        return
    if config.parametrization.experts == "fixed_share":
        raise config.error(
            f"{section}.moe_router_topk",
            f"{share} of the experts serve a token, in the base {of_base}; expected the same share "
            "(base.moe_router_topk), or parametrization.experts: any_share",
        )
    if weights == _SHARE:
        raise config.error(
            "parametrization.experts",
            f"any_share has no rule for scores that add up to {_SHARE}, so that the experts' output falls with the "
            f"share ({of_base} in the base, {share} in {section}:); expected model.moe_router_pre_softmax: false with "
            "two experts per token or more, model.moe_router_score_function: sigmoid, or fixed_share",
        )


_ONE, _SHARE, _OWN = "1", "the share of experts that is chosen", "the one expert's own score"


def _weights(model: Model) -> str:
    """What the scores of a token's chosen experts add up to, as megatron-core's router makes them (moe_utils.py)."""
    if model.moe_router_load_balancing_type == "sinkhorn":
        return _OWN if model.moe_router_topk == 1 else _SHARE
    if model.moe_router_score_function == "sigmoid":
        return _OWN if model.moe_router_topk == 1 else _ONE
    return _SHARE if model.moe_router_pre_softmax else _ONE


def _share(model: Model) -> Fraction:
    return Fraction(model.moe_router_topk, model.num_moe_experts or 1)


CHECKS = (_check_rule, _check_models)
"""In this order; each takes a config and raises ConfigError."""
