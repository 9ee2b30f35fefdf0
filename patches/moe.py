"""What megatron-core's mixture of experts needs on a machine without CUDA, and its MLA and multi-token prediction
without Transformer Engine.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .patch import Patch, PatchError


def _no_stream(_original: Any) -> type:
    class NoStream:
        """Takes the place of a CUDA stream, so that none is made."""

    return NoStream


def _splits_on_cpu(_original: Callable[..., Any]) -> Callable[..., Any]:
    def _maybe_dtoh_and_synchronize(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert

    return _maybe_dtoh_and_synchronize


def _no_te_linear(original: Any) -> Any:
    if importlib.util.find_spec("transformer_engine") is not None:
        return original

    class NoTELinear:
        """Takes the place of Transformer Engine's linear layer where it is not installed: no layer is an instance."""

    return NoTELinear


def _no_inference_linear(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    installed = importlib.util.find_spec("transformer_engine") is not None

    @functools.wraps(original)
    def is_inference_column_parallel_linear(module: Any) -> bool:
        return installed and original(module)

    return is_inference_column_parallel_linear


def _takes_head_sizes(original: Callable[..., None]) -> Callable[..., None]:
    if "k_channels" in inspect.signature(original).parameters:
        raise PatchError("DotProductAttention takes k_channels itself now; its patch can go")

    @functools.wraps(original)
    def __init__(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return __init__


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"

MOE_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cpu-alltoall-stream",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol=f"{_DISPATCHER}.cuda_dtoh_stream",
        parameters=None,
        why="the all-to-all token dispatcher makes a torch.cuda.Stream when it is built",
        lower_rung="the dispatcher's class is fixed inside MoELayer, whose class is fixed inside TransformerLayer",
        until="megatron-core makes the stream where there is CUDA",
        when="cpu",
        wrap=_no_stream,
    ),
    Patch(
        name="cpu-alltoall-splits",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol=f"{_DISPATCHER}._maybe_dtoh_and_synchronize",
        parameters=("self", "point", "tokens_per_expert"),
        why="it copies the sizes of what is sent on a CUDA stream. On a CPU it leaves them as tensors, but the "
        "collective needs numbers",
        lower_rung="the dispatcher's class is fixed inside MoELayer, whose class is fixed inside TransformerLayer",
        until="maybe_move_tensor_to_cpu converts tensors that are on the CPU",
        when="cpu",
        wrap=_splits_on_cpu,
    ),
    Patch(
        name="mla-no-te-linear",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.transformer.multi_latent_attention:TELinear",
        parameters=None,
        why="0.16's MLA calls isinstance(layer, TELinear) also where Transformer Engine is not installed; TELinear is "
        "a mock there, which is a TypeError",
        lower_rung="MultiLatentAttention's constructor calls it with a global name of its module",
        until="megatron-core 0.16 is left behind",
        when="always",
        wrap=_no_te_linear,
        needed="<0.17",
    ),
    Patch(
        name="mtp-no-te-linear",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.transformer.multi_token_prediction:is_inference_column_parallel_linear",
        parameters=("module",),
        why="0.20 asks isinstance(layer, InferenceColumnParallelLinear) of every layer of a further prediction also "
        "where Transformer Engine is not installed; the class is made of a mock there, which is a TypeError",
        lower_rung="MultiTokenPredictionLayer's constructor calls it with a global name of its module",
        until="megatron-core asks only where Transformer Engine is installed",
        when="always",
        wrap=_no_inference_linear,
        needed=">=0.20.dev0",
    ),
    Patch(
        name="mla-local-attention",
        distribution="megatron-core",
        versions=">=0.16.1,<0.21",
        symbol="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        parameters=None,
        why="MLA gives its attention the head sizes k_channels and v_channels, which Transformer Engine's takes and "
        "megatron-core's own does not: no local spec builds MLA, and a model is parametrised as its spec builds it",
        lower_rung="a subclass (model/layers/attention.py) is in no spec of the script's; upstream's fixes the class",
        until="DotProductAttention takes k_channels and v_channels",
        when="always",
        wrap=_takes_head_sizes,
    ),
)
