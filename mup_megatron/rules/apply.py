"""The rules applied to the tensors of a model, which makes the table (table.py).

Public names: `apply_rules`, `Rules`, `base_std`, `orthogonalised`, `larger_side_growth`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction

from mup_megatron.config import Config
from mup_megatron.rules import formulas
from mup_megatron.rules.horizon import horizon
from mup_megatron.rules.interpolation import (
    Plane,
    multipliers_between,
    norm_between,
    readout_between,
    softmax_between,
    std_between,
)
from mup_megatron.rules.kinds import check_entries, factors_of, is_decayed
from mup_megatron.rules.shapes import FixedFanOut, InfDim, Init, TensorShape, TensorSpec
from mup_megatron.rules.table import (
    UPDATE_RULES,
    WORD_EMBEDDINGS,
    BaseValues,
    Carried,
    ForwardMultipliers,
    GroupKey,
    Parametrization,
    TensorHyperparameters,
)
from mup_megatron.rules.unit_scaling import unit_scale
from mup_megatron.util.errors import UserError


def apply_rules(
    config: Config,
    shapes: Mapping[str, TensorShape],
    *,
    base_head_size: int,
    carried: Mapping[str, Carried] | None = None,
    whole: bool = True,
) -> Parametrization:
    """Makes the table of a model.

    Args:
        config: the run.
        shapes: every tensor of the whole (unsharded) model, by global name.
        base_head_size: d of the base model.
        carried: factors on what the rules say, of tensors that carry some from another base.
        whole: every tensor is among the shapes, so that an entry of per_tensor that names none is a mistake.

    Raises:
        UserError: a rule does not exist for some tensor; names it.
    """
    carried = carried or {}
    if whole:
        check_entries(config, shapes)
    applied = Rules(config, shapes, base_head_size)
    # Tensors that differ by layer or expert number alone are worked out once.
    rows: dict[tuple[int, int, int, bool, bool], TensorHyperparameters] = {}
    tensors = {}
    for name, shape in shapes.items():
        # All that the rules see of a tensor. It is compared by identity: join_shapes shares objects, and hashing them
        # costs more.
        key = (id(shape.spec), id(shape.infshape), id(shape.blocks), shape.layer is None, name == WORD_EMBEDDINGS)
        if key not in rows:
            rows[key] = applied.row(shape)
        row = dataclasses.replace(rows[key], shape=shape)
        if config.hparams.per_tensor:
            row = row.times(factors_of(config, shape))
        row = row.carrying(carried[name]) if name in carried else row
        tensors[name] = row.stored_over(unit_scale(row)) if config.parametrization.scaling == "unit" else row
    return Parametrization(
        config=config,
        shapes=shapes,
        base_head_size=base_head_size,
        forward=applied.forward,
        tensors=tensors,
        carried=carried,
    )


def base_std(config: Config, init: Init) -> float:
    """Standard deviation of a distribution where hyperparameters are defined; 0 for constants."""
    hparams = config.hparams
    # Megatron's 1/sqrt(2L) takes the base depth, so that it is a constant of the family; the others take the depth
    # of the model, as Megatron does.
    layers = config.num_layers_base if config.parametrization.follows_width else config.model.num_layers
    return {
        Init.WEIGHT: hparams.init_method_std,
        Init.OUTPUT_PROJECTION: hparams.init_method_std / math.sqrt(2.0 * layers),
        Init.HYBRID_OUTPUT_PROJECTION: hparams.init_method_std / math.sqrt(layers),
        Init.EMBEDDING: hparams.embedding_init_method_std or hparams.init_method_std,
        Init.RELATIVE_BIAS: hparams.init_method_std,
        Init.ZEROS: 0.0,
        Init.ONES: 0.0,
        Init.OWN: 0.0,
    }[init]


def _is_product(spec: TensorSpec) -> bool:
    """Whether it is a matrix that is neither a table of embeddings nor the head."""
    return spec.fan_in is not None and not spec.is_lookup and not spec.readout


class Rules:
    """The rules of one run, which make the table's rows.

    Args:
        config: the run.
        shapes: of every tensor, by name.
        base_head_size: d of the base model.
    """

    def __init__(self, config: Config, shapes: Mapping[str, TensorShape], base_head_size: int) -> None:
        self._config, self._shapes = config, shapes
        self._rule = UPDATE_RULES[config.optimizer.name]
        plane = config.parametrization.plane
        self._plane = None if plane is None else Plane(*plane)
        self._base = BaseValues(config.hparams.lr, config.optimizer.eps, config.hparams.weight_decay)
        self._decoupled = config.optimizer.decoupled_lr
        exponent = config.parametrization.depth_exponent if config.parametrization.follows_width else None
        m_layers = Fraction(config.model.num_layers, config.num_layers_base)
        self._depth = formulas.depth_factors(self._rule, m_layers, exponent)
        self._shared_depth = formulas.shared_depth_factors(self._rule, m_layers, exponent)
        self._horizon = horizon(config)
        sized = config.parametrization.name == "one_ratio"
        self._one_ratio = Fraction(config.model.hidden_size, config.base.sizes["hidden_size"]) if sized else None
        in_kernel_regime = config.parametrization.name == "ntk"
        self._kernel = formulas.kernel_factors(self._rule, self._readout().m_in if in_kernel_regime else formulas.ONE)
        self.forward = self._forward(base_head_size)

    def row(self, shape: TensorShape) -> TensorHyperparameters:
        """What is decided about one tensor.

        Raises:
            UserError: a rule does not exist for it; names it.
        """
        ratios = self._ratios(shape)
        group = self._group(shape, ratios)
        return TensorHyperparameters(
            shape=shape,
            forward_multiplier=self.forward.of(shape.spec),
            init_std={block: self._init_std(shape, block, ratios) for block in shape.fan_outs},
            gradient_norm={
                block: self._gradient_norm(ratios, m_out) / self._kernel_of(shape.spec).readout ** 2
                for block, m_out in ratios.m_outs.items()
            },
            group=group,
            base=self._base_of(group),
        )

    def _gradient_norm(self, ratios: formulas.Ratios, m_out: Fraction) -> float:
        """Weight of one block in the invariant gradient norm; between parametrizations nothing has a multiplier A."""
        if self._plane is not None:
            return norm_between(self._plane, formulas.gradient_norm(m_in=ratios.m_in, m_out=m_out))
        return float(formulas.gradient_norm(m_in=ratios.m_in, m_out=m_out, forward=ratios.forward))

    def _base_of(self, group: GroupKey) -> BaseValues:
        """What the group's multipliers apply to."""
        if group.update_rule == "soap":
            return self._base._replace(eps=self._config.optimizer.soap_eps)
        return self._base._replace(lr=self._decoupled or self._base.lr) if group.decoupled else self._base

    def _forward(self, base_head_size: int) -> ForwardMultipliers:
        hparams, model = self._config.hparams, self._config.model
        yarn = model.multi_latent_attention and model.rope_type == "yarn"
        mscale = formulas.yarn_mscale(model.rotary_scaling_factor, model.mscale_all_dim) if yarn else 1.0
        plane, named = self._plane, self._config.parametrization.name
        d = base_head_size if named in ("mup", "one_ratio") or plane is not None else model.head_size
        softmax_scale = formulas.softmax_scale(model.head_size, d, hparams.attention_multiplier, mscale)
        readout = float(self._readout().forward) * self._kernel.readout
        if plane is not None:
            tied = not any(shape.spec.readout for shape in self._shapes.values())
            softmax_scale = softmax_between(plane, softmax_scale, head_size=model.head_size, base_head_size=d)
            readout = readout_between(plane, readout, tied=tied)
        return ForwardMultipliers(
            softmax_scale=softmax_scale,
            readout=hparams.output_multiplier * readout,
            embedding=hparams.embedding_multiplier,
            residual=hparams.residual_multiplier * self._depth.branch,
            relative_bias=hparams.relative_bias_multiplier,
        )

    def _ratios(self, shape: TensorShape) -> formulas.Ratios:
        """Those of the tensor; the model's one ratio under `one_ratio`, and 1 where no rule over width holds."""
        if self._one_ratio is not None and (shape.spec.readout or _is_product(shape.spec)):
            return formulas.Ratios(m_in=self._one_ratio, m_outs=dict.fromkeys(shape.fan_outs, self._one_ratio))
        if not self._config.parametrization.follows_width or shape.spec.standard:
            return formulas.Ratios(m_outs=dict.fromkeys(shape.fan_outs, formulas.ONE))
        routed = shape.spec.expert or shape.name.endswith((".router.weight", ".router.bias"))
        return formulas.of_experts(shape.ratios, self._config.experts_ratio) if routed else shape.ratios

    def _readout(self) -> formulas.Ratios:
        """Ratios of the head. A tied head has no tensor of its own; its fan-in is the embedding's fan-out."""
        if self._one_ratio is not None:
            return formulas.Ratios(m_in=self._one_ratio, readout=True)
        for shape in self._shapes.values():
            if shape.spec.readout:
                return self._ratios(shape)
        embedding = next(shape for shape in self._shapes.values() if shape.spec.init is Init.EMBEDDING)
        return formulas.Ratios(m_in=self._ratios(embedding).m_out, readout=True)

    def _group(self, shape: TensorShape, ratios: formulas.Ratios) -> GroupKey:
        spec, config = shape.spec, self._config
        rule = self._rule_of(spec)
        depth, kernel = self._depth_of(shape), self._kernel_of(spec)
        if rule in ("sgd", "soap") and len(set(ratios.m_outs.values())) > 1:
            raise UserError(
                f"optimizer.name: {rule} needs one learning rate per tensor, but the blocks of "
                f"{shape.name} grow by different factors ("
                + ", ".join(f"{block} {float(m):g}" for block, m in ratios.m_outs.items())
                + "); expected adamw, or blocks that grow together"
            )
        if spec.frozen:
            lr: Fraction | float = Fraction(0)
        elif rule == "muon" and config.parametrization.follows_width and not spec.standard:
            lr = _muon_rate(shape) * _exact(depth.lr * kernel.lr)
        else:
            per_layer = config.parametrization.name == "per_layer" and not spec.standard
            m_in = self._fan_in_of_the_product(shape) if per_layer else ratios.m_in
            lr = formulas.learning_rate(rule, m_in=m_in, m_out=ratios.m_out, forward=ratios.forward)
            lr *= _exact(depth.lr * kernel.lr)
        eps = _epsilon(rule, ratios) * _exact(depth.eps * kernel.readout)
        decayed = is_decayed(config, shape) and lr
        decay_rule = config.parametrization.weight_decay if self._one_ratio is None else "coupled"
        decay = formulas.weight_decay(decay_rule, lr) if decayed else Fraction(0)
        if self._plane is not None:
            lr, eps, decay = multipliers_between(
                self._plane, (lr, eps, decay), forward=ratios.forward, is_sgd=rule == "sgd"
            )
        lr, eps = lr * _exact(self._horizon.lr), eps * _exact(self._horizon.eps)
        decay *= _exact(self._horizon.weight_decay)
        return GroupKey(
            update_rule=rule,
            lr=lr,
            eps=eps if rule in formulas.HAS_EPSILON else formulas.ONE,
            weight_decay=decay,
            # As upstream has it: word embeddings and head, not learned positions.
            decoupled=self._decoupled is not None and (spec.readout or shape.name == WORD_EMBEDDINGS),
        )

    def _depth_of(self, shape: TensorShape) -> formulas.DepthFactors:
        """The depth rule's factors: inside the blocks, of a table that all of them share, or none."""
        if shape.spec.standard:
            return formulas.DepthFactors()
        if shape.spec.init is Init.RELATIVE_BIAS:
            return self._shared_depth
        return self._depth if shape.layer is not None else formulas.DepthFactors()

    def _kernel_of(self, spec: TensorSpec) -> formulas.KernelFactors:
        """The factors of `ntk`, where the tensor follows a rule over width."""
        return formulas.KernelFactors() if spec.standard else self._kernel

    def _rule_of(self, spec: TensorSpec) -> formulas.UpdateRule:
        """Megatron-core's Muon, SOAP and Lion take what has two dimensions and is neither embedding nor readout.

        AdamW steps the rest.
        """
        matrix = len(spec.shape) == 2 and _is_product(spec)
        if self._config.steps_matrices and not matrix:
            return "adam"
        return self._rule

    def _init_std(self, shape: TensorShape, block: str | None, ratios: formulas.Ratios) -> float:
        """Standard deviation of one block."""
        spec, config = shape.spec, self._config.parametrization
        if (config.zero_init_readout and spec.readout) or (config.zero_init_query and spec.is_query(block)):
            return 0.0
        std = base_std(self._config, spec.init)
        if spec.standard or (self._one_ratio is not None and spec.readout):
            return std
        if config.name in ("fan_in", "per_layer"):
            return std * formulas.init_std(m_in=self._fan_in_of_the_product(shape))
        output_like = self._one_ratio is None and self.is_output_like(shape, block)
        factor = formulas.init_std(m_in=ratios.m_in, forward=ratios.forward, output_like=output_like)
        return std * (factor if self._plane is None else std_between(self._plane, factor, forward=ratios.forward))

    def _fan_in_of_the_product(self, shape: TensorShape) -> Fraction:
        """m_in without multipliers: of a head tied to the embedding the head's, the one product that it is part of."""
        tied = self._config.model.share_embeddings_and_output_weights and shape.name == WORD_EMBEDDINGS
        return (shape.fan_out if tied else shape.fan_in).ratio

    def is_output_like(self, shape: TensorShape, block: str | None) -> bool:
        """Whether init of one block takes the factor g: the layer's own rule, else the config's."""
        rule = shape.spec.fixed_fan_out_of(block)
        if rule is None:
            named = self._config.parametrization.fixed_fan_out_init
            measured: FixedFanOut = "hidden_like" if ".mlp." in shape.name else "output_like"
            rule = measured if named == "auto" else named
        return formulas.is_output_like(shape.fan_in.grows, shape.fan_outs[block].grows, rule)


