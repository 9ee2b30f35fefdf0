"""What an architecture of Hugging Face is to this room: a class's name, its config.json, its tensors.

Public names: `Architecture`, `Parts`, `refuse`, `common`, `llama_like`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mup_megatron.config import Config, Model
from mup_megatron.convert.export.fold import Factors, FoldedWeights
from mup_megatron.convert.export.folder import Part
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers.

    Args:
        name: of the class.
        config: from a parametrization and the activation's name: config.json, without vocabulary and special tokens.
        parts: the tensors of its state dict, in order.
        refuse: raises ConfigError with the first key of a model that the class does not compute.
        factors: what the class needs in weights beside the multipliers, by global name; of tensors that take none.
        remark: from the activation's name: what the class computes otherwise; None where nothing is.
    """

    name: str
    config: Callable[[Parametrization, str], dict[str, Any]]
    parts: Callable[[FoldedWeights, Config], list[Part]]
    refuse: Callable[[Config], None]
    factors: Callable[[Parametrization], dict[str, Factors]] = lambda _parametrization: {}
    remark: Callable[[str], str | None] = lambda _activation: None


def refuse(config: Config, name: str, strange: Mapping[str, tuple[bool, str]]) -> None:
    """Refuses a model that a class does not compute.

    Args:
        config: of the checkpoint.
        name: of the class.
        strange: by key of the model, whether it stands in the way, and what it is.

    Raises:
        ConfigError: names the first key that does.
    """
    for key, (found, what) in strange.items():
        if found:
            advice = "expected a model without it, or --to safetensors"
            raise config.error(f"model.{key}", f"{what}, which {name} does not have; {advice}")


def common(parametrization: Parametrization) -> dict[str, Any]:
    """What every config.json says."""
    model = parametrization.config.model
    return {
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "initializer_range": parametrization.config.hparams.init_method_std,
        "use_cache": True,
    }


class Parts:
    """Tensors of a state dict, collected in order.

    Args:
        weights: where they come from.
    """

    def __init__(self, weights: FoldedWeights) -> None:
        self.made: list[Part] = []
        self._weights = weights

    def add(
        self, name: str, source: str, *blocks: str, transposed: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        """One tensor.

        Args:
            name: in the state dict.
            source: megatron-core's global name.
            blocks: of a fused tensor, one after another; the whole unless given.
            transposed: whether a matrix is stored as [fan-in, fan-out].
            dtype: in which it is written, if not in the export's.
        """
        shape = self._weights.shape(source, *blocks)

        def make() -> torch.Tensor:
            tensor = self._weights.read(source, *blocks)
            return tensor.t() if transposed else tensor

        stored = shape[::-1] if transposed else shape
        self.made.append(Part(name=name, shape=stored, make=make, dtype=dtype, source=source))

    def add_gated(self, theirs: str, ours: str, names: tuple[str, str, str], kinds: tuple[str, ...]) -> None:
        """A gated MLP.

        Args:
            theirs: what its tensors' names begin with in the state dict.
            ours: and in megatron-core.
            names: of gate, up and down.
            kinds: weight, or weight and bias.
        """
        for kind in kinds:
            for name, block in zip(names[:2], ("gate", "up"), strict=True):
                self.add(f"{theirs}.{name}.{kind}", f"{ours}.linear_fc1.{kind}", block)
            self.add(f"{theirs}.{names[2]}.{kind}", f"{ours}.linear_fc2.{kind}")

    def add_stacked(self, name: str, sources: Sequence[str], *blocks: str) -> None:
        """One tensor for several of the same shape, [sources, ...]; arguments as of `add`."""
        shape = self._weights.shape(sources[0], *blocks)

        def make() -> torch.Tensor:
            tensor = torch.empty(len(sources), *shape)
            for place, source in enumerate(sources):
                tensor[place] = self._weights.read(source, *blocks)
            return tensor

        self.made.append(Part(name=name, shape=(len(sources), *shape), make=make))

    def add_or_zeros(
        self, name: str, source: str, shape: tuple[int, ...], *blocks: str, dtype: torch.dtype | None = None
    ) -> None:
        """A tensor that the class always has: zeros where the model has none.

        Args:
            name: in the exported file.
            source: the tensor of the checkpoint that it is made of, where that is there.
            shape: of the zeros.
            blocks: of the source; all of it unless given.
            dtype: of the exported tensor; the export's unless given.
        """
        if source in self._weights.specs:
            self.add(name, source, *blocks, dtype=dtype)
        else:
            self.made.append(Part(name=name, shape=shape, make=lambda: torch.zeros(shape), dtype=dtype))


Add = Callable[[Parts, str, str, int], None]
"""Adds a part of a layer: to which parts, what its tensors' names begin with there and in megatron-core, the layer."""


def llama_like(weights: FoldedWeights, model: Model, attention: Add, mlp: Add) -> list[Part]:
    """The tensors of a decoder as Llama's class has it: embedding, layers with two norms, final norm, head.

    Args:
        weights: where they come from.
        model: of the checkpoint.
        attention: adds what is between the norms of a layer.
        mlp: adds what is behind them; its names begin with the layer's own, `model.layers.0`.
    """
    parts = Parts(weights)
    parts.add("model.embed_tokens.weight", WORD_EMBEDDINGS)
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        parts.add(f"{theirs}.input_layernorm.weight", f"{ours}.input_layernorm.weight")
        attention(parts, f"{theirs}.self_attn", f"{ours}.self_attention", layer)
        parts.add(f"{theirs}.post_attention_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight")
        mlp(parts, theirs, f"{ours}.mlp", layer)
    parts.add("model.norm.weight", "decoder.final_layernorm.weight")
    if not model.share_embeddings_and_output_weights:
        parts.add("lm_head.weight", "output_layer.weight")
    return parts.made
