"""Every forward multiplier folded into the weights: a model that computes the same and knows nothing of µP.

Public names: `fold`, `plain_softmax_scale`, `row_factors`, `FoldedWeights`, `expert_biases`, `EXPERT_BIAS`.
docs/export.md says which factor goes where, and why the function stays the same.

A factor may differ by the blocks of a fused tensor: of a fused QKV only the query rows are scaled. Products are rounded
once, from float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from mup_megatron.config import Model
from mup_megatron.engines.saved_weights import SavedWeights
from mup_megatron.rules import formulas
from mup_megatron.rules.shapes import Init, TensorSpec
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization
from mup_megatron.util.errors import UserError

Factors = dict[str | None, float]
"""What the rows of a tensor are multiplied with, by block; {None: factor} for a tensor that is one block."""

EXPERT_BIAS = "expert_bias"
"""What a router keeps beside its weight, moved by load: it takes part in the choice of experts."""
_CHUNK = 1 << 22
_NEUTRAL: Factors = {None: 1.0}


def fold(parametrization: Parametrization) -> dict[str, Factors]:
    """Which tensor takes which factor, so that the model without multipliers is the same function.

    Embeddings take the embedding's multiplier, output projections of both branches (weight and bias) the residual
    one, query rows (weight and bias) the softmax scale over megatron-core's own. The readout's goes into the head;
    where the head is tied to the embedding, into the norm before it, divided by what the embedding has taken. Under
    QK-norm, which undoes any scale of the query rows, the query norm takes what they would have taken.

    Args:
        parametrization: of the checkpoint; its `forward` says every multiplier.

    Returns:
        Factors by global name; the tensors that are left out have none.

    Raises:
        ConfigError: a factor has no place to go; names the key that takes it away.
    """
    config, forward = parametrization.config, parametrization.forward
    model = config.model
    query = forward.softmax_scale / plain_softmax_scale(parametrization)
    final_norm = forward.readout / forward.embedding if model.share_embeddings_and_output_weights else 1.0
    if final_norm != 1.0 and "final_layernorm" in model.without_norms:
        raise config.error(
            "model.without_norms",
            f"names the final norm, whose gain would take the factor {final_norm:g} of a head that is tied to the "
            "embedding; no other weight can take it",
        )
    if query != 1.0 and model.qk_l2_norm:
        raise config.error(
            "model.qk_l2_norm",
            f"undoes every scale of the queries and has no gain, so no weight can take attention's factor {query:g}",
        )
    normed = model.qk_layernorm and not model.multi_latent_attention  # whose norms are of the latents
    norms = {_norm_before_head(model): final_norm}
    if normed:
        norms |= {f"{layer}.self_attention.q_layernorm": query for layer in _layers(model)}
    found: dict[str, Factors] = {
        f"{norm}.{part}": {None: factor} for norm, factor in norms.items() for part in ("weight", "bias")
    }
    for name, shape in parametrization.shapes.items():
        spec, layer = shape.spec, name.rpartition(".")[0]
        if name.startswith("mtp."):
            continue
        if spec.init is Init.EMBEDDING:
            found[name] = {None: forward.embedding}
        elif spec.init is Init.RELATIVE_BIAS:
            found[name] = {None: forward.relative_bias}
        elif spec.readout:
            found[name] = {None: forward.readout}
        elif layer.endswith((".linear_proj", ".linear_fc2")):
            found[name] = {None: forward.residual}
        elif layer.endswith(".linear_qkv") and not normed:
            found[name] = {block: query if block == "query" else 1.0 for block in shape.fan_outs}
        elif layer.endswith((".linear_q", ".linear_q_proj", ".linear_q_up_proj")):
            found[name] = dict.fromkeys(shape.fan_outs, query)
    return found


def _norm_before_head(model: Model) -> str:
    return "lm_head.layer_norm" if model.family == "bert" else "decoder.final_layernorm"


def _layers(model: Model) -> list[str]:
    """What the names of each layer's tensors begin with."""
    return [f"{stack}.layers.{layer}" for stack, count in model.stacks.items() for layer in range(count)]


