"""The rules applied to a model: every tensor's init, learning rate, epsilon and decay, and the forward multipliers.

Public names: `Parametrization`, `TensorHyperparameters`, `InitStd`, `ForwardMultipliers`. One table, made once from the
config and the shapes; init, optimizer, forward pass and `explain` all read it, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from mup_megatron import rules
from mup_megatron.config import Config
from mup_megatron.errors import UserError
from mup_megatron.shapes import FixedFanOut, InfDim, Init, TensorShape, TensorSpec

OPTIMIZER_RULES: dict[str, rules.Rule] = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "muon": "muon"}


WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


@dataclass(frozen=True, kw_only=True)
class ForwardMultipliers:
    """What the forward pass multiplies, tunable constants included.

    Args:
        softmax_scale: of the attention logits.
        readout: on the trunk's output before the head; α_output · A.
        embedding: on the embedding's output.
        residual: on the output of each residual branch.
    """

    softmax_scale: float
    readout: float
    embedding: float
    residual: float


@dataclass(frozen=True, kw_only=True)
class GroupKey:
    """What makes an optimizer group: rule and multipliers, never the rates. Equal ones share a group."""

    rule: rules.Rule
    lr: Fraction | float
    eps: Fraction | float
    weight_decay: Fraction | float

    def __str__(self) -> str:
        """What identifies the group in an optimizer and in checkpoints, whatever its rates are."""
        muon = "muon, " if self.rule == "muon" else ""
        return f"{muon}lr {self.lr}, eps {self.eps}, decay {self.weight_decay}"


@dataclass(frozen=True, kw_only=True)
class TensorHyperparameters:
    """Everything that was decided about one parameter.

    Args:
        shape: the tensor, with its base.
        forward_multiplier: what the forward pass multiplies the tensor's output with.
        init_std: standard deviation per block ({None: std} for a tensor that is one block); 0 for constants.
        lr: learning rate at the schedule's peak.
        lr_multiplier: factor on the base learning rate.
        eps: Adam's epsilon; None for SGD.
        eps_multiplier: factor on the base epsilon; None for SGD.
        weight_decay: decay that the optimizer gets (decoupled); 0 where Megatron does not decay.
        weight_decay_multiplier: factor on the base decay.
        gradient_norm: weight of |grad|² in the invariant gradient norm, per block as `init_std`.
        group: what it shares with the other parameters of its optimizer group.
    """

    shape: TensorShape
    forward_multiplier: float
    init_std: dict[str | None, float]
    lr: float
    lr_multiplier: float
    eps: float | None
    eps_multiplier: float | None
    weight_decay: float
    weight_decay_multiplier: float
    gradient_norm: dict[str | None, float]
    group: GroupKey


@dataclass(frozen=True)
class Parametrization:
    """A config's rules, applied to the tensors of its model.

    Args:
        config: the run.
        shapes: every tensor of the whole (unsharded) model, by global name.
        base_head_size: d of the base model.

    Raises:
        UserError: a rule does not exist for some tensor; names it.
    """

    config: Config
    shapes: Mapping[str, TensorShape]
    base_head_size: int
    tensors: dict[str, TensorHyperparameters] = field(init=False)

    def __post_init__(self) -> None:
        """Applies the rules to every tensor; once to those that differ by layer or expert number alone."""
        applied: dict[tuple[int, int, int, bool], TensorHyperparameters] = {}
        tensors = {}
        for name, shape in self.shapes.items():
            # All that the rules see of a tensor; by identity, which join_shapes shares, for hashing costs more.
            key = (id(shape.spec), id(shape.infshape), id(shape.blocks), shape.layer is None)
            if key not in applied:
                applied[key] = self._apply(shape)
            tensors[name] = dataclasses.replace(applied[key], shape=shape)
        object.__setattr__(self, "tensors", tensors)

    @property
    def is_mup(self) -> bool:
        """Whether µP's rules hold; otherwise all multipliers are 1, but for the init of `fan_in`."""
        return self.config.parametrization.name == "mup"

    @property
    def rule(self) -> rules.Rule:
        """How the optimizer's update scales; Muon's of matrices alone, see `TensorHyperparameters.group`."""
        return OPTIMIZER_RULES[self.config.optimizer.name]

    @cached_property
    def depth(self) -> rules.DepthFactors:
        """Factors of the depth rule inside the blocks."""
        config = self.config
        exponent = config.parametrization.depth_exponent if self.is_mup else None
        ratio = Fraction(config.model.num_layers, config.num_layers_base)
        return rules.depth_factors(self.rule, ratio, exponent)

    @cached_property
    def forward(self) -> ForwardMultipliers:
        """The forward multipliers."""
        hparams, model = self.config.hparams, self.config.model
        base_head_size = self.base_head_size if self.is_mup else model.head_size
        yarn = model.multi_latent_attention and model.rope_type == "yarn"
        mscale = rules.yarn_mscale(model.rotary_scaling_factor, model.mscale_all_dim) if yarn else 1.0
        return ForwardMultipliers(
            softmax_scale=rules.softmax_scale(model.head_size, base_head_size, hparams.attention_multiplier, mscale),
            readout=hparams.output_multiplier * float(self._readout_multiplier),
            embedding=hparams.embedding_multiplier,
            residual=hparams.residual_multiplier * self.depth.branch,
        )

    @property
    def _readout_multiplier(self) -> Fraction:
        """A of the readout. A tied head has no tensor of its own; its fan-in is the embedding's fan-out."""
        if not self.is_mup:
            return rules.ONE
        for shape in self.shapes.values():
            if shape.spec.readout:
                return rules.readout_multiplier(shape.fan_in.ratio)
        embedding = next(shape for shape in self.shapes.values() if shape.spec.init is Init.EMBEDDING)
        return rules.readout_multiplier(embedding.fan_out.ratio)

    def _base_std(self, init: Init) -> float:
        hparams, config = self.config.hparams, self.config
        # Megatron's 1/sqrt(2L) takes the base depth, so that it is a constant of the family; the others take the depth
        # of the model, as Megatron does.
        layers = config.num_layers_base if self.is_mup else config.model.num_layers
        return {
            Init.WEIGHT: hparams.init_method_std,
            Init.OUTPUT_PROJECTION: hparams.init_method_std / math.sqrt(2.0 * layers),
            Init.EMBEDDING: hparams.embedding_init_method_std or hparams.init_method_std,
            Init.ZEROS: 0.0,
            Init.ONES: 0.0,
        }[init]

    def _apply(self, shape: TensorShape) -> TensorHyperparameters:
        spec, config = shape.spec, self.config
        m_in = shape.fan_in.ratio if self.is_mup else rules.ONE
        m_outs = {block: dim.ratio if self.is_mup else rules.ONE for block, dim in shape.fan_outs.items()}
        forward = rules.readout_multiplier(m_in) if spec.readout else rules.ONE
        depth = self.depth if shape.layer is not None else rules.DepthFactors()

        init_std = {block: self._init_std(shape, block, m_in, forward) for block in shape.fan_outs}

        rule = self._rule_of(spec)
        if rule == "sgd" and len(set(m_outs.values())) > 1:
            raise UserError(
                f"optimizer.name: sgd needs one learning rate per tensor, but the blocks of "
                f"{shape.name} grow by different factors ("
                + ", ".join(f"{block} {float(m):g}" for block, m in m_outs.items())
                + "); expected adamw, or blocks that grow together"
            )
        m_out = max(m_outs.values())
        if rule == "muon" and self.is_mup:
            lr = _muon_rate(shape) * _exact(depth.lr)
        else:
            lr = rules.learning_rate(rule, m_in=m_in, m_out=m_out, forward=forward) * _exact(depth.lr)
        if spec.frozen:
            lr = Fraction(0)
        eps = rules.epsilon(m_out=m_out, forward=forward) * _exact(depth.eps) if rule == "adam" else rules.ONE
        decay = rules.weight_decay(config.parametrization.weight_decay, lr) if spec.is_decayed and lr else Fraction(0)
        multiplier = float(forward) * (config.hparams.output_multiplier if spec.readout else 1.0)
        if spec.init is Init.EMBEDDING:
            multiplier *= config.hparams.embedding_multiplier
        return TensorHyperparameters(
            shape=shape,
            forward_multiplier=multiplier,
            init_std=init_std,
            lr=config.hparams.lr * float(lr),
            lr_multiplier=float(lr),
            eps=config.optimizer.eps * float(eps) if rule == "adam" else None,
            eps_multiplier=float(eps) if rule == "adam" else None,
            weight_decay=config.hparams.weight_decay * float(decay),
            weight_decay_multiplier=float(decay),
            gradient_norm={
                block: float(rules.gradient_norm(m_in=m_in, m_out=m_out, forward=forward))
                for block, m_out in m_outs.items()
            },
            group=GroupKey(rule=rule, lr=lr, eps=eps, weight_decay=decay),
        )

    def _rule_of(self, spec: TensorSpec) -> rules.Rule:
        """Megatron-core's Muon takes what has two dimensions and is no embedding and no readout; AdamW the rest."""
        if self.rule == "muon" and (len(spec.shape) != 2 or spec.init is Init.EMBEDDING or spec.readout):
            return "adam"
        return self.rule

    def _init_std(self, shape: TensorShape, block: str | None, m_in: Fraction, forward: Fraction) -> float:
        """Standard deviation of one block."""
        spec, config = shape.spec, self.config.parametrization
        if (config.zero_init_readout and spec.readout) or (config.zero_init_query and spec.is_query(block)):
            return 0.0
        if config.name == "fan_in":
            return self._base_std(spec.init) * rules.init_std(m_in=self._fan_in_of_the_product(shape))
        output_like = self.is_output_like(shape, block)
        return self._base_std(spec.init) * rules.init_std(m_in=m_in, forward=forward, output_like=output_like)

    def _fan_in_of_the_product(self, shape: TensorShape) -> Fraction:
        """m_in under `fan_in`: of a head tied to the embedding it is the head's, the one product that it is part of."""
        tied = self.config.model.share_embeddings_and_output_weights and shape.name == WORD_EMBEDDINGS
        return (shape.fan_out if tied else shape.fan_in).ratio

    def is_output_like(self, shape: TensorShape, block: str | None) -> bool:
        """Whether init of one block takes the factor g: the layer's own rule, else the config's."""
        rule = shape.spec.fixed_fan_out_of(block)
        if rule is None:
            named = self.config.parametrization.fixed_fan_out_init
            measured: FixedFanOut = "hidden_like" if ".mlp." in shape.name else "output_like"
            rule = measured if named == "auto" else named
        return rules.is_output_like(shape.fan_in.grows, shape.fan_outs[block].grows, rule)

    @cached_property
    def groups(self) -> dict[GroupKey, list[TensorHyperparameters]]:
        """Tensors by optimizer group, in the order of the model."""
        result: dict[GroupKey, list[TensorHyperparameters]] = {}
        for tensor in self.tensors.values():
            result.setdefault(tensor.group, []).append(tensor)
        return result

    def clip_warnings(self) -> list[str]:
        """Tensors inside the trunk whose gradient norm grows with width and slowly takes over a constant clip."""
        if not self.is_mup or not self.config.training.clip_grad or self.config.training.clip_norm == "invariant":
            return []
        return [
            f"{name}: fan-in grows and fan-out is fixed, so its gradient norm grows as width^1/2 and slowly takes over "
            "training.clip_grad; training.clip_norm: invariant does not"
            for name, shape in self.shapes.items()
            if not shape.spec.readout and shape.fan_in.grows and any(not dim.grows for dim in shape.fan_outs.values())
        ]


