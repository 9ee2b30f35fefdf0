"""Checks that need a GPU: correctness on CUDA, speed and MFU. One process, one GPU; also runs on a CPU, to be tested.

    python -m benchmarks.gpu --out DIR [--quick] [--parts checks,pipeline,speed]

Writes DIR/gpu.json, what it finds as soon as it is found; exit status 1 if a correctness check failed. Needs torch with
CUDA, megatron-core and deepspeed importable (on a bare machine: `pip install --no-deps` their wheels), and this
repository as the working directory.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import alternate, ratios, spread
from mup_megatron.checkpoints.run_directory import CONTROLS
from mup_megatron.config import parse_config
from mup_megatron.data.gpt import GPTBatch
from mup_megatron.engines.setup import resolve, resolve_auto
from mup_megatron.model import init
from mup_megatron.parallel import runtime, upstream
from mup_megatron.parallel.layout import resolve_layout
from mup_megatron.parallel.ranks import Rank
from mup_megatron.report.run_data import read_run
from mup_megatron.rules.shapes import Fused, Init, TensorSpec
from mup_megatron.tuning.process import environment
from mup_megatron.util.files import write_whole
from mup_megatron.util.provenance import provenance

# Dense bf16 peak of the tensor cores, FLOP/s, by device name; MFU is left out for others.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
KERNELS: dict[str, dict[str, str]] = {
    "megatron": {"core_attention": "megatron"},
    "sdpa": {"core_attention": "sdpa"},
    "transformer_engine": {"transformer_impl": "transformer_engine"},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt3": {},
    "llama": {"architecture": "llama", "num_query_groups": 1},
    "attention sinks": {"architecture": "llama", "softmax_type": "learnable"},
    "experts": {"architecture": "llama", "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64},
    "latent attention": {
        "architecture": "llama",
        "multi_latent_attention": True,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 32,
    },
}
SIZES = {  # name: layers, hidden, heads, sequence, micro batch
    "125M": (12, 768, 12, 2048, 8),
    "350M": (24, 1024, 16, 2048, 8),
    "1.3B": (24, 2048, 16, 2048, 4),
}


def main() -> int:
    """Runs every check, writes the result, says what failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works at all")
    parser.add_argument("--parts", default="checks,pipeline,speed", help="of these, the ones to run")
    arguments = parser.parse_args()
    upstream.prepare_process()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments.out.mkdir(parents=True, exist_ok=True)
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "init sees no layout": lambda: check_init(device),
        "ZeRO stages agree": lambda: check_stages(device),
        "engines agree": lambda: check_engines(device),
        **{f"as on the CPU: {name}": functools.partial(check_cpu, device, name) for name in MODELS},
        "kernels agree": lambda: check_kernels(device),
        "base shape is plain megatron-core": lambda: check_base(device),
    }
    pipeline = {"tune, transfer, train": lambda: check_pipeline(quick=arguments.quick or device.type == "cpu")}
    sizes = {"tiny": (2, 128, 4, 64, 4)} if arguments.quick or device.type == "cpu" else SIZES
    parts = arguments.parts.split(",")
    result: dict[str, Any] = {"provenance": provenance(None), "device": str(device), "checks": {}, "speed": []}
    asked = (checks if "checks" in parts else {}) | (pipeline if "pipeline" in parts else {})
    for name, check in asked.items():
        result["checks"][name] = _guarded(check)
        print(name, result["checks"][name], flush=True)
        write_whole(arguments.out / "gpu.json", json.dumps(result, indent=1) + "\n")
    for name, size in sizes.items() if "speed" in parts else ():
        result["speed"].append({"model": name, **_guarded(functools.partial(speed, device, *size))})
        print(result["speed"][-1], flush=True)
        write_whole(arguments.out / "gpu.json", json.dumps(result, indent=1) + "\n")
    failed = [name for name, check in result["checks"].items() if not check.get("passed")]
    print("failed: " + ", ".join(failed) if failed else "every check passed")
    return 1 if failed else 0


def _guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception:
        said = traceback.format_exc().strip().splitlines()[-3:]
        runtime.stop_distributed()  # the next check starts its own
        return {"passed": False, "error": said}


