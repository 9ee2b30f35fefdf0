"""An optimizer step on paper: what a rank computes and sends under a layout, and how long that takes on a device.

Public names: `KINDS`, `Device`, `Stage`, `Step`, `step_of`. docs/scaling.md has the model as a table, and what
it leaves out. A rank of n in a ring sends (n-1)/n of what they gather or scatter, and twice that of what they
all-reduce (ZeRO, arXiv 1910.02054, section 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mup_megatron.config import Config
from mup_megatron.parallel.layout import Layout
from mup_megatron.rules.table import WORD_EMBEDDINGS, Parametrization
from mup_megatron.tuning.budget import attention_flops, readout_flops
from mup_megatron.tuning.memory import element_bytes
from mup_megatron.tuning.shares import Share, on_stage, shares
from mup_megatron.util.progress import short_bytes

KINDS = ("data", "tensor", "pipeline", "expert", "context")
"""What ranks send to each other for, by the parallelism."""

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a step runs on; the defaults are an H100's in a DGX (NVIDIA's data sheets of both).

    Args:
        tflops: peak in the precision that is trained in, without sparsity.
        utilization: share of the peak that computing reaches, what is sent meanwhile left out.
        node: devices of a node.
        within: bytes/s that a device sends to others of its node: 900 GB/s of NVLink in both directions.
        between: bytes/s that it sends to other nodes: one 400 Gb/s adapter each.
    """

    tflops: float = 989.0
    utilization: float = 0.4
    node: int = 8
    within: float = 450e9
    between: float = 50e9


