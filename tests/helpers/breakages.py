"""Negative controls: one thing of the library taken out or done wrong, for as long as a body runs.

Each is a context manager by name; a test asserts that its comparison then fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def no_sequence_parallel_reduction() -> contextlib.AbstractContextManager[None]:
    """Gradients of sequence-parallel parameters are not summed over tensor-parallel ranks."""
    from mup_megatron.engines import deepspeed

    return replaced(deepspeed, "sum_sequence_parallel_gradients", lambda model: None)


def norms_not_marked_sequence_parallel() -> contextlib.AbstractContextManager[None]:
    """The norm shim forgets to mark its gains."""
    from mup_megatron.model.layers import norm

    original = norm.set_gain_specs
    return replaced(norm, "set_gain_specs", lambda module, size, _marked, *more: original(module, size, False, *more))


def no_mpu() -> contextlib.AbstractContextManager[None]:
    """DeepSpeed without an mpu: it takes all ranks for data-parallel and broadcasts rank 0's weights."""
    import deepspeed

    original = deepspeed.initialize

    def initialize(**arguments: Any) -> Any:
        # By the global batch size DeepSpeed would notice that ranks are missing.
        config = {key: value for key, value in arguments["config"].items() if key != "train_batch_size"}
        return original(**{**arguments, "mpu": None, "config": config})

    return replaced(deepspeed, "initialize", initialize)


def init_by_local_shape() -> contextlib.AbstractContextManager[None]:
    """Weights drawn from the slice's own shape, as if it were the whole tensor."""
    from mup_megatron.model import init

    original = init.fill

    def fill(tensor: torch.Tensor, **arguments: Any) -> None:
        spec = arguments["spec"]
        local = type(spec)(**{**spec.__dict__, "shape": tuple(tensor.shape), "fused": None, "partition_dim": None})
        std = {None: next(iter(arguments["std"].values()))}
        original(tensor, **{**arguments, "spec": local, "std": std, "rank": 0, "ranks": 1})

    return replaced(init, "fill", fill)


def width_from_local_shape() -> contextlib.AbstractContextManager[None]:
    """The rate reads the fan-in from the parameter itself, which under tensor parallelism is a slice of it."""
    from mup_megatron.engines import deepspeed

    original = deepspeed.parameter_groups

    def parameter_groups(named_parameters: Any, parametrization: Any) -> list[dict[str, Any]]:
        groups = original(named_parameters, parametrization)
        for group in groups:
            shape = parametrization.tensors[group["names"][0]].shape
            if shape.spec.fan_in == 1:
                local, base = group["params"][0].shape[1], shape.base_shape[1]
                group["lr_multiplier"] = base / local
                group["lr"] = parametrization.config.hparams.lr * base / local
        return groups

    return replaced(deepspeed, "parameter_groups", parameter_groups)


def no_readout_multiplier() -> contextlib.AbstractContextManager[None]:
    from mup_megatron.model.architectures import gpt

    return replaced(gpt, "scale_input", lambda module, multiplier: None)


def no_embedding_multiplier() -> contextlib.AbstractContextManager[None]:
    from mup_megatron.model.architectures import gpt

    return replaced(gpt, "scale_output", lambda module, multiplier: None)


def no_residual_multiplier() -> contextlib.AbstractContextManager[None]:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    from mup_megatron.model.layers import spec

    return replaced(spec, "scaled_bias_dropout_add", lambda multiplier: get_bias_dropout_add)


def _without_shim(name: str) -> contextlib.AbstractContextManager[None]:
    """Upstream's own layer in the place of a shim of linear layers."""
    from megatron.core import tensor_parallel

    from mup_megatron.model.layers import linear

    (upstream,) = (c for c in getattr(linear, name).__mro__ if c in vars(tensor_parallel).values())
    return replaced(linear, name, upstream)


def no_qkv_shim() -> contextlib.AbstractContextManager[None]:
    return _without_shim("QKVColumnParallelLinear")


def no_fc1_shim() -> contextlib.AbstractContextManager[None]:
    return _without_shim("FC1ColumnParallelLinear")


def no_row_parallel_shim() -> contextlib.AbstractContextManager[None]:
    return _without_shim("RowParallelLinear")


