"""What the tests of telemetry run on ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from mup_megatron.config import Config
from mup_megatron.data.batches import Batches, build_datasets
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.optim import LearningRateSchedule
from mup_megatron.model.global_names import named_modules
from mup_megatron.parallel.ranks import Rank
from mup_megatron.telemetry.reading import Readings
from tests.helpers import bodies

Found = dict[tuple[str, str], float]


def readings(rank: Rank, *, config: Config, steps: int, broken: str = "nothing") -> list[Found]:
    """What is found at each of some steps."""
    with bodies.break_(broken):
        engine, batches, schedule, table, layout = _begin(rank, config)
        taken = Readings(engine.chunks, engine, table, layout, torch.device("cpu"))
        found = []
        for step in range(steps):
            taken.begin()
            engine.before_update = taken.before_update
            engine.step(batches[step], schedule(step))
            taken.after_update()
            told = taken.result()
            assert told is not None
            found.append(told)
        engine.close()
    return found


def _begin(rank: Rank, config: Config) -> Any:
    config, layout, table, chunks = bodies.start(rank, config)
    engine = bodies.build_engine(config, table, chunks, layout)
    batches = Batches(build_datasets(config, prepare(config))[0], config, layout, rank.rank, torch.device("cpu"))
    return engine, batches, LearningRateSchedule(config.training, config.hparams.lr), table, layout


def by_hand(rank: Rank, *, config: Config, steps: int) -> list[Found]:
    """Another computation of the same in one process: of the tensors themselves, in float64."""
    engine, batches, schedule, table, _ = _begin(rank, config)
    seen: dict[str, list[torch.Tensor]] = {}
    attention: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if torch.is_tensor(output) and output.is_floating_point():
                seen.setdefault(name, []).append(output.detach().double().flatten())

        return hook

    def keep_attention(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            query, key = (tensor.detach().double() for tensor in inputs[:2])
            group = query.size(2) // key.size(2)
            logits = [
                module.softmax_scale * torch.einsum("tbd,sbd->bts", query[:, :, head], key[:, :, head // group])
                for head in range(query.size(2))
            ]
            attention.setdefault(name, []).append(torch.stack(logits))

        return hook

    for name, module in named_modules(engine.chunks):
        module.register_forward_hook(keep(name))
        if name.endswith("core_attention"):
            module.register_forward_pre_hook(keep_attention(name))
    found = []
    for step in range(steps):
        seen.clear()
        attention.clear()
        gradients: dict[str, torch.Tensor] = {}

        def grads(gradients: dict[str, torch.Tensor] = gradients) -> None:
            gradients.update({name: parameter.grad.double().clone() for name, parameter in engine.named})

        before = {name: parameter.detach().double().clone() for name, parameter in engine.named}
        engine.before_update = grads
        engine.step(batches[step], schedule(step))
        told: Found = {}
        for name, outputs in seen.items():
            whole = torch.cat(outputs)
            told[name, "output rms"] = float(whole.square().mean().sqrt())
            told[name, "largest output"] = float(whole.abs().max())
        for name, logits in attention.items():
            told.update({(name, quantity): value for quantity, value in _of_attention(torch.stack(logits)).items()})
        for name, parameter in engine.named:
            weight = float(before[name].square().mean().sqrt())
            change = parameter.detach().double() - before[name]
            told[name, "weight rms"] = weight
            told[name, "gradient rms"] = float(gradients[name].square().mean().sqrt())
            if weight:
                told[name, "update over weight"] = float(change.square().mean().sqrt()) / weight
            told[name, "rate"] = schedule(step) / config.hparams.lr * table.tensors[name].lr
            told[name, "decay"] = told[name, "rate"] * table.tensors[name].weight_decay
        told["run", "schedule"] = schedule(step) / config.hparams.lr
        found.append(told)
    engine.close()
    return found


def _of_attention(logits: torch.Tensor) -> dict[str, float]:
    """Of logits [n, a, b, t, t] of no more than 64 queries: causal attention, so that query i sees i + 1 keys."""
    assert logits.size(-2) <= 64
    largest, entropies = 0.0, []
    for query in range(logits.size(-2)):
        own = logits[..., query, : query + 1]
        largest = max(largest, float(own.abs().max()))
        shares = own.softmax(dim=-1)
        entropies.append(-(shares * shares.log()).sum(dim=-1).mean())
    assert math.isfinite(largest)
    return {"largest logit": largest, "attention entropy": float(torch.stack(entropies).mean())}