def check_init(device: torch.device) -> dict[str, Any]:
    """Slices of every tensor-parallel size equal the whole, to the last bit, on this device."""
    fused = Fused(runs=(("gate", 1536), ("up", 1536)))
    wrong = 0
    for partition_dim, stride in ((0, 1), (1, 1), (0, 2)):
        blocks = fused if stride == 2 else None
        spec = TensorSpec(
            shape=(3072, 2048),
            fan_in=1,
            fan_out=0,
            init=Init.WEIGHT,
            partition_dim=partition_dim,
            partition_stride=stride,
            fused=blocks,
        )
        std: dict[str | None, float] = {"gate": 0.02, "up": 0.03} if blocks else {None: 0.02}
        whole = torch.empty(spec.shape, device=device)
        init.fill(whole, seed=1, name="w", spec=spec, std=std)
        for ranks in (2, 4, 8):
            for rank in range(ranks):
                part = torch.empty(spec.local_shape(ranks), device=device)
                init.fill(part, seed=1, name="w", spec=spec, std=std, rank=rank, ranks=ranks)
                wrong += int((part != _slice(whole, partition_dim, stride, rank, ranks)).sum())
    return {"passed": wrong == 0, "values_that_differ": wrong}


def _slice(whole: torch.Tensor, dim: int, stride: int, rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in whole.chunk(stride, dim)], dim)


def check_stages(device: torch.device) -> dict[str, Any]:
    """Losses of 20 fp32 steps under ZeRO 0, 1, 2 and 3 within 2e-5 of each other."""
    losses = [_train(device, {"zero_stage": stage}, "fp32", 20) for stage in range(4)]
    worst = max(abs(a / b - 1) for other in losses[1:] for a, b in zip(other, losses[0], strict=True))
    return {"passed": worst < 2e-5, "largest_deviation": worst, "losses": [losses[0][0], losses[0][-1]]}


def check_engines(device: torch.device) -> dict[str, Any]:
    """Losses of 20 steps under the Megatron engine, plain and distributed optimizer, against DeepSpeed's.

    fp32 within 2e-5; bf16 within 1 %.
    """
    worst: dict[str, float] = {}
    for precision, stage in (("fp32", 0), ("bf16", 1)):
        expected = _train(device, {"zero_stage": stage}, precision, 20)
        for distributed in (False, True):
            parallel = {"engine": "megatron", "use_distributed_optimizer": distributed}
            losses = _train(device, parallel, precision, 20)
            deviation = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
            worst[precision] = max(worst.get(precision, 0.0), deviation)
    return {"passed": worst["fp32"] < 2e-5 and worst["bf16"] < 0.01, "largest_deviation": worst}


def check_cpu(device: torch.device, name: str) -> dict[str, Any]:
    """Losses of ten steps against those of fp32 on the CPU, from the same weights, in a process of their own.

    fp32 within 1e-4; bf16 with fp32 master weights within 1 %. The weights are drawn on the CPU: those that CUDA draws
    are others (model/init.py).
    """
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        program = (
            "import json, torch; from benchmarks import gpu; gpu.upstream.prepare_process(); "
            f"print(json.dumps(gpu.on_the_cpu({name!r}, {str(weights)!r})))"
        )
        alone = {**environment(Rank(), dict(os.environ)), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", program]
        ended = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)  # noqa: S603
        if ended.returncode:
            return {"passed": False, "error": ended.stderr.strip().splitlines()[-3:]}
        expected = json.loads(ended.stdout.splitlines()[-1])
        worst, ends = {}, {"cpu": [expected[0], expected[-1]]}
        for precision in ("fp32", "bf16"):
            losses = _train(device, {"zero_stage": 1}, precision, 10, MODELS[name], load=weights)
            worst[precision] = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
            ends[precision] = [losses[0], losses[-1]]
    return {
        "passed": worst["fp32"] < 1e-4 and worst["bf16"] < 0.01,
        "largest_deviation": worst,
        "first_and_last_losses": ends,
    }


def on_the_cpu(name: str, weights: str) -> list[float]:
    """Losses of ten steps of fp32 on the CPU; what they start from is left in a file."""
    return _train(torch.device("cpu"), {"zero_stage": 1}, "fp32", 10, MODELS[name], save=Path(weights))