def no_qkv_blocks() -> contextlib.AbstractContextManager[None]:
    """QKV as one block."""
    from mup_megatron.model.layers import linear

    return replaced(linear.QKV, "fused", lambda self, config, rows: None)


def no_router_shim() -> contextlib.AbstractContextManager[None]:
    from megatron.core.transformer.moe.router import TopKRouter

    from mup_megatron.model.layers import spec

    return replaced(spec, "TopKRouter", TopKRouter)


def no_shared_expert_shim() -> contextlib.AbstractContextManager[None]:
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from mup_megatron.model.layers import spec

    return replaced(spec, "SharedExpertMLP", SharedExpertMLP)


def no_mla_shim() -> contextlib.AbstractContextManager[None]:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from mup_megatron.model.layers import spec

    return replaced(spec, "MLASelfAttention", MLASelfAttention)


def no_query_up_shim() -> contextlib.AbstractContextManager[None]:
    return _without_shim("QueryUpColumnParallelLinear")


def no_key_value_up_shim() -> contextlib.AbstractContextManager[None]:
    return _without_shim("KeyValueUpColumnParallelLinear")


def no_eh_proj_shim() -> contextlib.AbstractContextManager[None]:
    return _without_shim("ColumnParallelLinear")


def no_gather_hook() -> contextlib.AbstractContextManager[None]:
    """The rotary part of MLA's key as upstream gathers it: its gradient comes from this rank's heads alone."""
    from mup_megatron.model.layers.attention import MLASelfAttention

    return replaced(MLASelfAttention, "_gather", lambda self, module, inputs, output: output)


def upstream_softmax_scale() -> contextlib.AbstractContextManager[None]:
    """MLA at the scale that upstream works out for itself."""
    from mup_megatron.model.layers.attention import MLASelfAttention

    upstream = property(
        lambda self: self.__dict__["scale"], lambda self, scale: self.__dict__.__setitem__("scale", scale)
    )
    return replaced(MLASelfAttention, "softmax_scale", upstream)


def qk_norm_not_summed_over_heads() -> contextlib.AbstractContextManager[None]:
    """Gains of QK-norms are taken for whole on every rank."""
    from mup_megatron.model.layers import spec

    original = spec.norm_class
    return replaced(spec, "norm_class", lambda *arguments, per_head=False, **keys: original(*arguments, **keys))


def no_relative_bias_spec() -> contextlib.AbstractContextManager[None]:
    from mup_megatron.model.layers import position_bias

    return replaced(position_bias, "set_relative_bias_spec", lambda module: None)


def relative_bias_gradient_of_own_heads() -> contextlib.AbstractContextManager[None]:
    """A rank slices its heads off the table, and gets no gradient of the others'."""
    from mup_megatron.model.layers import position_bias

    def own(table: torch.Tensor, group: Any) -> torch.Tensor:
        return table.chunk(group.size(), dim=-1)[group.rank()]

    return replaced(position_bias, "scatter_to_tensor_model_parallel_region", own)