def _muon_rate(shape: TensorShape) -> Fraction | float:
    """Rate multiplier of a matrix under megatron-core's Muon in scale mode `spectral`.

    What upstream orthogonalises at once is a matrix to the rule: query, key and value of the fused QKV each by itself,
    any other tensor whole, whatever blocks it holds (emerging_optimizers.py, TensorParallelMuon.orthogonalize). The
    update then has the spectral norm sqrt(larger side), whose growth from the base is divided out.
    """
    blocks = shape.blocks or {}
    matrices = list(blocks.items()) if "query" in blocks else [("", shape.fan_out)]
    # Exact, so that equal rates are equal: the square of a multiplier, but for the fan-in that all matrices share.
    squares = {name: dim.ratio / _larger_side_growth(dim, shape.fan_in) for name, dim in matrices}
    if len(set(squares.values())) > 1:
        rates = {name: math.sqrt(square / shape.fan_in.ratio) for name, square in squares.items()}
        raise UserError(
            f"optimizer.name: muon needs one learning rate per tensor, but those of {shape.name} would be "
            + ", ".join(f"×{rate:.4g} for the {name}" for name, rate in rates.items())
            + "; expected adamw, or blocks that grow together"
        )
    rows = matrices[0][1]
    return rules.learning_rate(
        "muon", m_in=shape.fan_in.ratio * _larger_side_growth(rows, shape.fan_in), m_out=rows.ratio
    )


def _larger_side_growth(rows: InfDim, columns: InfDim) -> Fraction:
    """How the larger side of a matrix grows from its base."""
    return Fraction(max(rows.dim, columns.dim), max(rows.base_dim or rows.dim, columns.base_dim or columns.dim))


def _exact(factor: float) -> Fraction | float:
    """A factor of exactly 1 as a fraction, so that it leaves exact multipliers exact."""
    return rules.ONE if factor == 1.0 else factor