class Stage:
    """The first rank of a pipeline stage in one optimizer step; the others of the stage do as much, experts in balance.

    Args:
        parametrization: of a model of the next token (family gpt).
        layout: how ranks split it.
        number: of the stage.
        held: `shares(parametrization)`.
    """

    def __init__(self, parametrization: Parametrization, layout: Layout, number: int, held: Sequence[Share]) -> None:
        self._parametrization, self._layout, self._number = parametrization, layout, number
        config = self._config = parametrization.config
        self._held = on_stage(held, config, layout, number)
        self._last = number == layout.pipeline - 1
        self._ahead = (config.model.mtp_num_layers or 0) if self._last else 0
        self._layers = [layer for chunk in layout.stages[number] for layer in chunk]
        training = config.training
        self._tokens = layout.micro_batches * training.micro_batch_size * training.seq_length / layout.context
        self._element = element_bytes(config)
        self._hidden = config.model.hidden_size

    @property
    def flops(self) -> float:
        """Operations, as `budget.flops_per_token` counts them."""
        products = 6.0 * sum(share.products for share in self._held)
        attention = (len(self._layers) + self._ahead) * attention_flops(self._config)
        readouts = self._readouts * readout_flops(self._parametrization)
        return self._tokens / self._layout.tensor * (products + attention + readouts)

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that the rank sends, by kind."""
        found = (self._data(), self._tensor(), self._pipeline(), self._expert(), self._context())
        return dict(zip(KINDS, found, strict=True))

    @property
    def _readouts(self) -> int:
        return self._last + self._ahead

    def _data(self) -> float:
        """Gradients, and the weights that ranks step for each other: `_reduced` per element that the rank has."""
        layout = self._layout
        elements = sum(share.elements_on(layout) * _ring(layout.replicas(share.expert)) for share in self._held)
        return self._reduced() * elements

    def _reduced(self) -> float:
        """Bytes per element, before `_ring`: 1 to gather or to scatter it, 2 to all-reduce it, times its size.

        DeepSpeed's stages 1 and 2 all-reduce whole gradients (its default, use_multi_rank_bucket_allreduce), stage 2
        after each micro-batch. Stage 3 and FSDP2 gather weights forward and backward, and scatter gradients, for each
        micro-batch. Of megatron-core's optimizers that step experts and all else, each gathers the weights of both,
        unless the forward pass gathers them (`overlap_param_gather`).
        """
        layout, size, parallel = self._layout, self._element, self._config.parallel
        if layout.fully_sharded or layout.zero_stage == 3:
            return 3 * size * layout.micro_batches
        if parallel.engine == "deepspeed":
            times = layout.micro_batches if layout.zero_stage == 2 else 1
            return 2 * size * times + (size if layout.zero_stage else 0)
        if layout.distributed_optimizer:
            both = layout.expert > 1 and any(share.expert for share in self._held)
            return _FLOAT32 + size * (2 if both and not parallel.overlap_param_gather else 1)
        return 2 * _FLOAT32 + (size if layout.layer_wise else 0)

    def _tensor(self) -> float:
        """Activations of every split matrix, forward and backward (arXiv 1909.08053, section 3; 2205.05198, 4.2.2).

        Without sequence parallelism one all-reduce each. With it a row-parallel matrix's outputs are scattered and
        their gradients gathered; a column-parallel one's inputs are gathered in both passes, and their gradients
        scattered. Further the softmax over the vocabulary, three numbers per token, and gradients of what sees a part
        of the sequence.
        """
        layout, model = self._layout, self._config.model
        parts = layout.sequence_parallel
        column, put_together = (3, 2) if parts else (2, 1)
        learned = parts and model.position_embedding_type == "learned_absolute"
        width = sum(
            column * share.column + 2 * share.row + put_together * share.gathered for share in self._held
        ) + self._hidden * (column * self._readouts + (3 if learned else 2) * ((self._number == 0) + self._ahead))
        if model.multi_latent_attention:  # the key's rotary part, which all heads share
            width += 2 * (model.qk_pos_emb_head_dim or 0) * (len(self._layers) + self._ahead)
        softmax = 2 * 3 * _FLOAT32 * self._readouts
        gradients = 0.0
        if parts:
            deepspeed = self._config.parallel.engine == "deepspeed"
            size = self._element * layout.micro_batches if deepspeed else _FLOAT32
            gradients = 2.0 * size * sum(share.summed for share in self._held if not share.expert)
        return _ring(layout.tensor) * (self._tokens * (self._element * width + softmax) + gradients)

    def _pipeline(self) -> float:
        """Activations to the next part, gradients to the one before (arXiv 2104.04473); of a tied head's copies too."""
        layout, model = self._layout, self._config.model
        if layout.pipeline == 1:
            return 0.0
        first = self._number == 0
        sends = 2 * layout.virtual_pipeline - first - self._last
        sent = sends * self._tokens * self._element * self._hidden / (layout.tensor if layout.sequence_parallel else 1)
        if (first or self._last) and (model.share_embeddings_and_output_weights or model.mtp_num_layers):
            rows, columns = self._parametrization.shapes[WORD_EMBEDDINGS].spec.shape
            sent += _FLOAT32 * rows * columns / layout.tensor
        return sent

    def _expert(self) -> float:
        """Tokens to the ranks of their experts and back, forward and backward, with their probabilities."""
        layout, model = self._layout, self._config.model
        layers = sum(model.expert_layers[layer] for layer in self._layers) + self._ahead * model.expert_layers[-1]
        tokens = layers * self._tokens / (layout.tensor if layout.sequence_parallel else 1)
        each, split = 4 * self._element * self._hidden, layout.expert_tensor
        if model.moe_token_dispatcher_type == "allgather":  # noqa: S105
            return (layout.expert * split - 1) * tokens * (each + 2 * _FLOAT32 * (model.num_moe_experts or 0))
        routed = tokens * model.moe_router_topk * (each + 2 * _FLOAT32)
        return routed * (_ring(layout.expert) + split - 1)

    def _context(self) -> float:
        """Keys and values, gathered forward; their gradients, scattered backward."""
        layout, model = self._layout, self._config.model
        width = 2 * model.query_groups * model.head_size
        if model.multi_latent_attention:
            width = model.num_attention_heads * (model.head_size + (model.v_head_dim or 0))
        tokens = 2 * self._tokens * layout.context * len(self._layers)
        return _ring(layout.context) * tokens * self._element * width / layout.tensor


