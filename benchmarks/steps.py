"""A training step of ours over one of plain megatron-core: same model and sizes, same DeepSpeed engine, one process.

Plain is GPTModel with upstream's local spec and two optimizer groups, in the standard parametrization.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from benchmarks.harness import alternate, ratios, spread
from mup_megatron import runtime
from mup_megatron.config import parse_config
from mup_megatron.data.batches import Batch
from mup_megatron.layout import resolve_layout

STEPS_A_RUN = 3


def measure(vocabulary: int, runs: int) -> dict[str, Any]:
    """Seconds per step, ours and plain, and their ratio, at one vocabulary size."""
    runtime.prepare_process()
    import deepspeed

    from benchmarks.plain import plain_groups, plain_model
    from mup_megatron.engines.deepspeed import DeepSpeedEngine, Mpu
    from mup_megatron.engines.deepspeed_config import deepspeed_config
    from mup_megatron.model import build_model, parametrize

    config = runtime.resolve_auto(parse_config(_config(vocabulary)))
    layout = resolve_layout(config, 1)
    device = runtime.start_distributed(layout, runtime.Rank(), config.run.seed)
    parametrization = parametrize(config, vocabulary)
    ours = DeepSpeedEngine(config, parametrization, build_model(config, parametrization, layout, 0, device), layout)
    model = plain_model(config, vocabulary, layout, device)
    optimizer = torch.optim.AdamW(plain_groups(model, config), lr=config.hparams.lr, betas=(0.9, 0.95))
    theirs, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, mpu=Mpu(), config=deepspeed_config(config, layout)
    )
    batch = _batch(config, vocabulary, device)

    def step_ours() -> None:
        for _ in range(STEPS_A_RUN):
            ours.step([batch], 1e-3)

    def step_plain() -> None:
        for _ in range(STEPS_A_RUN):
            losses = theirs(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
            loss = losses.float().mean()
            theirs.backward(loss)
            theirs.step()
            float(loss.detach())

    seconds = alternate({"ours": step_ours, "plain": step_plain}, runs)
    runtime.stop_distributed()
    return {
        "vocabulary": vocabulary,
        "seconds_per_step": {name: spread([s / STEPS_A_RUN for s in values]) for name, values in seconds.items()},
        "ours_over_plain": ratios(seconds, "ours", "plain"),
    }


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "run": {"dir": tempfile.gettempdir()},
        "model": {"architecture": "gpt3", "num_layers": 4, "hidden_size": 256, "num_attention_heads": 8},
        "base": {"hidden_size": 64, "num_attention_heads": 2},
        "hparams": {"lr": 1e-3, "weight_decay": 0.1},
        "training": {"global_batch_size": 8, "micro_batch_size": 8, "seq_length": 128, "train_steps": 1},
        "data": {"corpus": "stdlib", "tokenizer": {"vocab_size": vocabulary}},
    }


def _batch(config: Any, vocabulary: int, device: torch.device) -> Batch:
    shape = (config.training.micro_batch_size, config.training.seq_length)
    tokens = torch.randint(0, vocabulary, (shape[0], shape[1] + 1), device=device)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(shape, device=device),
        position_ids=torch.arange(shape[1], device=device).expand(shape).contiguous(),
        attention_mask=torch.ones(shape[1], shape[1], dtype=torch.bool, device=device).triu(1)[None, None],
    )
