"""Reverse transfer: a small model that takes the rates of a large one in the standard parametrization as they are.

Public names: `reverse`, `small_model`, `lines`, `write`. In the standard parametrization a large model is its own base
of µP (docs/parametrization.md, section 7, identity 1). So the small model in µP whose base sizes are the large one's,
with the large one's hyperparameters, learns in steps of the same size. A rate that is too high for the large model is
too high for the small one (Tensor Programs V, appendix I). Its curve differs, because logits at step 0 fall with width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mup_megatron.checkpoints.run_directory import write_whole
from mup_megatron.config import Config, derive
from mup_megatron.data.prepare import data_directory
from mup_megatron.data.record import tokens_digest
from mup_megatron.parallel import upstream
from mup_megatron.proof.grid import Grid, Job, comparable
from mup_megatron.util.errors import UserError
from mup_megatron.util.files import as_json, as_yaml, read_text
from mup_megatron.util.provenance import provenance

REVERSED, LARGE, SMALL = "small, reversed", "large, standard", "small, standard"
_SMOOTH = 5


def small_model(config: Config) -> Config:
    """The small model in µP whose base is the config's own model.

    Args:
        config: the large run; `base:` names the sizes that grow, and the small model's.

    Raises:
        ConfigError: `base:` names no width.
    """
    small = config.base.width.sizes
    if not small:
        raise config.error("base", "names no size of a smaller model; expected hidden_size, ...")
    name = config.parametrization.name
    if name not in ("mup", "standard"):
        raise config.error(
            "parametrization.name",
            f"{name} gives every tensor of the large model a deviation of its own, and the small one takes a single "
            "hparams.init_method_std from it; expected standard",
        )
    given = config.model.model_dump()
    large = {name: given[name] for name in small}
    if missing := [name for name, size in large.items() if size is None]:
        raise config.error(
            f"model.{missing[0]}", "missing; base: names it, and the small model is made by swapping both"
        )
    # Layers and experts are the large model's in both: no rule over them moves anything.
    others = {name: given[name] for name in config.base.sizes if name not in small}
    keys = {f"base.{name}": size for name, size in (large | others).items()}
    keys |= {f"model.{name}": size for name, size in small.items()}
    # A folder of its own, since the large run's checkpoints are not of this model; the same text.
    own = {"run.dir": str(Path(config.run.dir) / "reverse" / "small"), "data.dir": str(data_directory(config))}
    return derive(config, {**keys, **own, "parametrization.name": "mup", "run.name": f"{config.run.name}, reversed"})


def reverse(config: Config, rates: Sequence[float], seeds: int, grid: Grid, *, compare: bool) -> dict[str, Any]:
    """Trains the small model with the large one's hyperparameters.

    Args:
        config: the large run, its values those of the standard parametrization.
        rates: learning rates; the config's own where there are none.
        seeds: repetitions.
        grid: where runs are trained.
        compare: also train the large model, and the small one with the same values in the standard parametrization.

    Returns:
        What is written as JSON: loss (nats per token) per step of every run, how far it rose, and the small config.

    Raises:
        UserError: bad input.
        Stopped: SIGTERM; the same command goes on.
    """
    if seeds < 1:
        raise UserError(f"--seeds: {seeds}: expected 1 or more")
    upstream.prepare_process()
    small = small_model(config)
    models = {REVERSED: small}
    if compare:
        standard = {"parametrization.name": "standard"}
        models |= {LARGE: derive(config, standard), SMALL: derive(small, standard)}
    jobs: dict[tuple[str, float, int], Job] = {}
    for label, model in models.items():
        alike = derive(comparable(model), {"data.dir": str(data_directory(config))})
        for lr in rates or [config.hparams.lr]:
            for seed in range(config.run.seed, config.run.seed + seeds):
                name = f"{label.replace(', ', '-')}-lr-{lr:.6g}-seed-{seed}"
                jobs[label, lr, seed] = Job(name=name, config=derive(alike, {"hparams.lr": lr, "run.seed": seed}))
    grid.prepare([next(iter(jobs.values())).config])
    outcomes = grid.run(list(jobs.values()))
    curves = []
    for (label, lr, seed), job in jobs.items():
        outcome, losses = outcomes[job.name], _losses(grid.directory / "runs" / job.name)
        run = {"model": label, "lr": lr, "seed": seed, "state": outcome.state, "reason": outcome.reason}
        risen = rise(losses) if outcome.state == "complete" else None
        curves.append({**run, "rise": risen, "losses": losses})
    configs = {"small": small.model_dump(), "config": config.model_dump()}
    return as_json({"curves": curves, **configs, "provenance": provenance(tokens_digest(config))})


def rise(losses: Sequence[float]) -> float:
    """How far the loss rises above the lowest so far at most, both means of five steps; 0 where it only falls."""
    smooth = [sum(losses[start : start + _SMOOTH]) / _SMOOTH for start in range(max(0, len(losses) - _SMOOTH + 1))]
    lowest, found = math.inf, 0.0
    for loss in smooth:
        lowest = min(lowest, loss)
        found = max(found, loss - lowest)
    return found


def _losses(directory: Path) -> list[float]:
    lines = (json.loads(line) for line in read_text(directory / "metrics.jsonl", most=None).splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def lines(result: Mapping[str, Any]) -> list[str]:
    """A result for people."""
    said = []
    for curve in result["curves"]:
        last = next((loss for loss in reversed(curve["losses"]) if loss is not None), math.nan)
        if curve["state"] == "complete":
            how = f"rises by {curve['rise']:.3f} at most, ends at {last:.4f}"
        else:
            how = f"{curve['state']} after {len(curve['losses'])} steps: {curve['reason']}"
        said.append(f"{curve['model']}, lr {curve['lr']:.4g}, seed {curve['seed']}: {how}")
    return said


def write(result: Mapping[str, Any], directory: Path) -> tuple[Path, Path]:
    """Writes reverse.json, and reverse.yaml, the small model's run."""
    found, small = directory / "reverse.json", directory / "reverse.yaml"
    write_whole(found, json.dumps(result, allow_nan=False) + "\n")
    write_whole(small, as_yaml(result["small"]))
    return found, small