def _ring(ranks: int) -> float:
    """Share of a tensor that each rank sends where so many gather or scatter it."""
    return (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step of the stage that takes longest.

    Args:
        stage: its number.
        flops: of each of its ranks.
        sent: bytes that each of its ranks sends, by kind.
        bubble: time that the pipeline waits over the time that it works, (p - 1) / (v · m): arXiv 2104.04473, 2.2.
        computing: seconds.
        sending: seconds of all kinds but data, of which nothing is hidden.
        reducing: seconds of data that are not hidden.
    """

    stage: int
    flops: float
    sent: dict[str, float]
    bubble: float
    computing: float
    sending: float
    reducing: float

    @property
    def waiting(self) -> float:
        """Seconds of the bubble."""
        return (self.computing + self.sending) * self.bubble

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.computing + self.sending + self.waiting + self.reducing

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "seconds": self.seconds}

    @property
    def counts(self) -> str:
        """What is counted, for people."""
        sent = ", ".join(f"{kind} {short_bytes(size)}" for kind, size in self.sent.items() if size) or "nothing"
        return f"a step, per process at most: {self.flops:.3g} FLOPs; sent: {sent}; bubble {self.bubble:.2g}"

    @property
    def times(self) -> str:
        """How long it takes, for people."""
        return (
            f"a step, on paper: {self.seconds:.3g} s, of which {self.computing:.3g} computing, {self.sending:.3g} "
            f"sending, {self.waiting:.2g} in the bubble, {self.reducing:.2g} reducing"
        )


def step_of(
    parametrization: Parametrization, layout: Layout, device: Device, held: Sequence[Share] | None = None
) -> Step:
    """A step of a model of the next token.

    Args:
        parametrization: of the run.
        layout: how ranks split the model.
        device: what each rank is.
        held: `shares(parametrization)`, where they are made already.
    """
    held = held or shares(parametrization)
    stages = (
        _timed(Stage(parametrization, layout, number, held), number, parametrization.config, layout, device)
        for number in range(layout.pipeline)
    )
    return max(stages, key=lambda step: step.seconds)


def _timed(stage: Stage, number: int, config: Config, layout: Layout, device: Device) -> Step:
    """What is reduced over data-parallel ranks hides behind what goes on meanwhile, if the engine overlaps them.

    ZeRO 3 and FSDP2 gather and scatter beside all of the step, `overlap_grad_reduce` beside the last micro-batch.
    """
    sent, spans = stage.sent, _spans(layout)
    seconds = {kind: sent[kind] / (device.within if spans[kind] <= device.node else device.between) for kind in KINDS}
    computing = stage.flops / (device.tflops * 1e12 * device.utilization)
    hidden = 0.0
    if layout.fully_sharded or layout.zero_stage == 3:
        hidden = computing
    elif config.parallel.overlap_grad_reduce:
        hidden = computing / layout.micro_batches
    return Step(
        stage=number,
        flops=stage.flops,
        sent=sent,
        bubble=(layout.pipeline - 1) / (layout.virtual_pipeline * layout.micro_batches),
        computing=computing,
        sending=sum(seconds.values()) - seconds["data"],
        reducing=max(0.0, seconds["data"] - hidden),
    )


def _spans(layout: Layout) -> dict[str, int]:
    """In how many consecutive ranks a group lies, by kind."""
    stage, replica = layout.world_size // layout.pipeline, layout.tensor * layout.context
    early = layout.pipeline_before_data
    return {
        "data": layout.world_size if early else stage,
        "tensor": layout.tensor,
        "pipeline": (replica if early else stage) * layout.pipeline,
        "expert": layout.expert * layout.expert_tensor,
        "context": replica,
    }