def _times_theta(parametrization: Parametrization, factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """The same factors of tensors that are stored over θ (docs/parametrization.md, section 11).

    Args:
        parametrization: of the checkpoint.
        factors: of the tensors before θ was divided out.
    """
    found = dict(factors)
    for name, tensor in parametrization.tensors.items():
        if tensor.theta != 1:
            before = factors.get(name, _NEUTRAL)
            found[name] = {block: factor * float(tensor.theta) for block, factor in before.items()}
    return found


def plain_softmax_scale(parametrization: Parametrization) -> float:
    """Of megatron-core's attention where nobody sets it, as Hugging Face's: 1/sqrt(d), with YaRN's factor under MLA."""
    model = parametrization.config.model
    yarn = model.multi_latent_attention and model.rope_type == "yarn"
    mscale = formulas.yarn_mscale(model.rotary_scaling_factor, model.mscale_all_dim) if yarn else 1.0
    return formulas.softmax_scale(model.head_size, model.head_size, 1.0, mscale)


class FoldedWeights:
    """The weights of a checkpoint under megatron-core's global names, read one by one, each with its factor in it.

    Norms always have gains here, as plain models have: those that were trained around 0 are written around 1, those
    that the model does without are 1. Multi-token prediction, which only training needs, is left out.

    Args:
        saved: the checkpoint's.
        parametrization: of the same model.
        factors: from `fold`; empty where multipliers are kept. What is stored over θ takes θ beside them.
        vocabulary: rows of embedding and head that are kept; the others pad the vocabulary.

    Raises:
        UserError: the checkpoint lacks a tensor, or has another shape.
    """

    def __init__(
        self,
        saved: SavedWeights,
        parametrization: Parametrization,
        factors: Mapping[str, Factors],
        vocabulary: int,
    ) -> None:
        self._saved, self._vocabulary = saved, vocabulary
        self._zero_centered = parametrization.config.model.layernorm_zero_centered_gamma
        self.factors = _times_theta(parametrization, factors)
        self.specs = {name: shape.spec for name, shape in parametrization.shapes.items() if not name.startswith("mtp.")}
        self.specs |= expert_biases(parametrization)
        for name, spec in self.specs.items():
            if saved.shapes.get(name) != spec.shape:
                found = f"of shape {list(saved.shapes[name])}" if name in saved.shapes else "missing"
                raise UserError(f"{name} is {found} in the checkpoint; expected {list(spec.shape)}")
        self._made = self._norms_without_gains(parametrization)
        self.specs |= self._made
        self._last: tuple[str, torch.Tensor] | None = None

    def shape(self, name: str, *blocks: str) -> tuple[int, ...]:
        """Shape of what `read` returns."""
        spec = self.specs[name]
        rows = self._vocabulary if _has_vocabulary(name, spec) else spec.shape[0]
        if blocks and spec.fused:
            rows = sum(spec.fused.fan_outs[block] for block in blocks)
        return (rows, *spec.shape[1:])

    @torch.no_grad()
    def read(self, name: str, *blocks: str) -> torch.Tensor:
        """One tensor, float32; the whole is kept until another is read, so that its blocks can be taken in turn.

        Args:
            name: global name.
            blocks: of a fused tensor, one after another, each with its rows together; the whole unless given.

        Raises:
            UserError: a file of the checkpoint is damaged.
        """
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._read(name)
        tensor, fused = self._last[1], self.specs[name].fused
        if not blocks or fused is None:
            return tensor
        repeated = tensor.view(fused.repeats, -1, *tensor.shape[1:])
        runs = [rows for _, rows in fused.runs]
        found = dict(zip(fused.fan_outs, repeated.split(runs, dim=1), strict=True))
        return torch.cat([found[block].flatten(0, 1) for block in blocks])

    def _read(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        if name in self._made:
            tensor = torch.full(spec.shape, float(spec.init is Init.ONES))
        else:
            tensor = self._saved.read(name)
            if self._zero_centered and "layernorm" in name and name.endswith(".weight"):
                tensor += 1.0
        if _has_vocabulary(name, spec):
            tensor = tensor[: self._vocabulary]
        factors = row_factors(self.factors.get(name, _NEUTRAL), spec, len(tensor))
        rows = max(1, _CHUNK // max(1, tensor[0].numel()))
        for part, factor in zip(tensor.split(rows), factors.split(rows), strict=True):
            part.copy_(part.double() * factor.view(-1, *[1] * (tensor.dim() - 1)))
        return tensor

    @staticmethod
    def _norms_without_gains(parametrization: Parametrization) -> dict[str, TensorSpec]:
        """Gains of 1 (and LayerNorm's biases of 0) of the norms that have none."""
        config = parametrization.config
        model = config.model
        if model.norm_gains != "none":
            return {}
        layers = _layers(model)
        norms = [f"{layer}.{norm}" for layer in layers for norm in ("input_layernorm", "pre_mlp_layernorm")]
        norms += [f"{stack}.final_layernorm" for stack in model.stacks]
        if model.family == "t5":
            norms += [f"decoder.layers.{layer}.pre_cross_attn_layernorm" for layer in range(model.stacks["decoder"])]
        sizes = {norm: model.hidden_size for norm in norms if norm.rpartition(".")[2] not in model.without_norms}
        if model.qk_layernorm and model.multi_latent_attention:
            ranks = {"q_layernorm": model.q_lora_rank, "kv_layernorm": model.kv_lora_rank}
            sizes |= {
                f"{layer}.self_attention.{norm}": rank for layer in layers for norm, rank in ranks.items() if rank
            }
        elif model.qk_layernorm:
            of_heads = ("self_attention.q_layernorm", "self_attention.k_layernorm")
            sizes |= {f"{layer}.{norm}": model.head_size for layer in layers for norm in of_heads}
        one = TensorSpec(shape=(1,), fan_in=None, fan_out=0, init=Init.ONES)
        gains = {f"{name}.weight": dataclasses.replace(one, shape=(size,)) for name, size in sizes.items()}
        if model.normalization == "RMSNorm":
            return gains
        biases = {
            f"{name}.bias": dataclasses.replace(one, shape=(size,), init=Init.ZEROS) for name, size in sizes.items()
        }
        return gains | biases


def expert_biases(parametrization: Parametrization) -> dict[str, TensorSpec]:
    """What routers keep beside their weights, in float32, by global name."""
    model = parametrization.config.model
    if not model.moe_router_enable_expert_bias:
        return {}
    spec = TensorSpec(shape=(model.num_moe_experts or 0,), fan_in=None, fan_out=0, init=Init.ZEROS)
    layers = [layer for layer, experts in enumerate(model.expert_layers) if experts]
    return {f"decoder.layers.{layer}.mlp.router.{EXPERT_BIAS}": spec for layer in layers}


def _has_vocabulary(name: str, spec: TensorSpec) -> bool:
    return name == WORD_EMBEDDINGS or spec.readout or name.endswith("output_layer.bias")


def row_factors(factors: Factors, spec: TensorSpec, rows: int) -> torch.Tensor:
    """A factor per row, float64."""
    if spec.fused is None or None in factors:
        return torch.full((rows,), factors[None], dtype=torch.float64)
    run = [torch.full((count,), factors[block], dtype=torch.float64) for block, count in spec.fused.runs]
    return torch.cat(run).repeat(spec.fused.repeats)
