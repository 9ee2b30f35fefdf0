"""The table: every tensor's init, learning rate, epsilon, decay and gradient-norm weight, and the forward multipliers.

Public names: `Parametrization` (the table), `TensorHyperparameters` (a row), `GroupKey`, `BaseValues`, `Carried`,
`ForwardMultipliers`. `apply_rules` makes the table once from the config and the shapes. Init, optimizer, forward pass,
gradient norm and `explain` all read it, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from mup_megatron.config import Config
from mup_megatron.rules import formulas
from mup_megatron.rules.kinds import PerTensorFactors
from mup_megatron.rules.shapes import Init, TensorShape, TensorSpec

UPDATE_RULES: dict[str, formulas.UpdateRule] = {
    "adamw": "adam",
    "adam": "adam",
    "sgd": "sgd",
    "muon": "muon",
    "lion": "lion",
    "soap": "soap",
}

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_COPIED = ("embedding.", "decoder_relative_pos_emb.")


def is_copied(name: str) -> bool:
    """Whether later pipeline stages hold copies of a tensor, by its global name; what counts is the first stage's."""
    return name.startswith(_COPIED)


@dataclass(frozen=True, kw_only=True)
class ForwardMultipliers:
    """What the forward pass multiplies, tunable constants included.

    Args:
        softmax_scale: of the attention logits.
        readout: on the trunk's output before the head; α_output · A.
        embedding: on the embedding's output.
        residual: on the output of each residual branch.
        relative_bias: on the bias that tells attention positions; α_relative, whatever the width.
    """

    softmax_scale: float
    readout: float
    embedding: float
    residual: float
    relative_bias: float = 1.0

    def of(self, spec: TensorSpec) -> float:
        """What the forward pass multiplies the output of one tensor with."""
        if spec.init is Init.RELATIVE_BIAS:
            return self.relative_bias
        return self.readout if spec.readout else self.embedding if spec.init is Init.EMBEDDING else 1.0


class BaseValues(NamedTuple):
    """The hyperparameters that multipliers apply to, as the config has them.

    Args:
        lr: learning rate at the schedule's peak.
        eps: Adam's epsilon, or SOAP's.
        weight_decay: decoupled.
    """

    lr: float
    eps: float
    weight_decay: float


class Carried(NamedTuple):
    """Factors on what the rules say of one tensor: base values of its own, which `rebase` carries to another base.

    Args:
        lr: of the learning rate, above 0.
        eps: of Adam's epsilon, above 0.
        weight_decay: of the decay, above 0.
    """

    lr: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """The multipliers that parameters of one optimizer group share; parameters with equal ones share a group.

    Args:
        update_rule: how the optimizer's update scales.
        lr: factor on the base learning rate; exact where it can be, as all of them.
        eps: factor on the base epsilon; 1 where the optimizer has no epsilon.
        weight_decay: factor on the base decay; 0 where Megatron does not decay.
        decoupled: whether the base learning rate is `optimizer.decoupled_lr`.
    """

    update_rule: formulas.UpdateRule
    lr: Fraction | float
    eps: Fraction | float
    weight_decay: Fraction | float
    decoupled: bool = False

    def __str__(self) -> str:
        """What identifies the group in an optimizer and in checkpoints, whatever its rates are."""
        of_matrices = f"{self.update_rule}, " if self.update_rule in formulas.OF_MATRICES else ""
        decoupled = "decoupled " if self.decoupled else ""
        return f"{of_matrices}{decoupled}lr {self.lr}, eps {self.eps}, decay {self.weight_decay}"


