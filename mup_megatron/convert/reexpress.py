"""A model under another base: which factor each weight takes, so that function and next update stay the same.

Public names: `reexpress`, `Reexpressed`, `kept_multipliers`. docs/rebase.md has the derivation: for any θ > 0 and Adam,
(A, weight, rate, eps, λ) → (A/θ, weight·θ, rate·θ, eps/θ, λ/θ) is the same training, with gradients divided by θ
(docs/parametrization.md, section 7, identity 3; Tensor Programs V, arXiv 2203.03466, lemma J.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mup_megatron.config import Config
from mup_megatron.convert.export.fold import fold, plain_softmax_scale
from mup_megatron.rules.table import Carried, ForwardMultipliers, Parametrization, TensorHyperparameters
from mup_megatron.util.errors import UserError

MULTIPLIERS = {
    "readout": "hparams.output_multiplier",
    "embedding": "hparams.embedding_multiplier",
    "softmax_scale": "hparams.attention_multiplier",
    "residual": "hparams.residual_multiplier",
    "relative_bias": "hparams.relative_bias_multiplier",
}
"""The tunable constant in each forward multiplier."""
_SAME = 1e-12


@dataclass(frozen=True, kw_only=True)
class Reexpressed:
    """What becomes of a checkpoint.

    Args:
        weights: θ by global name, of the tensors that take a factor other than 1.
        carried: what the new base's rules do not say, by global name.
    """

    weights: Mapping[str, float]
    carried: Mapping[str, Carried]


def kept_multipliers(before: Parametrization, after: Parametrization) -> dict[str, float]:
    """The tunable constants, by dotted key, with which the new rules have the forward multipliers of the old ones.

    Args:
        before: of the checkpoint.
        after: of the new base, with the constants of the checkpoint.
    """
    keys = {}
    for name, key in MULTIPLIERS.items():
        now = getattr(after.config.hparams, key.partition(".")[2])
        keys[key] = now * getattr(before.forward, name) / getattr(after.forward, name)
    return keys


def reexpress(before: Parametrization, after: Parametrization) -> Reexpressed:
    """What keeps function and updates.

    Args:
        before: of the checkpoint.
        after: of the same model under the new base, without anything carried.

    Raises:
        UserError: no factors keep them; names the tensor or the key that stands in the way.
    """
    weights = _factors(before, after)
    _check_clipping(before, after, weights)
    carried = {}
    for name, tensor in before.tensors.items():
        factors = _carried(tensor, after.tensors[name], weights.get(name, 1.0))
        if factors != (1.0, 1.0, 1.0):
            carried[name] = factors
    return Reexpressed(weights=weights, carried=carried)


def _factors(before: Parametrization, after: Parametrization) -> dict[str, float]:
    """θ of every tensor whose θ is not 1: what the forward pass multiplied with it, over what it does now."""
    old, new, config = before.forward, after.forward, after.config
    ratios = ForwardMultipliers(
        softmax_scale=plain_softmax_scale(before) * _ratio(old.softmax_scale, new.softmax_scale),
        readout=_ratio(old.readout, new.readout),
        embedding=_ratio(old.embedding, new.embedding),
        residual=_ratio(old.residual, new.residual),
        relative_bias=_ratio(old.relative_bias, new.relative_bias),
    )
    if ratios.relative_bias != 1.0 and config.model.position_embedding_type == "alibi":
        raise config.error(MULTIPLIERS["relative_bias"], "ALiBi has no weight to take it; expected it left alone")
    moved = [key for name, key in MULTIPLIERS.items() if _ratio(getattr(old, name), getattr(new, name)) != 1.0]
    if moved and config.model.mtp_num_layers:
        raise config.error(moved[0], "multi-token prediction is not re-expressed; expected the multiplier left alone")
    # Its own blocks take the constant without the depth rule.
    if (
        config.model.mtp_num_layers
        and _ratio(before.config.hparams.residual_multiplier, config.hparams.residual_multiplier) != 1.0
    ):
        raise config.error(
            "parametrization.depth", "multi-token prediction knows no depth rule; expected the depth rule of the run"
        )
    found = {}
    for name, by_block in fold(before.replaced(None, **vars(ratios))).items():
        values = set(by_block.values())
        if values == {1.0}:
            continue
        if name not in before.shapes:
            if name.endswith(".bias"):
                continue  # RMSNorm has none
            raise config.error("model.norm_gains", f"{name} would take the factor {values.pop():g}, and is no weight")
        spec = before.shapes[name].spec
        if spec.frozen:
            raise config.error(
                "model.norm_gains", f"{name} would take the factor {values.pop():g}, and is a frozen constant"
            )
        if "layernorm" in name and name.endswith(".weight") and config.model.layernorm_zero_centered_gamma:
            raise config.error(
                "model.layernorm_zero_centered_gamma",
                f"{name} would take the factor {values.pop():g}, and is kept as its distance from 1",
            )
        if len(values) > 1:
            raise UserError(
                f"{name}: its blocks would need rates of their own ("
                + ", ".join(f"×{factor:g} of {block}" for block, factor in by_block.items())
                + f"); expected {MULTIPLIERS['softmax_scale']} left alone"
            )
        if (rule := before.tensors[name].group.update_rule) in ("muon", "soap"):
            raise UserError(
                f"{name} would take the factor {values.pop():g}, under which {'Muon' if rule == 'muon' else 'SOAP'}'s "
                "steps are the same only up to rounding of its iteration; expected the multipliers left alone"
            )
        found[name] = values.pop()
    return found


def _ratio(old: float, new: float) -> float:
    """Exactly 1 where they differ by rounding alone."""
    return 1.0 if math.isclose(old, new, rel_tol=_SAME) else old / new


def _carried(before: TensorHyperparameters, after: TensorHyperparameters, theta: float) -> Carried:
    """Factors that make rate, epsilon and decay under the new rules what keeps the update."""
    if before.shape.spec.frozen:
        return Carried(1.0, 1.0, 1.0)
    rate = before.lr * (theta**2 if before.group.update_rule == "sgd" else theta)
    lr = _ratio(rate, after.lr)
    eps = 1.0 if before.eps is None or after.eps is None else _ratio(before.eps / theta, after.eps)
    decay = _ratio(before.weight_decay * before.lr / rate, after.weight_decay) if after.weight_decay else 1.0
    return Carried(lr, eps, decay)


def _check_clipping(before: Parametrization, after: Parametrization, weights: Mapping[str, float]) -> None:
    """Whether the gradient is clipped as before.

    Raises:
        UserError: its norm is another now.
    """
    config: Config = after.config
    if not config.training.clip_grad:
        return
    if config.training.clip_norm == "global":
        if weights:
            raise config.error(
                "training.clip_grad",
                f"clips by the plain norm of the gradient, and that of {min(weights)} would be divided by "
                f"{weights[min(weights)]:g}; expected the multipliers left alone, or a run that does not clip",
            )
        return
    for name, tensor in before.tensors.items():
        now, theta = after.tensors[name], weights.get(name, 1.0)
        for block, weight in tensor.gradient_norm.items():
            if _ratio(weight, now.gradient_norm[block] / theta**2) != 1.0:
                raise config.error(
                    "training.clip_norm",
                    f"invariant measures {name} by the base's sizes, which are others now; expected a run that clips "
                    "by the global norm, or does not clip",
                )