def t5_bias_gradient_of_own_heads() -> contextlib.AbstractContextManager[None]:
    """In both stacks of an encoder-decoder, a rank's copy of the table gets the gradient of its own heads alone."""
    from megatron.core import parallel_state
    from megatron.core.models.T5 import t5_model

    def own(bias: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return bias.chunk(ranks, dim=-1)[parallel_state.get_tensor_model_parallel_rank()]

    return replaced(t5_model, "scatter_to_tensor_model_parallel_region", own)


def relative_bias_copies_apart() -> contextlib.AbstractContextManager[None]:
    """Each pipeline stage trains its own copy of the table."""
    from mup_megatron.model.layers import position_bias

    return replaced(position_bias, "_mark_copies", lambda model, bias: None)


def slopes_of_local_heads() -> contextlib.AbstractContextManager[None]:
    """ALiBi's slopes by the number of heads that a tensor-parallel rank has."""
    from mup_megatron.model.layers import position_bias

    original = position_bias.alibi_slopes
    return replaced(position_bias, "alibi_slopes", lambda heads: original(heads // 2) * 2)


def bias_gradient_not_collected() -> contextlib.AbstractContextManager[None]:
    """Every recomputed layer walks through the graph of the one bias."""
    from mup_megatron.model.layers import position_bias

    return replaced(position_bias, "_collected", lambda block, kwargs, bias: bias)


def hidden_losses_not_scaled() -> contextlib.AbstractContextManager[None]:
    """megatron-core takes every micro-batch for a step of its own, as it does until it is told."""
    from mup_megatron.engines import deepspeed

    original = deepspeed.scale_hidden_losses
    return replaced(deepspeed, "scale_hidden_losses", lambda micro_batches, device: original(1, device))


def expert_bias_not_updated() -> contextlib.AbstractContextManager[None]:
    from mup_megatron.engines import deepspeed

    return replaced(deepspeed, "update_expert_bias", lambda model: None)


def no_norm_shim() -> contextlib.AbstractContextManager[None]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from mup_megatron.model.layers import spec

    return replaced(spec, "norm_class", lambda *arguments, **keys: WrappedTorchNorm)


def no_embedding_record() -> contextlib.AbstractContextManager[None]:
    from mup_megatron.model.architectures import gpt

    return replaced(gpt, "set_embedding_specs", lambda embedding: None)


def no_readout_record() -> contextlib.AbstractContextManager[None]:
    from mup_megatron.model.architectures import gpt

    return replaced(gpt, "set_readout_spec", lambda output_layer, *, tied: None)


def no_finalize_model_grads() -> contextlib.AbstractContextManager[None]:
    """Megatron's gradients are not reduced over ranks."""
    from mup_megatron.engines import megatron

    return replaced(megatron, "finalize_model_grads", lambda *arguments, **keys: None)


def no_config_overrides() -> contextlib.AbstractContextManager[None]:
    """Megatron's optimizer gets one rate for all groups."""
    from mup_megatron.engines import megatron

    original = megatron.megatron_overrides

    def overrides(*arguments: Any) -> dict[Any, Any]:
        return {key: {**value, "lr_multiplier": 1.0} for key, value in original(*arguments).items()}

    return replaced(megatron, "megatron_overrides", overrides)


def sequence_in_order() -> contextlib.AbstractContextManager[None]:
    """Context-parallel ranks take the sequence in order, as whole parts."""
    from mup_megatron.data import gpt

    return replaced(gpt, "sequence_part", lambda sequences, rank, ranks: sequences.chunk(ranks, dim=1)[rank])


def experts_by_local_number() -> contextlib.AbstractContextManager[None]:
    """Experts are named, and so drawn, by their number on the rank."""
    from mup_megatron.model import global_names

    return replaced(global_names, "global_expert_names", lambda chunk: lambda name: name)


def layers_by_local_number() -> contextlib.AbstractContextManager[None]:
    """Layers are named, and so drawn, by their number on the stage."""
    from mup_megatron.model import global_names

    original = global_names.global_names
    local = "decoder.layers."
    return replaced(
        global_names,
        "global_names",
        lambda chunk: lambda name: name if name.startswith(local) else original(chunk)(name),
    )


@contextlib.contextmanager
def no_announced_experts() -> Iterator[None]:
    """DeepSpeed takes experts that are spread over ranks for parameters that every rank holds."""
    from mup_megatron.engines import deepspeed

    def deny(model: torch.nn.Module, layout: Any) -> None:
        for parameter in model.parameters():
            parameter.allreduce = True

    with (
        replaced(deepspeed, "announce_experts", deny),
        replaced(deepspeed, "mark_expert_groups", lambda groups, layout: groups),
    ):
        yield


def clipped_by_deepspeed_s_own_norm() -> contextlib.AbstractContextManager[None]:
    """The gradients are clipped by the norm that DeepSpeed works out where experts are spread over ranks."""
    from mup_megatron.engines.deepspeed import DeepSpeedEngine

    def clip(engine: Any) -> float:
        norm = float(engine.optimizer.scaled_global_norm())
        for gradients in engine.optimizer.averaged_gradients.values():
            for gradient in gradients:
                gradient.mul_(min(1.0, engine._config.training.clip_grad / (norm + 1e-6)))
        return norm

    return replaced(DeepSpeedEngine, "_clip", clip)


def invariant_norm_without_weights() -> contextlib.AbstractContextManager[None]:
    """The invariant norm is the plain one."""
    from mup_megatron.engines import gradient_norm

    return replaced(gradient_norm, "_weighted", lambda squares, *_: squares.sum())


def parts_without_their_place() -> contextlib.AbstractContextManager[None]:
    """A partition of a gradient is weighted as if it began with the tensor's first row."""
    from mup_megatron.engines import gradient_norm

    original = gradient_norm._weighted
    return replaced(gradient_norm, "_weighted", lambda squares, _start, *rest: original(squares, 0, *rest))


@contextlib.contextmanager
def every_rank_counts() -> Iterator[None]:
    """The sum over ranks takes what several of them hold as often as it is held."""
    from mup_megatron.engines import deepspeed_parts, optimizer_state

    with (
        replaced(deepspeed_parts, "holders", lambda spec, layout: 1),
        replaced(optimizer_state, "holders", lambda spec, layout: 1),
    ):
        yield


def attention_that_no_hook_understands() -> contextlib.AbstractContextManager[None]:
    """A kernel's query and key have other dimensions than megatron-core's."""
    from mup_megatron.telemetry import reading

    def logits(*_: Any) -> Any:
        raise ValueError("too many indices")

    return replaced(reading, "attention_logits", logits)


def slices_swapped() -> contextlib.AbstractContextManager[None]:
    """Tensor-parallel ranks read each other's slices of a checkpoint."""
    from mup_megatron.engines import state

    original = state._shards

    def shards(key: str, value: Any, spec: Any, layout: Any, rank: int) -> Any:
        return original(key, value, spec, layout, rank ^ 1 if layout.tensor > 1 else rank)

    return replaced(state, "_shards", shards)


def load_weights_alone() -> contextlib.AbstractContextManager[None]:
    """A checkpoint is loaded without the optimizer's state."""
    from tests.helpers import bodies

    return replaced(bodies, "load_state", lambda *arguments: None)


def keys_apart_from_values() -> contextlib.AbstractContextManager[None]:
    """Cross-attention's fused keys and values are taken for two halves, of which each rank has a part, as gate|up."""
    from mup_megatron.model.layers import linear

    original = linear.ColumnSpecs.specs

    def specs(layer: Any, *sizes: Any, stride: int = 1, **more: Any) -> Any:
        return original(layer, *sizes, stride=2 if isinstance(layer, linear.KeyValue) else stride, **more)

    return replaced(linear.ColumnSpecs, "specs", specs)


def mean_of_micro_batches() -> contextlib.AbstractContextManager[None]:
    """Of pairs, the loss is a mean over each micro-batch's own labels."""
    from mup_megatron.data.t5 import T5Batch

    def loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
        return (output.float() * batch.loss_mask).sum() / batch.loss_mask.sum()

    return replaced(T5Batch, "loss", loss)


def lion_as_deepspeed_has_it() -> contextlib.AbstractContextManager[None]:
    """DeepSpeed's Lion, which moves what has no gradient."""
    from mup_megatron.engines import lion

    return replaced(lion, "_mended", lambda kind: kind)


def muon_slices() -> contextlib.AbstractContextManager[None]:
    """Muon takes what a rank holds of a matrix for the whole, as is megatron-core's default."""
    from mup_megatron.engines import megatron_config

    original = megatron_config._muon
    return replaced(megatron_config, "_muon", lambda config: {**original(config), "muon_tp_mode": "blockwise"})


@contextlib.contextmanager
def muon_experts_over_the_dense_ranks() -> Iterator[None]:
    """Muon puts an expert's matrix together over the ranks that share the dense ones."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    original = TensorParallelMuon.orthogonalize

    def orthogonalize(self: Any, p: Any, grad: torch.Tensor, **arguments: Any) -> torch.Tensor:
        p.expert_tp = False
        return original(self, p, grad, **arguments)

    with replaced(TensorParallelMuon, "orthogonalize", orthogonalize):
        yield


def soap_as_megatron_has_it() -> contextlib.AbstractContextManager[None]:
    """SOAP with megatron-core's defaults: KL-Shampoo's averages."""
    from mup_megatron.engines import megatron_config

    return replaced(megatron_config, "_soap", lambda config: {})


def layer_wise_steps_stay() -> contextlib.AbstractContextManager[None]:
    """What a rank has stepped of Muon's matrices stays there."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    return replaced(LayerWiseDistributedOptimizer, "allgather_params", lambda self: None)


def fsdp2_of_each_rank_alone() -> contextlib.AbstractContextManager[None]:
    """FSDP2 over a group of one: no rank hears of the others' gradients."""
    import torch.distributed

    from mup_megatron.engines import fully_sharded

    def wrap(chunk: Any, settings: Any, module: Any) -> Any:
        groups = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
        own = groups[torch.distributed.get_rank()]
        kinds = {fully_sharded.TransformerLayer}
        return fully_sharded._FullySharded(chunk.config, settings, module, kinds, process_group=own)

    return replaced(fully_sharded, "wrap", wrap)


def fsdp2_embedding_alone() -> contextlib.AbstractContextManager[None]:
    """The embedding is sharded by itself, as megatron-core does it, and a tied head reads what is sharded."""
    from mup_megatron.engines import fully_sharded

    return replaced(
        fully_sharded,
        "wrap",
        lambda chunk, settings, module: fully_sharded._FullySharded(
            chunk.config, settings, module, {fully_sharded.TransformerLayer, fully_sharded.LanguageModelEmbedding}
        ),
    )


def fsdp2_first_rows() -> contextlib.AbstractContextManager[None]:
    """Each rank takes the first rank's rows of what a checkpoint holds."""
    from mup_megatron.engines import fully_sharded

    return replaced(fully_sharded, "_first_row", lambda shared: 0)


def no_theta_in_the_forward_pass() -> contextlib.AbstractContextManager[None]:
    """Weights are stored at unit scale, and no layer multiplies by what was divided out."""
    from mup_megatron.model import build as model

    return replaced(model, "_multiply_back", lambda chunk, table: None)


def row_layers_are_not_known() -> contextlib.AbstractContextManager[None]:
    """The layers that multiply by θ are looked for by class, and one class is missing."""
    from mup_megatron.model.layers import unit_scaling

    return replaced(unit_scaling, "_LINEAR", unit_scaling._LINEAR[:1])


def bias_times_theta() -> contextlib.AbstractContextManager[None]:
    """A layer multiplies what it gives, its bias included, although a bias is stored as it is."""
    from mup_megatron.model.layers import unit_scaling

    def scale_linear(layer: Any, theta: float) -> None:
        layer.register_forward_hook(lambda _layer, _inputs, result: (result[0] * theta, result[1]))

    return replaced(unit_scaling, "_scale_linear", scale_linear)


def norm_of_stored_gradients() -> contextlib.AbstractContextManager[None]:
    """The norm that clips is that of the gradients as they are of what is stored."""
    from mup_megatron.engines import gradient_norm

    return replaced(gradient_norm, "_plain", lambda squares, tensor: squares.sum())


def unit_scale_without_epsilon() -> contextlib.AbstractContextManager[None]:
    """Adam's epsilon stays where the gradient is divided."""
    return _stored_over(lambda whole, changed: changed.retuned(eps=whole.group.eps))


def unit_scale_without_decay() -> contextlib.AbstractContextManager[None]:
    """Weight decay stays where the rate is multiplied."""
    return _stored_over(lambda whole, changed: changed.retuned(decay=whole.group.weight_decay))


def _stored_over(change: Any) -> contextlib.AbstractContextManager[None]:
    from mup_megatron.rules.table import TensorHyperparameters

    original = TensorHyperparameters.stored_over
    return replaced(TensorHyperparameters, "stored_over", lambda row, theta: change(row, original(row, theta)))


@contextlib.contextmanager
def _patch_off(name: str) -> Iterator[None]:
    from mup_megatron.parallel import upstream
    from mup_megatron.patches import ALL_PATCHES

    patch = next(patch for patch in ALL_PATCHES if patch.name == name)
    patch.revert()
    try:
        with (
            replaced(upstream, "prepare_process", lambda: None),
            replaced(upstream, "prepare_deepspeed", lambda: None),
        ):
            yield
    finally:
        patch.apply()


@contextlib.contextmanager
def break_(name: str) -> Iterator[None]:
    """The breakage of that name; `patch:NAME` reverts a patch. TensorSpecs set before or meanwhile are forgotten."""
    from mup_megatron.model import build as model

    broken = _patch_off(name.removeprefix("patch:")) if name.startswith("patch:") else globals()[name]()
    model._SPECS.clear()
    try:
        with broken:
            yield
    finally:
        model._SPECS.clear()