@dataclass(frozen=True, kw_only=True)
class TensorHyperparameters:
    """Everything that was decided about one parameter: a row of the table.

    Args:
        shape: the tensor, with its base.
        forward_multiplier: what the forward pass multiplies the tensor's output with.
        init_std: standard deviation per block ({None: std} for a tensor that is one block); 0 for constants.
        gradient_norm: weight of |grad|² in the invariant gradient norm, per block as `init_std`.
        group: multipliers on rate, epsilon and decay.
        base: what these multiply.
        factors: what of it comes from `hparams.per_tensor` and not from the rules; None where nothing is said there.
        theta: what was divided out of the stored values, and what the tensor's layer multiplies its output with, beside
            `forward_multiplier`; a power of two, 1 unless `parametrization.scaling` is `unit`. All the others are of
            the tensor as it is stored.
    """

    shape: TensorShape
    forward_multiplier: float
    init_std: dict[str | None, float]
    gradient_norm: dict[str | None, float]
    group: GroupKey
    base: BaseValues
    factors: PerTensorFactors | None = None
    theta: Fraction = formulas.ONE

    def stored_over(self, theta: Fraction) -> TensorHyperparameters:
        """The same training of a tensor that is stored divided by θ, by abc-symmetry (docs/parametrization.md, 11).

        Args:
            theta: beside what is divided out already.
        """
        if theta == 1:
            return self
        group, power = self.group, 2 if self.group.update_rule == "sgd" else 1
        changed = self.retuned(
            lr=group.lr / theta**power, eps=group.eps * theta, decay=group.weight_decay * theta**power
        )
        return dataclasses.replace(
            changed,
            init_std={block: std / float(theta) for block, std in self.init_std.items()},
            gradient_norm={block: weight / float(theta**2) for block, weight in self.gradient_norm.items()},
            theta=self.theta * theta,
        )

    def retuned(
        self,
        *,
        lr: Fraction | float | None = None,
        eps: Fraction | float | None = None,
        decay: Fraction | float | None = None,
    ) -> TensorHyperparameters:
        """The same tensor with other multipliers, in the optimizer group that these make.

        Args:
            lr: multiplier of the rate instead of the rule's; None keeps it.
            eps: of epsilon; None keeps it, and it is ignored where the optimizer has no epsilon.
            decay: of the decay; None keeps it, and it is ignored where the tensor is not decayed.
        """
        group = self.group
        changed = dataclasses.replace(
            group,
            lr=group.lr if lr is None else lr,
            eps=group.eps if eps is None or group.update_rule not in formulas.HAS_EPSILON else eps,
            weight_decay=group.weight_decay if decay is None or not group.weight_decay else decay,
        )
        return dataclasses.replace(self, group=changed)

    def times(self, factors: PerTensorFactors) -> TensorHyperparameters:
        """The same tensor with the factors of `hparams.per_tensor` on its rate, its decay and its initial values."""
        group = self.group
        changed = self.retuned(lr=_times(group.lr, factors.lr), decay=_times(group.weight_decay, factors.weight_decay))
        init_std = {block: _scaled(std, factors.init[block]) for block, std in self.init_std.items()}
        return dataclasses.replace(changed, init_std=init_std, factors=factors)

    def carrying(self, factors: Carried) -> TensorHyperparameters:
        """The same tensor with base values of its own."""
        group = self.group
        return self.retuned(
            lr=_times(group.lr, factors.lr),
            eps=_times(group.eps, factors.eps),
            decay=_times(group.weight_decay, factors.weight_decay),
        )

    @property
    def lr_multiplier(self) -> float:
        """Factor on the base learning rate."""
        return float(self.group.lr)

    @property
    def lr(self) -> float:
        """Learning rate at the schedule's peak."""
        return self.base.lr * self.lr_multiplier

    @property
    def eps_multiplier(self) -> float | None:
        """Factor on the base epsilon; None where the optimizer has no epsilon."""
        return float(self.group.eps) if self.group.update_rule in formulas.HAS_EPSILON else None

    @property
    def eps(self) -> float | None:
        """Adam's or SOAP's epsilon; None for other optimizers."""
        return None if self.eps_multiplier is None else self.base.eps * self.eps_multiplier

    @property
    def weight_decay_multiplier(self) -> float:
        """Factor on the base decay."""
        return float(self.group.weight_decay)

    @property
    def weight_decay(self) -> float:
        """Decay that the optimizer gets (decoupled); 0 where Megatron does not decay."""
        return self.base.weight_decay * self.weight_decay_multiplier