def check_kernels(device: torch.device) -> dict[str, Any]:
    """Losses of 20 steps with torch's and (where it is installed) Transformer Engine's kernels.

    Against megatron-core's own attention: fp32 within 2e-5 for torch's; bf16 within 1 %.
    """
    kernels = ["sdpa"]
    if device.type == "cuda" and upstream.importable("transformer_engine"):
        kernels.append("transformer_engine")
    worst: dict[str, float] = {}
    for precision in ("fp32", "bf16"):
        parallel = {"zero_stage": 1}
        expected = _train(device, parallel, precision, 20, KERNELS["megatron"])
        for name in kernels:
            losses = _train(device, parallel, precision, 20, KERNELS[name])
            worst[f"{name} {precision}"] = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
    passed = all(deviation < (2e-5 if name == "sdpa fp32" else 0.01) for name, deviation in worst.items())
    return {"passed": passed, "largest_deviation": worst}


def check_base(device: torch.device) -> dict[str, Any]:
    """At the base shape, from the same weights, the same losses as plain megatron-core, to the last bit."""
    ours, theirs = _pair(device, 2, 128, 4, 64, 4, base=128, core_attention="megatron")
    losses = [(ours(), theirs()) for _ in range(10)]
    runtime.stop_distributed()
    return {"passed": all(a == b for a, b in losses), "losses": losses[-1]}


def check_pipeline(quick: bool) -> dict[str, Any]:
    """The demo's pipeline on this device, its control included: how it ends, what it chose, all losses."""
    short = ("training.train_steps=8", "training.lr_warmup_steps=1", "training.eval_interval=4", "tuning.train_steps=8")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "mup_megatron",
            "pipeline",
            "configs/demo.yaml",
            "--control",
            f"run.dir={folder}",
        ]
        command += [*short, "tuning.trials=3", "tuning.repeat_best=1", "tuning.repeat_seeds=1"] if quick else []
        began = time.monotonic()
        alone = environment(Rank(), dict(os.environ))  # earlier checks left their rank behind
        ended = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)  # noqa: S603
        seconds = time.monotonic() - began
        if ended.returncode:
            return {"passed": False, "error": ended.stderr.strip().splitlines()[-3:]}
        run = read_run(Path(folder))
        losses = [curve.eval_loss for curve in run.curves]
        study = run.record.study if run.record else None
    return {
        "passed": len(losses) == 3 and losses[0] is not None and math.isfinite(losses[0]),
        "values": study.values if study else None,
        "noise": study.noise if study else None,
        "eval_loss": dict(zip(("mup", *CONTROLS), losses, strict=False)),
        "seconds": seconds,
    }


def speed(device: torch.device, layers: int, hidden: int, heads: int, sequence: int, batch: int) -> dict[str, Any]:
    """Tokens per second and MFU of ours, and step time over plain megatron-core's, alternating."""
    ours, theirs = _pair(device, layers, hidden, heads, sequence, batch, base=hidden // 4)
    seconds = alternate({"ours": ours, "plain": theirs}, runs=7, warmup=3)
    runtime.stop_distributed()
    tokens = batch * sequence
    parameters = 12 * layers * hidden**2
    flops = 6 * tokens * parameters + 12 * layers * hidden * sequence * tokens
    step = spread(seconds["ours"])
    peak = next((p for name, p in PEAK.items() if device.type == "cuda" and name in torch.cuda.get_device_name()), None)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "passed": True,
        "seconds_per_step": step,
        "tokens_per_second": tokens / step["median"],
        "mfu": flops / step["median"] / peak if peak else None,
        "ours_over_plain": ratios(seconds, "ours", "plain"),
        "peak_gibibytes_of_both": memory,
    }


def _config(**changes: Any) -> Any:
    sizes = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
    base = {"hidden_size": 32, "num_attention_heads": 1}
    data = {
        "run": {"dir": tempfile.gettempdir()},
        "model": {"architecture": "gpt3", **sizes, **changes.pop("model", {})},
        "base": changes.pop("base", base),
        "hparams": {"lr": 4e-3, "weight_decay": 0.1, "init_method_std": 0.05},
        "training": {"global_batch_size": 8, "micro_batch_size": 8, "seq_length": 64, "train_steps": 20},
        "data": {"corpus": "stdlib", "tokenizer": {"vocab_size": 512}},
    }
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values}
    return resolve_auto(parse_config(data))


