"""Bytes on the fullest process of a run: weights, gradients and optimizer state; activations.

Public names: `state_bytes`, `activation_bytes`, `element_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mup_megatron.config import Config
from mup_megatron.engines.optim import SQUARES, moment_shape
from mup_megatron.model.explain import holds
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import Parametrization
from mup_megatron.tuning.shares import Share, on_stage, shares


def state_bytes(parametrization: Parametrization, layout: Layout, held: Sequence[Share] | None = None) -> int:
    """Bytes of weights, gradients and optimizer state on the process that holds most of them; no activations.

    Per parameter (ZeRO, arXiv 1910.02054, section 3.1, with this project's fp32 beside its bf16): weights 2 or 4,
    gradients as much (4 in Megatron's buffers), Adam's two moments 8 (taken for Muon too), SGD's momentum 4, bf16's
    master copy 4. SOAP keeps four more squares of float32 per matrix, two over its rows and two over its columns.
    What is split over data-parallel ranks is divided by their number, experts' by that of the ranks with the same ones.

    Args:
        parametrization: of the run.
        layout: how ranks split the model.
        held: `shares(parametrization)`, where they are made already.
    """
    config, held = parametrization.config, held or shares(parametrization)
    bf16 = config.training.precision == "bf16"
    buffers = config.parallel.engine == "megatron" and not layout.fully_sharded
    weights, gradients = (2, 4 if buffers else 2) if bf16 else (4, 4)
    state = (4 if config.optimizer.name == "sgd" else 8) + (4 if bf16 else 0)
    stage = 3 if layout.fully_sharded else layout.zero_stage
    split = [stage >= 1 or layout.distributed_optimizer or layout.layer_wise, stage >= 2, stage >= 3]
    sizes = list(zip((state, gradients, weights), split, strict=True))
    each = [sum(size / (layout.replicas(expert) if over else 1) for size, over in sizes) for expert in (False, True)]
    over = layout.replicas(False) if split[0] else 1
    return round(
        max(
            sum(share.elements_on(layout) * each[share.expert] for share in on_stage(held, config, layout, stage))
            + _squares(parametrization, layout, layout.first_rank(stage)) / over
            for stage in range(layout.pipeline)
        )
    )


def _squares(parametrization: Parametrization, layout: Layout, rank: int) -> int:
    """Bytes of SOAP's square matrices on a rank."""
    return 4 * sum(
        math.prod(moment_shape(kind, tensor.shape.spec.shape))
        for name, tensor in parametrization.tensors.items()
        if tensor.group.update_rule == "soap" and holds(parametrization.config, layout, rank, name)
        for kind in SQUARES
    )


def activation_bytes(parametrization: Parametrization, layout: Layout) -> int:
    """Bytes that the backward pass needs on the process that holds most of them, about.

    What each layer's operations keep (Korthikanti et al., arXiv 2205.05198, section 4, for any FFN size, heads, experts
    and precision), times the micro-batches under way in the pipeline; where the logits are, those in float32 too.
    Buffers of communication and of the optimizer are not counted.
    """
    config = parametrization.config
    if config.model.family == "t5":
        return round(config.training.micro_batch_size * _of_a_pair(parametrization, layout))
    tokens = config.training.micro_batch_size * config.training.seq_length / layout.context
    vocabulary = parametrization.shapes["embedding.word_embeddings.weight"].spec.shape[0]
    most = 0.0
    for stage, chunks in enumerate(layout.stages):
        kept, again = zip(*(_layers(config, layout, chunk) for chunk in chunks), strict=True)
        held = _chunks_under_way(layout, stage) / len(chunks) * sum(kept) + max(again)
        if stage == layout.pipeline - 1:
            readouts = 1 + (config.model.mtp_num_layers or 0)
            element = element_bytes(config)
            ends = 2 * element * config.model.hidden_size / _sequence(layout)
            held += readouts * (ends + 4 * vocabulary / layout.tensor)
        most = max(most, held * tokens)
    return round(most)


def _of_a_pair(parametrization: Parametrization, layout: Layout) -> float:
    """Bytes for one source of s tokens and its target of t: upstream's encoder-decoder has no pipeline.

    A decoder's layer also keeps its cross-attention: queries and context for each token of the target, keys and values
    for each of the source, t · s scores.
    """
    config = parametrization.config
    source, target = config.training.seq_length, config.training.decoder_length
    hidden = element_bytes(config) * config.model.hidden_size / _sequence(layout)
    vocabulary = parametrization.shapes["embedding.word_embeddings.weight"].spec.shape[0]
    ffn = _ffn(config, layout, experts=False)
    encoder = source * (_attention(config, layout, source) + ffn)
    decoder = target * (_attention(config, layout, target) + ffn) + _cross_attention(config, layout)
    layers = config.model.stacks
    kept, again = zip(
        _recomputed(config, [encoder] * layers["encoder"], source * hidden),
        _recomputed(config, [decoder] * layers["decoder"], target * hidden),
        strict=True,
    )
    # Of each stack the input of its last norm and what comes out.
    return sum(kept) + max(again) + 2 * (source + target) * hidden + target * 4 * vocabulary / layout.tensor


def _cross_attention(config: Config, layout: Layout) -> float:
    """Bytes per pair of a cross-attention block."""
    model, source, target = config.model, config.training.seq_length, config.training.decoder_length
    heads = model.num_attention_heads / layout.tensor
    outside = target * 2 * model.hidden_size / _sequence(layout)
    kept = element_bytes(config) * (outside + 2 * (source + target) * heads * model.head_size)
    kept += target * _scores(config, heads * source)
    return kept + (target * model.hidden_size / _sequence(layout) if model.hidden_dropout else 0)


def _chunks_under_way(layout: Layout, stage: int) -> int:
    """Micro-batches, times chunks, whose activations a stage holds at most: 1F1B, or its interleaved form."""
    after = layout.pipeline - 1 - stage
    chunks = layout.virtual_pipeline
    ahead = after if chunks == 1 else 2 * after + (chunks - 1) * layout.pipeline
    return min(layout.micro_batches * chunks, ahead + 1)


def element_bytes(config: Config) -> int:
    """Of a weight or an activation."""
    return 2 if config.training.precision == "bf16" else 4


def _sequence(layout: Layout) -> int:
    """By how much activations between tensor-parallel regions are split."""
    return layout.tensor if layout.sequence_parallel else 1


def _layers(config: Config, layout: Layout, layers: Sequence[int]) -> tuple[float, float]:
    """`_recomputed` of the layers of a chunk, per token."""
    experts, length = config.model.expert_layers, config.training.seq_length
    whole = [_attention(config, layout, length) + _ffn(config, layout, experts[layer]) for layer in layers]
    return _recomputed(config, whole, element_bytes(config) * config.model.hidden_size / _sequence(layout))


def _recomputed(config: Config, whole: Sequence[float], kept: float) -> tuple[float, float]:
    """Bytes that layers keep for each micro-batch, and those of the ones that are computed again, once at a time.

    Args:
        config: the run.
        whole: bytes that each layer keeps where nothing is computed again.
        kept: bytes of a layer's input.
    """
    training = config.training
    if training.recompute_granularity != "full" or not whole:
        return sum(whole), 0.0
    each = training.recompute_num_layers or 1
    if training.recompute_method == "block":  # the first so many of the chunk
        return min(each, len(whole)) * kept + sum(whole[each:]), max(whole[:each])
    return math.ceil(len(whole) / each) * kept, min(each, len(whole)) * max(whole)


def _attention(config: Config, layout: Layout, keys: int) -> float:
    """Bytes per token of a self-attention block over so many keys: norm, projections, scores, dropout."""
    model, element, split = config.model, element_bytes(config), layout.tensor
    outside = 2 * model.hidden_size / _sequence(layout)  # the inputs of the norm and of the first projections
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        value = model.v_head_dim or 0
        ranks = 2 * (model.q_lora_rank or 0) + 2 * (model.kv_lora_rank or 0) + (model.qk_pos_emb_head_dim or 0)
        inside = heads * (2 * model.head_size + 2 * value) / split + ranks
    else:
        inside = (2 * heads + 2 * model.query_groups) * model.head_size / split
    kept = element * (outside + inside) + _scores(config, heads / split * keys)
    return kept + (model.hidden_size / _sequence(layout) if model.hidden_dropout else 0)


def _scores(config: Config, count: float) -> float:
    """Bytes of so many attention scores: their softmax, which dropout keeps once more, and its mask."""
    model, element = config.model, element_bytes(config)
    if model.core_attention not in ("auto", "megatron") or config.training.recompute_granularity == "selective":
        return 0.0
    return count * (element + (element + 1 if model.attention_dropout else 0))


def _ffn(config: Config, layout: Layout, experts: bool) -> float:
    """Bytes per token of a feed-forward block, dense or of experts: norm, projections, activation, dropout."""
    model, element = config.model, element_bytes(config)
    outside = 2 * model.hidden_size / _sequence(layout)
    drop = model.hidden_dropout and model.hidden_size / _sequence(layout)
    wide = 4 if model.gated_linear_unit else 2  # of the FFN size: before, within and after the activation
    if not experts:
        return element * (outside + wide * model.ffn_size / layout.tensor) + drop
    routed = model.moe_router_topk * (2 * model.hidden_size + wide * model.moe_ffn_size / layout.expert_tensor)
    shared = wide * (model.moe_shared_expert_intermediate_size or 0) / layout.tensor
    router = 4 * 2 * (model.num_moe_experts or 0)
    return element * (outside + routed / _sequence(layout) + shared) + router / _sequence(layout) + drop
