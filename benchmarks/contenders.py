"""The contenders, in one process if need be: ours, plain megatron-core, and megatron-core's native MuP.

Same sizes, same layout, same kind of engine, same batch; `Bench` holds what they share, `build` makes one.
The text is random: what a step costs does not depend on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.native import native_groups, native_model
from benchmarks.plain import plain_groups, plain_model
from mup_megatron.config import Config, parse_config
from mup_megatron.data.gpt import GPTBatch
from mup_megatron.engines import build_engine
from mup_megatron.engines.deepspeed_mpu import Mpu
from mup_megatron.engines.megatron_config import ddp_config, optimizer_config
from mup_megatron.engines.optim import build_optimizer, set_learning_rates
from mup_megatron.engines.setup import resolve, resolve_auto
from mup_megatron.engines.setup.deepspeed import deepspeed_config
from mup_megatron.model.build import build_model, parametrize
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import Layout, resolve_layout
from mup_megatron.parallel.ranks import Rank

# What an architecture has besides; the base has a quarter of the sizes, and as many experts.
_MORE: dict[str, dict[str, int | float]] = {
    "gpt3": {},
    "llama": {"num_query_groups": 4},
    "moe": {"num_query_groups": 4, "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01},
}
# Layers, hidden size, heads, sequence, micro-batch; the base has a quarter of the width.
_SIZES = {"cpu": (4, 256, 8, 128, 8), "cuda": (12, 768, 12, 2048, 8)}
_TINY = (2, 64, 4, 16, 2)
# A bucket as large as these models: the default one, 2 GB, would be most of every contender's memory.
_DEEPSPEED = Path(__file__).with_name("deepspeed.json")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model that takes steps: `step` is one optimizer step on the same batch, and returns its loss."""

    model: GPTModel
    step: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What contenders share. Process groups are running while it is in use (`start` to runtime.stop_distributed)."""

    config: Config
    vocabulary: int
    layout: Layout
    device: torch.device
    batch: GPTBatch

    @property
    def width(self) -> float:
        """Hidden size over base hidden size."""
        return self.config.model.hidden_size / self.config.model.resized(self.config.base.width).hidden_size

    def describe(self) -> dict[str, Any]:
        """Sizes and layout, for the record."""
        model, training = self.config.model, self.config.training
        return {
            "architecture": "moe" if model.num_moe_experts else model.architecture,
            "engine": self.config.parallel.engine,
            "layout": str(self.layout),
            "precision": training.precision,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "base_hidden_size": self.config.base.hidden_size,
            "seq_length": training.seq_length,
            "micro_batch_size": training.micro_batch_size,
        }


def start(
    vocabulary: int,
    engine: str = "deepspeed",
    architecture: str = "gpt3",
    *,
    rank: Rank | None = None,
    tiny: bool = False,
    longer: int = 1,
) -> Bench:
    """Starts the process groups, of one rank or, tensor parallel, of those that a launcher started.

    Args:
        vocabulary: before padding.
        engine: `deepspeed` or `megatron`.
        architecture: `gpt3`, `llama` or `moe`.
        rank: of a launcher.
        tiny: for tests.
        longer: sequences are so many times as long.
    """
    rank = rank or Rank()
    upstream.prepare_process()
    layers, hidden, heads, sequence, batch = _TINY if tiny else _SIZES["cuda" if torch.cuda.is_available() else "cpu"]
    sequence *= longer
    more = dict(_MORE[architecture])
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **more}
    base = {"hidden_size": hidden // 4, "num_attention_heads": heads // 4}
    if "num_query_groups" in more:
        sizes |= {"num_query_groups": heads // 2, "ffn_hidden_size": 3 * hidden}
        base |= {"num_query_groups": max(1, heads // 8), "ffn_hidden_size": 3 * hidden // 4}
    if architecture == "moe":
        sizes["moe_ffn_hidden_size"], base["moe_ffn_hidden_size"] = hidden, hidden // 4
    config = resolve_auto(
        parse_config(
            {
                "run": {"dir": tempfile.gettempdir()},
                "model": {"architecture": "gpt3" if architecture == "gpt3" else "llama", **sizes},
                "base": base,
                "hparams": {"lr": 1e-3, "weight_decay": 0.1},
                "training": {
                    "global_batch_size": batch,
                    "micro_batch_size": batch,
                    "seq_length": sequence,
                    "train_steps": 1,
                },
                "parallel": {
                    "engine": engine,
                    "tensor_model_parallel_size": rank.world_size,
                    **({"deepspeed_config": str(_DEEPSPEED)} if engine == "deepspeed" else {}),
                },
                "data": {"corpus": "stdlib", "tokenizer": {"vocab_size": vocabulary}},
            }
        )
    )
    layout = resolve_layout(config, rank.world_size)
    device = runtime.start_distributed(layout, rank, config.run.seed)
    shape = (batch, sequence)
    same = torch.Generator(device=device).manual_seed(1)
    tokens = torch.randint(0, vocabulary, (batch, sequence + 1), device=device, generator=same)
    return Bench(
        config=config,
        vocabulary=vocabulary,
        layout=layout,
        device=device,
        batch=GPTBatch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            loss_mask=torch.ones(shape, device=device),
            position_ids=torch.arange(sequence, device=device).expand(shape).contiguous(),
            attention_mask=torch.ones(sequence, sequence, dtype=torch.bool, device=device).triu(1)[None, None],
        ),
    )


def build(name: str, bench: Bench) -> Contender:
    """The contender `ours`, `plain` or `native`, ready for its first step."""
    if name == "ours":
        parametrization = parametrize(bench.config, bench.vocabulary)
        world = bench.layout.world_size
        chunks = build_model(parametrization, bench.layout, torch.distributed.get_rank(), bench.device)
        ours = build_engine(resolve(bench.config, world), parametrization, chunks)
        return Contender(model=chunks[0], step=lambda: ours.step([bench.batch], bench.config.hparams.lr).loss)
    build_theirs, group = {"plain": (plain_model, plain_groups), "native": (native_model, native_groups)}[name]
    model = build_theirs(bench.config, bench.vocabulary, bench.layout, bench.device)
    if bench.config.parallel.engine == "megatron":
        return Contender(model=model, step=_in_megatron(model, bench))
    return Contender(model=model, step=_in_deepspeed(model, group(model, bench.config), bench))


def _in_deepspeed(model: GPTModel, groups: Iterable[dict[str, Any]], bench: Bench) -> Callable[[], float]:
    """Upstream's model in a bare DeepSpeed engine: the loop that a user of plain megatron-core would write."""
    lr, batch = bench.config.hparams.lr, bench.batch
    groups = [{"lr": lr, **group} for group in groups]
    groups = [{**group, "lr_multiplier": group["lr"] / lr} for group in groups]
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(bench.config, groups),
        mpu=Mpu(),
        config=deepspeed_config(bench.config, bench.layout),
    )

    def step() -> float:
        set_learning_rates(optimizer, lr)
        losses = engine(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
        loss = (losses.float() * batch.loss_mask).sum() / batch.loss_mask.sum()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _in_megatron(model: GPTModel, bench: Bench) -> Callable[[], float]:
    """Upstream's model under upstream's engine: what megatron.training's train_step does of it."""
    settings = ddp_config(bench.config, bench.layout)
    wrapped = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(
        optimizer_config(bench.config, bench.layout), [wrapped], use_gloo_process_groups=False
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    batch, training = bench.batch, bench.config.training

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (losses.float() * batch.loss_mask).sum() / batch.loss_mask.sum()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place

    def forward(_batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        return model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels), loss_of

    def step() -> float:
        wrapped.train()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        (found,) = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=wrapped,
            num_microbatches=1,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        return float(found["loss"])

    return step