@dataclass(frozen=True, kw_only=True)
class Parametrization:
    """A config's rules, applied to the tensors of its model (`apply_rules`).

    Args:
        config: the run.
        shapes: every tensor of the whole (unsharded) model, by global name.
        base_head_size: d of the base model.
        forward: the forward multipliers.
        tensors: what was decided about each tensor, by global name in the order of the model.
        carried: what of it does not come from the rules, see `Carried`; empty but after a rebase.
    """

    config: Config
    shapes: Mapping[str, TensorShape]
    base_head_size: int
    forward: ForwardMultipliers
    tensors: Mapping[str, TensorHyperparameters]
    carried: Mapping[str, Carried] = field(default_factory=dict)

    @property
    def update_rule(self) -> formulas.UpdateRule:
        """How the optimizer's update scales; Muon's and SOAP's of matrices alone, see `TensorHyperparameters.group`."""
        return UPDATE_RULES[self.config.optimizer.name]

    @cached_property
    def size(self) -> int:
        """Parameters of the whole model."""
        return sum(math.prod(shape.spec.shape) for shape in self.shapes.values())

    @cached_property
    def groups(self) -> dict[GroupKey, list[TensorHyperparameters]]:
        """Tensors by optimizer group, in the order of the model."""
        result: dict[GroupKey, list[TensorHyperparameters]] = {}
        for tensor in self.tensors.values():
            result.setdefault(tensor.group, []).append(tensor)
        return result

    def may_stand(self, name: str) -> bool:
        """Whether a tensor need not get a gradient at any step: frozen, or of predictions that the loss leaves out."""
        unheard = name.startswith("mtp.") and not self.config.model.mtp_loss_scaling_factor
        return self.tensors[name].shape.spec.frozen or unheard

    def says_the_same(self, other: Parametrization) -> bool:
        """Whether it gives every tensor and the forward pass the same numbers, so that runs under both are the same."""
        mine, theirs = (
            [(name, tensor, each.carried.get(name)) for name, tensor in each.tensors.items()] for each in (self, other)
        )
        return self.forward == other.forward and mine == theirs

    def replaced(
        self, change: Callable[[TensorHyperparameters], TensorHyperparameters] | None = None, **forward: float
    ) -> Parametrization:
        """The same model under other rules: what a negative control trains. This one stays as it is.

        Args:
            change: from each row of the table to the one in its place, both of the tensor as it is before anything is
                divided out of it; None keeps the rows.
            forward: forward multipliers that are others, by their names in `ForwardMultipliers`. Rows follow them.
        """
        multipliers = dataclasses.replace(self.forward, **forward)
        tensors = {
            name: dataclasses.replace(tensor, forward_multiplier=multipliers.of(tensor.shape.spec))
            for name, tensor in self.tensors.items()
        }
        if change is not None:
            tensors = {
                name: change(tensor.stored_over(1 / tensor.theta)).stored_over(tensor.theta)
                for name, tensor in tensors.items()
            }
        return dataclasses.replace(self, forward=multipliers, tensors=tensors)

    def clip_warnings(self) -> list[str]:
        """Tensors inside the trunk whose gradient norm grows with width and slowly takes over a constant clip."""
        training = self.config.training
        if self.config.parametrization.name != "mup" or not training.clip_grad or training.clip_norm == "invariant":
            return []
        return [
            f"{name}: fan-in grows and fan-out is fixed, so its gradient norm grows as width^1/2 and slowly takes over "
            "training.clip_grad; training.clip_norm: invariant does not"
            for name, shape in self.shapes.items()
            if not shape.spec.readout and shape.fan_in.grows and any(not dim.grows for dim in shape.fan_outs.values())
        ]


def _scaled(value: float, factor: float) -> float:
    return value if factor == 1.0 else value * factor


def _times(value: Fraction | float, factor: float) -> Fraction | float:
    """A product that stays exact where the factor is 1."""
    return value if factor == 1.0 else float(value) * factor
