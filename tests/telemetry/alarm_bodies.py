"""A proxy's runs, their band, and targets with faults in them (test_alarms.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import prepare
from mup_megatron.engines.setup import resolve
from mup_megatron.model.build import parametrize
from mup_megatron.parallel import runtime
from mup_megatron.parallel.ranks import Rank
from mup_megatron.proof.controls import control
from mup_megatron.telemetry.band import make_band
from mup_megatron.telemetry.forecast import bins_of
from mup_megatron.telemetry.series import read_series
from mup_megatron.train import run as train_module
from tests.helpers.breakages import replaced

Fault = Callable[[Any, int], None]
"""Does something to an engine behind a step, after which so many are done."""


def proxy_of(config: Config, seed: int, folder: Path) -> Config:
    """The base itself."""
    return derive(config, {"model": config.proxy_model.model_dump(), "run.seed": seed, "run.dir": str(folder)})


def band(rank: Rank, *, config: Config, folder: Path, seeds: tuple[int, ...]) -> None:
    """Trains proxies, and writes their band as tuning does (tuning/lead.py)."""
    runs, losses = {}, {}
    for seed in seeds:
        own = proxy_of(config, seed, folder / f"proxy-{seed}")
        train_module.train(resolve(own, 1), rank)
        _again(rank)
        runs[str(seed)] = read_series(folder / f"proxy-{seed}" / "telemetry.jsonl")
        losses[str(seed)] = bins_of(folder / f"proxy-{seed}" / "metrics.jsonl", own.training.train_steps).full()
    proxy = proxy_of(config, seeds[0], folder)
    found = make_band(runs, parametrize(proxy, prepare(proxy).vocab_size), losses)
    assert found is not None
    found.write(folder / "transfer.band.json")


def _again(rank: Rank) -> None:
    """Another run in this process."""
    runtime.stop_distributed()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())


def target(
    rank: Rank, *, config: Config, fault: str | None = None, begins: int = 0, broken: str | None = None
) -> list[dict[str, Any]]:
    """Trains a target; its alarms.

    Args:
        rank: where.
        config: of the run, with `watch.band`.
        fault: of `FAULTS`.
        begins: the step behind which the fault is there.
        broken: a rule that model and optimizer lack, of the coordinate check's controls.
    """
    with contextlib.ExitStack() as stack:
        if broken is not None:
            stack.enter_context(_without_rule(broken))
        if fault is not None:
            stack.enter_context(_with_fault(FAULTS[fault], begins))
        train_module.train(resolve(config, rank.world_size), rank)
    path = Path(config.run.dir) / "alarms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def _without_rule(name: str) -> Iterator[None]:
    """Model and optimizer are of a table without a rule; who looks on has the right one."""
    from mup_megatron.model import build

    model, engine = build.build_model, train_module.build_engine

    def of(table: Any, layout: Any) -> Any:
        return control(name).break_(table, layout)

    def build_model(table: Any, layout: Any, *more: Any) -> Any:
        return model(of(table, layout), layout, *more)

    def build_engine(setup: Any, table: Any, chunks: Any) -> Any:
        return engine(setup, of(table, setup.layout), chunks)

    with replaced(build, "build_model", build_model), replaced(train_module, "build_engine", build_engine):
        yield


@contextlib.contextmanager
def _with_fault(fault: Fault, begins: int) -> Iterator[None]:
    engine = train_module.build_engine

    def build_engine(*given: Any) -> Any:
        made: Any = engine(*given)
        step, done = made.step, 0

        def stepped(*args: Any) -> Any:
            nonlocal done
            if done == begins:
                fault(made, done)
            done += 1
            return step(*args)

        made.step = stepped
        return made

    with replaced(train_module, "build_engine", build_engine):
        yield


def _rate_of(tensor: str, times: float) -> Fault:
    """The rate of the group that has a tensor is another."""

    def fault(engine: Any, _done: int) -> None:
        (group,) = engine.groups(dict(engine.named)[tensor])
        group["lr_multiplier"] *= times

    return fault


def _decay_of(tensor: str, value: float) -> Fault:
    """The decay of the group that has a tensor is another."""

    def fault(engine: Any, _done: int) -> None:
        (group,) = engine.groups(dict(engine.named)[tensor])
        group["weight_decay"] = value

    return fault


def _put_back(tensor: str) -> Fault:
    """Whatever a step makes of a tensor is undone behind it, as where somebody steps another copy."""

    def fault(engine: Any, _done: int) -> None:
        parameter = dict(engine.named)[tensor]
        kept = parameter.detach().clone()
        engine._inner.register_step_post_hook(lambda *_: parameter.data.copy_(kept))

    return fault


def _frozen(tensor: str) -> Fault:
    """No gradient comes to a tensor any more, and what the optimizer knows of it is gone."""

    def fault(engine: Any, _done: int) -> None:
        parameter = dict(engine.named)[tensor]
        parameter.register_hook(torch.zeros_like)
        for kind, value in engine._inner.state[parameter].items():
            if kind != "step":
                value.zero_()

    return fault


def _scaled(tensor: str, times: float) -> Fault:
    """Somebody wrote other values into a tensor."""

    def fault(engine: Any, _done: int) -> None:
        with torch.no_grad():
            dict(engine.named)[tensor].mul_(times)

    return fault


def _infinite(tensor: str) -> Fault:
    """One bit of one number is wrong."""

    def fault(engine: Any, _done: int) -> None:
        with torch.no_grad():
            dict(engine.named)[tensor].view(-1)[0] = float("inf")

    return fault


def _on_one_rank(tensor: str) -> Fault:
    """A machine changes a weight."""

    def fault(engine: Any, done: int) -> None:
        if torch.distributed.get_rank() == 1:
            _scaled(tensor, 1.001)(engine, done)

    return fault


def _of_noise(engine: Any, _done: int) -> None:
    """From now on the data are tokens in no order, as of a shard that is damaged."""
    loss = engine._loss

    def of(batch: Any) -> Any:
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        size = int(batch.tokens.max()) + 1
        noise = torch.randint(size, batch.tokens.shape, generator=generator)
        return loss(dataclasses.replace(batch, tokens=noise, labels=noise.roll(-1, dims=1)))

    engine._loss = of


FC1, QKV = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"
FAULTS: dict[str, Fault] = {
    "matrices at twice the rate": _rate_of(FC1, 2.0),
    "matrices at half the rate": _rate_of(FC1, 0.5),
    "the embedding at four times the rate": _rate_of(EMBEDDING, 4.0),
    "a frozen matrix": _frozen(FC1),
    "queries and keys eight times as large": _scaled(QKV, 8.0),
    "a matrix of a tenth": _scaled(FC1, 0.1),
    "a matrix of a hundredth": _scaled(FC1, 0.01),
    "a matrix with one infinity": _infinite(FC1),
    "decay of a norm": _decay_of("decoder.final_layernorm.weight", 0.1),
    "a group without decay": _decay_of(FC1, 0.0),
    "a tensor that is put back": _put_back(QKV),
    "one rank with another matrix": _on_one_rank(FC1),
    "a shard of noise": _of_noise,
    "a matrix without bounds": _scaled(FC1, float("inf")),
}