def _batch(config: Any, vocabulary: int, device: torch.device, seed: int) -> GPTBatch:
    """Text in which the next token follows from the last one most of the time: losses fall."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.training.micro_batch_size, config.training.seq_length + 1)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    follows = torch.rand(shape, generator=generator) < 0.7
    for position in range(1, shape[1]):
        tokens[:, position] = torch.where(
            follows[:, position], (tokens[:, position - 1] * 7 + 3) % vocabulary, tokens[:, position]
        )
    tokens = tokens.to(device)
    size = shape[1] - 1
    return GPTBatch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(shape[0], size, device=device),
        position_ids=torch.arange(size, device=device).expand(shape[0], size).contiguous(),
        attention_mask=torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None],
    )


def _train(
    device: torch.device,
    parallel: dict[str, Any],
    precision: str,
    steps: int,
    model: dict[str, Any] | None = None,
    *,
    save: Path | None = None,
    load: Path | None = None,
) -> list[float]:
    """Losses of a small model's steps; the weights that it starts from may be kept in a file, or come from one."""
    from mup_megatron.engines import build_engine
    from mup_megatron.model.build import build_model, parametrize

    config = _config(parallel=parallel, training={"precision": precision}, model=dict(model or {}))
    layout = resolve_layout(config, 1)
    runtime.start_distributed(layout, Rank(), config.run.seed)
    parametrization = parametrize(config, 512)
    setup = resolve(config, 1)
    chunks = build_model(parametrization, layout, 0, device)
    if save is not None:
        torch.save({key: value for key, value in chunks[0].state_dict().items() if torch.is_tensor(value)}, save)
    if load is not None:
        chunks[0].load_state_dict(torch.load(load, map_location=device, weights_only=True), strict=False)
    engine = build_engine(setup, parametrization, chunks)
    losses = [engine.step([_batch(config, 512, device, step)], config.hparams.lr).loss for step in range(steps)]
    engine.close()
    runtime.stop_distributed()
    return losses


def _pair(
    device: torch.device, layers: int, hidden: int, heads: int, sequence: int, batch: int, base: int, **kernels: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    """A step of ours and one of plain megatron-core, from the same weights, in the same kind of engine."""
    import deepspeed

    from benchmarks.plain import plain_groups, plain_model
    from mup_megatron.engines.deepspeed import DeepSpeedEngine
    from mup_megatron.engines.deepspeed_mpu import Mpu
    from mup_megatron.engines.optim import build_optimizer
    from mup_megatron.engines.setup.deepspeed import deepspeed_config
    from mup_megatron.model.build import build_model, parametrize

    vocabulary = 50304 if device.type == "cuda" else 512
    config = _config(
        model={
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "kv_channels": hidden // heads,
            **kernels,
        },
        base={"hidden_size": base, "num_attention_heads": max(1, heads * base // hidden)},
        training={
            "global_batch_size": batch,
            "micro_batch_size": batch,
            "seq_length": sequence,
            "train_steps": 1,
            "precision": "auto",
        },
    )
    layout = resolve_layout(config, 1)
    runtime.start_distributed(layout, Rank(), config.run.seed)
    parametrization = parametrize(config, vocabulary)
    model = build_model(parametrization, layout, 0, device)
    plain = plain_model(config, vocabulary, layout, device)
    plain.load_state_dict(model[0].state_dict())
    ours = DeepSpeedEngine(resolve(config, 1), parametrization, model)
    groups = [{**group, "lr": config.hparams.lr} for group in plain_groups(plain, config)]
    theirs, _, _, _ = deepspeed.initialize(
        model=plain, optimizer=build_optimizer(config, groups), mpu=Mpu(), config=deepspeed_config(config, layout)
    )
    text = _batch(config, vocabulary, device, seed=0)

    def step_ours() -> float:
        return ours.step([text], config.hparams.lr).loss

    def step_plain() -> float:
        losses = theirs(text.tokens, text.position_ids, text.attention_mask, labels=text.labels)
        loss = losses.float().mean()
        theirs.backward(loss)
        theirs.step()
        return float(loss.detach())

    return step_ours, step_plain


if __name__ == "__main__":
    began = time.monotonic()
    status = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(status)