def _epsilon(rule: formulas.UpdateRule, ratios: formulas.Ratios) -> Fraction | float:
    if rule == "soap":
        return formulas.basis_epsilon(m_in=ratios.m_in, m_out=ratios.m_out, forward=ratios.forward)
    return formulas.epsilon(m_out=ratios.m_out, forward=ratios.forward)


def _muon_rate(shape: TensorShape) -> Fraction | float:
    """Rate multiplier of a matrix under megatron-core's Muon in scale mode `spectral`.

    The update of what upstream orthogonalises at once has the spectral norm sqrt(larger side), whose growth from the
    base is divided out.
    """
    # Exact, so that equal rates are equal: the square of a multiplier, but for the fan-in that all matrices share.
    squares = {name: dim.ratio / larger_side_growth(dim, shape.fan_in) for name, dim in orthogonalised(shape).items()}
    if len(set(squares.values())) > 1:
        rates = {name: math.sqrt(square / shape.fan_in.ratio) for name, square in squares.items()}
        raise UserError(
            f"optimizer.name: muon needs one learning rate per tensor, but those of {shape.name} would be "
            + ", ".join(f"×{rate:.4g} for the {name}" for name, rate in rates.items())
            + "; expected adamw, or blocks that grow together"
        )
    rows = next(iter(orthogonalised(shape).values()))
    return formulas.learning_rate(
        "muon", m_in=shape.fan_in.ratio * larger_side_growth(rows, shape.fan_in), m_out=rows.ratio
    )


def orthogonalised(shape: TensorShape) -> dict[str, InfDim]:
    """Rows of each matrix that upstream's Muon orthogonalises at once, by block.

    These are query, key and value of the fused QKV each by itself, and any other tensor whole (""), whatever blocks it
    holds (emerging_optimizers.py, TensorParallelMuon.orthogonalize).
    """
    blocks = shape.blocks or {}
    return blocks if "query" in blocks else {"": shape.fan_out}


def larger_side_growth(rows: InfDim, columns: InfDim) -> Fraction:
    """How the larger side of a matrix grows from its base."""
    return Fraction(max(rows.dim, columns.dim), max(rows.base_dim or rows.dim, columns.base_dim or columns.dim))


def _exact(factor: float) -> Fraction | float:
    """A factor of exactly 1 as a fraction, so that it leaves exact multipliers exact."""
    return formulas.ONE if factor == 1.0 else factor
