"""What a run costs before its first step: `explain` of GPT-3 175B, and drawing the weights."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.harness import alternate, spread
from mup_megatron import init
from mup_megatron.shapes import Init, TensorSpec

GPT3_175B = {
    "run": {"dir": "unused"},
    "model": {
        "architecture": "gpt3",
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "vocab_size": 50257,
    },
    "base": {"hidden_size": 256, "num_attention_heads": 2},
    "hparams": {"lr": 6e-3},
    "training": {"global_batch_size": 32, "micro_batch_size": 1, "seq_length": 2048, "train_steps": 1},
    "parallel": {"tensor_model_parallel_size": 8},
    "data": {"corpus": "stdlib", "tokenizer": {"vocab_size": 50257}},
}


def explain(runs: int) -> dict[str, Any]:
    """Seconds and peak memory of `mup-megatron explain` on 175B parameters at TP 8, as a process of its own."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "175b.yaml"
        config.write_text(yaml.safe_dump(GPT3_175B), encoding="utf-8")
        command = [sys.executable, "-m", "mup_megatron", "explain", str(config), "--world-size", "8", "--json"]
        for _ in range(runs):
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
            seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"model": "GPT-3 175B, TP 8", "seconds": spread(seconds), "peak_mebibytes": round(peak)}


def draw(device: torch.device, runs: int) -> dict[str, Any]:
    """Drawing a rank's half of a 4096 x 4096 weight against torch's own normal_ of the same size."""
    spec = TensorSpec(shape=(4096, 4096), fan_in=1, fan_out=0, init=Init.WEIGHT, partition_dim=0)
    tensor = torch.empty(init.local_shape(spec, 2), device=device)

    def ours() -> None:
        init.fill(tensor, seed=1, name="w", spec=spec, std={None: 0.02}, rank=1, ranks=2)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def theirs() -> None:
        tensor.normal_(std=0.02)
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = alternate({"ours": ours, "torch": theirs}, runs)
    million = tensor.numel() / 1e6
    return {
        "device": device.type,
        "million_values_per_second": {name: spread([million / s for s in values]) for name, values in seconds.items()},
    }
